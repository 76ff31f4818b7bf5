"""Processors that all hosts share, as in a lab on one machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from wingbeat.simulator.agenda import Agenda


class Busy(float):
    """Seconds that occupy a processor."""


class Cores:
    """Runs work on ``count`` processors in FIFO order; None: each thread has its own."""

    def __init__(self, agenda: Agenda, count: int | None = None) -> None:
        self._agenda, self._free = agenda, count
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def work(self, seconds: float, over: Callable[[], None]) -> None:
        """Call ``over`` when ``seconds`` of work are done."""
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
