"""Emulated time of the paced model, kept by deadlines.

Each of hundreds of short sleeps would end tens of microseconds late. So a layer moves a deadline
forward and sleeps until then, and an overshoot shortens the next sleep.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

SHORTEST_SLEEP = 0.2e-3
"""Seconds. A shorter wait is added to that of the next layer."""

SLACK = 0.5e-3
"""Seconds between layers that the clock absorbs; a longer time counts as a wait.

A GPU's launch queue hides about as much of the host's time.
"""

_PR_SET_TIMERSLACK = 29
_prepared = threading.local()


def sharpen_timers() -> None:
    """Set Linux's timer slack of this thread to 1 ns instead of 50 us; later calls are free.

    Best effort: without it sleeps end later, which the deadlines correct.
    """
    if getattr(_prepared, "done", False) or not sys.platform.startswith("linux"):
        return
    _prepared.done = True
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (AttributeError, OSError):
        pass


class Clock:
    """The emulated device's time (``due``), and when the model last ran (``left``).

    The model calls :meth:`enter` when it gets control and :meth:`spend` for the time of a piece of
    work, in seconds. Real work in between, such as writing a gradient, counts as part of the
    emulated time; an excess is deducted from later layers.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self.left = 0.0

    def restart(self) -> None:
        """Start a forward or backward pass now."""
        sharpen_timers()
        self.due = self.left = time.perf_counter()

    def enter(self) -> None:
        """Move the deadline back if other code ran for longer than :data:`SLACK`."""
        now = time.perf_counter()
        if now - self.left > SLACK:
            late = max(0.0, self.left - self.due)
            self.due = max(self.due, now - late)
        self.left = now

    def spend(self, seconds: float) -> None:
        """Advance the emulated time by ``seconds``."""
        self.due += seconds
        self._sleep(SHORTEST_SLEEP)

    def settle(self) -> None:
        """Sleep the remaining time at the end of a pass."""
        self._sleep(0.0)

    def _sleep(self, shortest: float) -> None:
        now = time.perf_counter()
        ahead = self.due - now
        if ahead > shortest:
            time.sleep(ahead)
            now = time.perf_counter()
        self.left = now
