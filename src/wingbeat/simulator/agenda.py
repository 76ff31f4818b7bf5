"""Virtual time: a queue of scheduled actions."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable

_YOUNG = 50_000
"""New objects between searches for garbage: most of a run's are in the agenda, and survive."""


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

    def skip(self, when: float) -> bool:
        """Advance to ``when`` if no action is due until then; False: one is, or the agenda stops.

        An action that would schedule its continuation and return can continue at once instead.
        """
        if self._stopped or (self._entries and self._entries[0][0] <= when):
            return False
        self.now = when
        return True

    def run(self) -> None:
        """Run actions, including new ones, until none is left or `stop` is called."""
        usual = gc.get_threshold()
        gc.set_threshold(max(_YOUNG, usual[0]) if usual[0] else 0, *usual[1:])
        try:
            while self._entries and not self._stopped:
                self.now, _, action = heapq.heappop(self._entries)
                action()
        finally:
            gc.set_threshold(*usual)

    def stop(self) -> None:
        """Stop after the current action."""
        self._stopped = True
