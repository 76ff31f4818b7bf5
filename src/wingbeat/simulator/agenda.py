"""Virtual time: a queue of scheduled actions."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Runs actions in order of time; ties run in the order of entry, so a run is deterministic."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._stopped = False

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` at ``when``, which is not before now."""
        heapq.heappush(self._entries, (when, self._entered, action))
        self._entered += 1

    def run(self) -> None:
        """Run actions, including new ones, until none is left or `stop` is called."""
        while self._entries and not self._stopped:
            self.now, _, action = heapq.heappop(self._entries)
            action()

    def stop(self) -> None:
        """Stop after the current action."""
        self._stopped = True
