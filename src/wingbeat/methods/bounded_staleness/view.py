"""Who takes part: a number for each worker that only grows, so that any two views can be merged.

A worker's number is even while it lives, in its life number / 2, and odd when that life is over.
Two workers that have learned different things merge them by taking the larger number of each.
"""

from __future__ import annotations

import functools
from typing import NewType

View = NewType("View", tuple[int, ...])


def whole(workers: int) -> View:
    """Return the view of a job that begins: all live, none has died before."""
    return View((0,) * workers)


def nobody(workers: int) -> View:
    """Return the view of a worker that comes back, before it has been let in: it covers none."""
    return View((-1,) * workers)


def merge(a: View, b: View) -> View:
    """Return what is known to whoever knows both."""
    return View(tuple(map(max, a, b)))


def covers(a: View, b: View) -> bool:
    """Whether all of ``b`` is known in ``a``."""
    return all(x >= y for x, y in zip(a, b, strict=True))


def without(view: View, worker: int) -> View:
    """Return the view in which a life of ``worker`` is over; the same if it was."""
    return View((*view[:worker], view[worker] | 1, *view[worker + 1 :]))


def with_life(view: View, worker: int, life: int) -> View:
    """Return the view in which ``worker`` lives its life ``life``, counted from 0."""
    return View((*view[:worker], max(view[worker], 2 * life), *view[worker + 1 :]))


@functools.lru_cache(maxsize=64)
def members(view: View) -> tuple[int, ...]:
    """Return those that live."""
    return tuple(worker for worker, number in enumerate(view) if number % 2 == 0)


def owner(view: View, piece: int) -> int:
    """Return who adds up a piece: the worker of its number, or the next that lives."""
    n = len(view)
    return next(w % n for w in range(piece, piece + n) if view[w % n] % 2 == 0)


def inherited(view: View, piece: int) -> bool:
    """Whether a piece's worker has ever died, so that its rounds begin anew with each view."""
    return view[piece] != 0
