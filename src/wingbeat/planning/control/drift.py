"""When to measure, and when what was measured no longer holds: counted in iterations. Pure logic.

Every worker counts the same iterations, so all plan before the same backward, and all look at the
same rows of iteration times to find out whether to plan anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from wingbeat.errors import PeerError

SETTLING = 2
"""Iterations after a change of buckets that do not count."""

WINDOW = 50
"""Iterations whose median is compared with that of the first ones after planning."""

_LONGEST_S = 1e9


class Drift:
    """One worker's count of iterations: first those that are measured, then windows.

    What is measured before there is a plan is measured again under it, where exchanges compete with
    backward for the processors, and planned a second time.

    Args:
        steps: iterations that are measured before planning.
        factor: iterations that take this many times as long, or as short, call for a new plan.
        windows: how many windows in a row have to be that far off. One of several may be another
            job's doing.

    Attributes:
        watching: whether iterations are measured, to plan from what they show.
        first: whether nothing has been planned since measuring began.
    """

    def __init__(self, steps: int, factor: float, windows: int = 1) -> None:
        self.watching = self.first = True
        self._steps, self._factor, self._windows = steps, factor, windows
        self._off = 0
        self._seen = 0
        self._laps: list[float] = []
        self._usual = 0.0

    def due(self) -> bool:
        """Whether enough has been measured: plan now."""
        return self.watching and self._seen > SETTLING + self._steps

    def lap(self, seconds: float) -> None:
        """Count one boundary; ``seconds`` is what the iteration before it took, 0 if unknown."""
        self._seen += 1
        if self._seen > SETTLING + 1 and seconds > 0:
            self._laps.append(seconds)

    def median(self) -> float:
        """Return the median of the laps so far, 0 without any."""
        return statistics.median(self._laps) if self._laps else 0.0

    def planned(self, *, known: bool = False) -> None:
        """A plan was made: count anew, to measure under it or, after that, in windows.

        A plan that is ``known``, from a file, was measured so when it was made.
        """
        self._restart()
        self.watching = self.first and not known
        self.first = False
        self._usual, self._off = 0.0, 0

    def reports(self) -> bool:
        """Whether this iteration ends a window, so that all workers tell their medians."""
        return not self.watching and self._seen == SETTLING + WINDOW

    def take(self, medians: Sequence[float]) -> tuple[float, float] | None:
        """Hear the medians of all workers, equal on each, and begin the next window.

        Returns:
            The usual and the present median in seconds, if they are far apart: measuring begins
            anew; None otherwise.

        Raises:
            PeerError: a median is no time; names the rank that sent it.
        """
        for rank, value in enumerate(medians):
            if not (math.isfinite(value) and 0 <= value <= _LONGEST_S):
                raise PeerError(
                    f"rank {rank} sent {value!r} where its median iteration time was due, in "
                    "seconds; all workers have to run the same wingbeat"
                )
        now = max(medians)
        self._restart()
        if self._usual == 0.0 or now == 0.0:
            self._usual = now
            return None
        if 1 / self._factor <= now / self._usual <= self._factor:
            self._off = 0
            return None
        self._off += 1
        if self._off < self._windows:
            return None
        usual, self._usual, self._off = self._usual, 0.0, 0
        self.watching = self.first = True
        return usual, now

    def _restart(self) -> None:
        self._seen = 0
        self._laps.clear()
