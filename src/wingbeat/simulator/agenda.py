"""Virtual time: what happens when, and nothing else."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Things to do, each at a moment; of those at one moment, the first entered is done first.

    So a run depends on nothing but what it is given.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._stopped = False

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Have ``action`` done at the moment ``when``, which is not before now."""
        heapq.heappush(self._entries, (when, self._entered, action))
        self._entered += 1

    def run(self) -> None:
        """Do everything, and what is entered meanwhile, until nothing is left or it is stopped."""
        while self._entries and not self._stopped:
            self.now, _, action = heapq.heappop(self._entries)
            action()

    def stop(self) -> None:
        """Do nothing after what is done now."""
        self._stopped = True
