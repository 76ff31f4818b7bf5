"""The paced model's clock: emulated time, kept by deadlines.

Hundreds of short sleeps cannot be exact one by one: each ends tens of microseconds late. So a
layer does not sleep for its time; it moves a deadline forward and sleeps until that. What one
sleep overshoots, the next is shorter by.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

SHORTEST_SLEEP = 0.2e-3
"""Seconds. A deadline nearer than this is not slept for: the next layer takes it along."""

SLACK = 0.5e-3
"""Seconds. Time away from the model that the clock absorbs, layer by layer.

A GPU hides as much of the host's own time in its launch queue. Anything longer is a wait, for a
message say, and costs what it costs.
"""

_PR_SET_TIMERSLACK = 29
_prepared = threading.local()


def sharpen_timers() -> None:
    """Ask Linux to wake this thread on time: 1 ns of slack instead of 50 us. Costs nothing twice.

    Best effort: without it a sleep ends a little later, which the deadlines make good.
    """
    if getattr(_prepared, "done", False) or not sys.platform.startswith("linux"):
        return
    _prepared.done = True
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (AttributeError, OSError):
        pass


class Clock:
    """Where the emulated device is (``due``) and when the model last had the thread (``left``).

    The model calls :meth:`enter` when control comes back to it and :meth:`spend` for the time of
    a piece of work, in seconds. Between the two its own real work (writing a gradient) may run:
    that counts as part of the emulated time, and where it is longer, later layers make up for it.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self.left = 0.0

    def restart(self) -> None:
        """Start from now: a forward or a backward pass begins."""
        sharpen_timers()
        self.due = self.left = time.perf_counter()

    def enter(self) -> None:
        """Notice how long others had the thread; beyond :data:`SLACK` the deadline moves back."""
        now = time.perf_counter()
        if now - self.left > SLACK:
            late = max(0.0, self.left - self.due)
            self.due = max(self.due, now - late)
        self.left = now

    def spend(self, seconds: float) -> None:
        """Let ``seconds`` of emulated time pass, on top of all that went before."""
        self.due += seconds
        self._sleep(SHORTEST_SLEEP)

    def settle(self) -> None:
        """Sleep what is left: a pass ends."""
        self._sleep(0.0)

    def _sleep(self, shortest: float) -> None:
        now = time.perf_counter()
        ahead = self.due - now
        if ahead > shortest:
            time.sleep(ahead)
            now = time.perf_counter()
        self.left = now
