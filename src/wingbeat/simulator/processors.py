"""Processors in virtual time: those of a host, or of the machine that emulates several hosts."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from wingbeat.simulator.agenda import Agenda


class Busy(float):
    """Seconds that occupy a processor."""


class Cores:
    """Processors that the work on them shares evenly; None: each thread has its own.

    A thread has one processor at most. Linux divides its processors in slices of a few
    milliseconds, and a thread that wakes up seldom waits for the slice of another to end.
    """

    def __init__(self, agenda: Agenda, count: int | None = None) -> None:
        self._agenda, self._count = agenda, count
        # ``_given`` are the seconds that work which was never over would have received by
        # ``_since``, and ``_ends`` has what they are when each piece of work is done.
        self._given = self._since = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = self._version = 0

    def work(self, seconds: float, over: Callable[[], None]) -> None:
        """Call ``over`` when ``seconds`` of work are done."""
        if self._count is None or not seconds:
            self._agenda.at(self._agenda.now + seconds, over)
            return
        self._settle()
        self._entered += 1
        heapq.heappush(self._ends, (self._given + seconds, self._entered, over))
        self._expect()

    def _settle(self) -> None:
        """Count the seconds given up to now."""
        now = self._agenda.now
        self._given += self._share * (now - self._since)
        self._since = now

    @property
    def _share(self) -> float:
        """Processors of each piece of work."""
        assert self._count is not None, "they are counted"
        return min(1.0, self._count / max(1, len(self._ends)))

    def _expect(self) -> None:
        """Schedule the end of the work that is done first."""
        self._version = version = self._version + 1
        if self._ends:
            ahead = max(0.0, self._ends[0][0] - self._given) / self._share
            self._agenda.at(self._agenda.now + ahead, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        self._given = self._ends[0][0]
        done = []
        while self._ends and self._ends[0][0] <= self._given:
            done.append(heapq.heappop(self._ends)[2])
        self._expect()
        for over in done:
            over()
