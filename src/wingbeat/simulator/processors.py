"""Processors in virtual time: those of a host, or of the machine that emulates several hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from wingbeat.simulator.agenda import Agenda

SLICE_S = 1.4e-3
"""Seconds for which a thread has a processor that others wait for.

The slice of Linux 6.6 and later on a machine with two processors (``base_slice_ns``); it is longer
with more. A thread that wakes up waits for the slices of those that run to end.
"""


class Busy(float):
    """Seconds that occupy a processor."""


class Cores:
    """Processors that threads have in turn, for a slice each; None: each thread has its own.

    A thread that has more work at once keeps its processor until its slice ends. One that has
    waited, and wakes an idle processor, has ``wake_s`` more seconds of work.
    """

    def __init__(self, agenda: Agenda, count: int | None = None, wake_s: float = 0.0) -> None:
        self._agenda, self._free, self._wake_s = agenda, count, wake_s
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._slice_left = 0.0  # of the thread whose work is over, and that may have more

    @property
    def unlimited(self) -> bool:
        """Whether each thread has a processor."""
        return self._free is None

    def spend(self, seconds: float, over: Callable[[], None], woken: bool = False) -> bool:
        """Work, as the last thing that an action does; return True if nothing is due meanwhile.

        The work is done then. Otherwise ``over`` is called when it is. ``woken``: the thread has
        waited before.
        """
        seconds += self._waking_s(woken)
        alone = self._free != 0 or (self._slice_left and not self._waiting)
        if alone and self._agenda.skip(self._agenda.now + seconds):
            return True
        self.work(seconds, over)
        return False

    def work(self, seconds: float, over: Callable[[], None], woken: bool = False) -> None:
        """Call ``over`` when ``seconds`` of work are done; ``woken`` as in `spend`."""
        seconds += self._waking_s(woken)
        if self._free is None or not seconds:
            self._agenda.at(self._agenda.now + seconds, over)
        elif self._slice_left:
            left, self._slice_left = self._slice_left, 0.0
            self._run(seconds, over, left)
        elif self._free:
            self._free -= 1
            self._run(seconds, over)
        else:
            self._waiting.append((seconds, over))

    def _waking_s(self, woken: bool) -> float:
        idle = self._free and not self._slice_left
        return self._wake_s if woken and idle else 0.0

    def _run(self, seconds: float, over: Callable[[], None], most_s: float = SLICE_S) -> None:
        """Have a processor for a slice, or the rest of one."""
        now = min(seconds, most_s)
        self._agenda.at(
            self._agenda.now + now, lambda: self._ran(seconds - now, over, most_s - now)
        )

    def _ran(self, left: float, over: Callable[[], None], slice_left: float) -> None:
        if left:
            self._waiting.append((left, over))
        else:
            self._slice_left = slice_left
            over()
            if slice_left and not self._slice_left:
                return  # it has more work
            self._slice_left = 0.0
        if self._waiting:
            self._run(*self._waiting.popleft())
        else:
            assert self._free is not None, "they are counted"
            self._free += 1
