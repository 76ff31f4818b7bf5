"""What a worker has heard of the others."""

from __future__ import annotations

from collections.abc import Iterable

from wingbeat.methods.bounded_staleness.messages import Here
from wingbeat.methods.bounded_staleness.view import View, members


class Others:
    """Where the others are.

    Args:
        rank: who hears.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._heard: dict[int, Here] = {}

    def hear(self, worker: int, here: Here) -> None:
        """Keep the latest."""
        self._heard[worker] = here

    def forget(self, worker: int) -> None:
        """Know nothing of a worker: its life is over."""
        self._heard.pop(worker, None)

    def peers(self, view: View) -> tuple[int, ...]:
        """Return who lives beside this worker."""
        return tuple(worker for worker in members(view) if worker != self._rank)

    def _known(self, view: View) -> Iterable[Here | None]:
        return (self._heard.get(worker) for worker in self.peers(view))

    def reach(self, view: View, iteration: int) -> bool:
        """Whether nobody is before ``iteration``, or will be again."""
        return all(
            here is not None and (here.ended or here.at >= iteration) for here in self._known(view)
        )

    def behind(self, view: View, iteration: int) -> tuple[int, ...]:
        """Return who is before ``iteration``, and has not ended."""
        heard = ((worker, self._heard.get(worker)) for worker in self.peers(view))
        return tuple(w for w, h in heard if h is None or not (h.ended or h.at >= iteration))

    def training(self, view: View) -> tuple[int, ...]:
        """Return who lives and has not ended, as far as is known."""
        return tuple(
            w for w in self.peers(view) if w not in self._heard or not self._heard[w].ended
        )

    def ended(self, view: View) -> bool:
        """Whether all have ended."""
        return all(here is not None and here.ended for here in self._known(view))

    def where(self, view: View, worker: int) -> int:
        """Return the iteration of a worker; 0 if it has not said so yet, -1 if it does not live."""
        if view[worker] % 2:
            return -1
        here = self._heard.get(worker)
        return 0 if here is None else here.at

    def fastest(self, view: View) -> int | None:
        """Return who has applied most, and lacks nothing; None if that is not known of any.

        What was said before a view held may not be true any more.
        """
        heard = ((w, self._heard.get(w)) for w in self.peers(view))
        known = [(here.applied, -w) for w, here in heard if here is not None and here.view == view]
        most, worker = max(known, default=(-1, 0))
        return -worker if most >= 0 else None

    def has_all(self, view: View, worker: int) -> bool:
        """Whether a worker has not said, in this view, that it has to pull parameters itself."""
        here = self._heard.get(worker)
        return here is not None and here.view == view and here.applied >= 0

    def lack(self, view: View) -> bool:
        """Whether all have said that they have to pull parameters."""
        heard = tuple(self._known(view))
        return all(h is not None and h.view == view and h.applied < 0 for h in heard)

    def safe(self, view: View) -> int:
        """Return how many rounds two others have applied, or one where there is only one.

        So one more worker may die, and their sums can still be had.
        """
        known = sorted(
            (h.applied if h is not None else -1 for h in self._known(view)), reverse=True
        )
        return known[min(1, len(known) - 1)] if known else 0
