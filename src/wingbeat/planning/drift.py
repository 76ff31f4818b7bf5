"""Drift detection: when to measure, and when measurements are outdated. Pure logic.

Every worker counts the same iterations and compares the same medians, so all plan and detect drift
before the same backward.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from wingbeat.errors import PeerError

WARMUP = 2
"""Iterations after a change of buckets that do not count."""

WINDOW = 50
"""Iterations of a window, whose median is compared with that of the first window."""

_LONGEST_S = 1e9


class DriftDetector:
    """Counts iterations on one worker: first a measuring phase, then windows.

    After ``steps`` iterations a first plan is made. Measurements are repeated under it, where
    exchanges compete with backward for processors, and a second plan is made. Drift is a change of
    the median by more than ``factor`` in either direction, in ``windows`` consecutive windows; a
    single window may be due to another job. ``first`` is True from a start until its first plan.
    """

    def __init__(self, steps: int, factor: float, windows: int = 1) -> None:
        self.measuring = self.first = True
        self._steps, self._factor, self._windows = steps, factor, windows
        self._off = 0
        self._seen = 0
        self._times: list[float] = []
        self._reference = 0.0

    def due(self) -> bool:
        """Return whether enough was measured to plan now."""
        return self.measuring and self._seen > WARMUP + self._steps

    def count(self, seconds: float) -> None:
        """Count one iteration boundary."""
        self._seen += 1
        if self._seen > WARMUP + 1 and seconds > 0:
            self._times.append(seconds)

    def median(self) -> float:
        """Return the median of the iterations so far, 0 without any."""
        return statistics.median(self._times) if self._times else 0.0

    def planned(self, *, known: bool = False) -> None:
        """Begin the next phase after a plan was made; a ``known`` plan needs no second one."""
        self._restart()
        self.measuring = self.first and not known
        self.first = False
        self._reference, self._off = 0.0, 0

    def window_ended(self) -> bool:
        """Return whether this iteration ends a window, so that all workers exchange medians."""
        return not self.measuring and self._seen == WARMUP + WINDOW

    def compare(self, medians: Sequence[float]) -> tuple[float, float] | None:
        """Compare the medians of all workers, equal on each, and begin the next window.

        Return the reference and the current median in seconds after drift, None otherwise.

        Raises:
            PeerError: a median is no time; the message names the rank that sent it.
        """
        for rank, value in enumerate(medians):
            if not (math.isfinite(value) and 0 <= value <= _LONGEST_S):
                raise PeerError(
                    f"rank {rank} sent {value!r} as its median iteration time in seconds; all "
                    "workers have to run the same wingbeat"
                )
        now = max(medians)
        self._restart()
        if self._reference == 0.0 or now == 0.0:
            self._reference = now
            return None
        if 1 / self._factor <= now / self._reference <= self._factor:
            self._off = 0
            return None
        self._off += 1
        if self._off < self._windows:
            return None
        reference, self._reference, self._off = self._reference, 0.0, 0
        self.measuring = self.first = True
        return reference, now

    def _restart(self) -> None:
        self._seen = 0
        self._times.clear()
