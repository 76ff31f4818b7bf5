"""Views of the membership, and how workers agree on a view change.

A view has one number for each worker. The number is even while the worker is alive, in incarnation
number / 2, and odd when that incarnation has ended. Numbers only grow, so merging two views takes
the larger number of each worker.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NewType

View = NewType("View", tuple[int, ...])

Watermarks = tuple[tuple[int, ...], ...]
"""By colayer and worker: the last iteration of which a piece was summed; -1 for none."""


def initial_view(workers: int) -> View:
    """Return the view in which a job starts: all workers are alive in their first incarnation."""
    return View((0,) * workers)


def merge_views(a: View, b: View) -> View:
    """Return the view with all information of both."""
    return View(tuple(map(max, a, b)))


def covers(a: View, b: View) -> bool:
    """Whether ``a`` contains all information of ``b``."""
    return all(x >= y for x, y in zip(a, b, strict=True))


def without_worker(view: View, worker: int) -> View:
    """Return the view in which the current incarnation of ``worker`` has ended."""
    return View((*view[:worker], view[worker] | 1, *view[worker + 1 :]))


def with_incarnation(view: View, worker: int, incarnation: int) -> View:
    """Return the view in which ``worker`` is alive in ``incarnation``, counted from 0."""
    return View((*view[:worker], max(view[worker], 2 * incarnation), *view[worker + 1 :]))


@functools.lru_cache(maxsize=64)
def members(view: View) -> tuple[int, ...]:
    """Return the workers that are alive."""
    return tuple(worker for worker, number in enumerate(view) if number % 2 == 0)


def piece_owner(view: View, piece: int) -> int:
    """Return the worker that sums a piece: the one with its number, or the next living one."""
    n = len(view)
    return next(w % n for w in range(piece, piece + n) if view[w % n] % 2 == 0)


def is_reassigned(view: View, piece: int) -> bool:
    """Whether the worker of a piece has ever died; its rounds then restart in each view."""
    return view[piece] != 0


@dataclass(frozen=True, slots=True)
class ViewProposal:
    """A worker's proposal of a view, with the rounds that the worker has.

    Attributes:
        complete: rounds of which it has all pieces of all colayers; -1 if it is joining.
        watermarks: the contributions in these rounds, by piece.
    """

    view: View
    complete: int
    watermarks: tuple[Watermarks, ...]


@dataclass(frozen=True, slots=True)
class CommittedView:
    """The result of a view change.

    Attributes:
        best: the proposal with the most complete rounds; the lowest rank breaks ties.
    """

    view: View
    best: ViewProposal


class ViewChange:
    """One worker's part in the agreement on a view.

    Each worker sends all others the largest view that it has received, and the rounds that it has.
    A worker that receives a larger view merges it and sends its proposal again. A view commits when
    every member has proposed exactly this view. All members have then stopped accepting rounds of
    workers that died, and compute the same result from the same proposals.

    Attributes:
        proposed: the view that this worker proposed last.
    """

    def __init__(self, view: View, *, joining: bool = False) -> None:
        self.proposed = view
        self.view = View((-1,) * len(view)) if joining else view
        self._proposals: dict[int, ViewProposal] = {}

    @property
    def in_progress(self) -> bool:
        """Whether a view has been proposed and is not committed."""
        return self.proposed != self.view

    def propose(self, view: View) -> bool:
        """Merge ``view`` into the proposal; return whether the proposal has changed."""
        view = merge_views(self.proposed, view)
        if view == self.proposed:
            return False
        self.proposed = view
        self._proposals = {}
        return True

    def add_proposal(self, worker: int, proposal: ViewProposal) -> None:
        """Record a worker's proposal; ignore one for another view, which will be sent again."""
        if proposal.view == self.proposed:
            self._proposals[worker] = proposal

    def commit(self) -> CommittedView | None:
        """Commit the proposed view; return None while proposals of members are missing."""
        if not self.in_progress or any(w not in self._proposals for w in members(self.proposed)):
            return None
        self.view = self.proposed
        _, best = min(self._proposals.items(), key=lambda item: (-item[1].complete, item[0]))
        return CommittedView(self.view, best)
