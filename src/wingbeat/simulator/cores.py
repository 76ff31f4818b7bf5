"""Processors that all hosts share, as those of a lab on one machine do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from wingbeat.simulator.agenda import Agenda


class Busy(float):
    """Seconds that need a processor; others pass by themselves."""


class Cores:
    """Does work on so many processors, first come, first served.

    Args:
        count: of them; None if each thread has one of its own.
    """

    def __init__(self, agenda: Agenda, count: int | None = None) -> None:
        self._agenda, self._free = agenda, count
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def work(self, seconds: float, over: Callable[[], None]) -> None:
        """Call ``over`` when so many seconds of work are done."""
        if self._free is None:
            self._agenda.at(self._agenda.now + seconds, over)
        elif self._free:
            self._free -= 1
            self._begin(seconds, over)
        else:
            self._waiting.append((seconds, over))

    def _begin(self, seconds: float, over: Callable[[], None]) -> None:
        self._agenda.at(self._agenda.now + seconds, lambda: self._end(over))

    def _end(self, over: Callable[[], None]) -> None:
        if self._waiting:
            self._begin(*self._waiting.popleft())
        else:
            assert self._free is not None, "they are counted"
            self._free += 1
        over()
