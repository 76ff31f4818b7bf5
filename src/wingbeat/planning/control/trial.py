"""Whether a codec makes iterations shorter: a state machine that measures with and without it.

Both times are measured in the run itself, whole iterations at a time: so they contain what the
codec's arithmetic costs, what the links gain, and how much of both is hidden. One `Trial` runs on
every worker. All hear the same rows and conclude the same from them, so nobody has to decide for
the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from wingbeat.errors import PeerError

ROW_LENGTH = 2
"""A row: seconds of an iteration, 0 if unknown, and the number of the block it belongs to."""

LAPS = 3
"""Iterations that count in a block; blocks with the codec and without it take turns."""

MAX_BLOCKS = 6

SETTLING = 1
"""Iterations at the begin of a block that do not count, for buffers and sockets to get warm."""

SETTLING_FIRST = 3
"""The same for the first block, in which the order of gradients is learnt as well."""

WORTHWHILE = 0.97
"""A codec stays on if it takes at most this share of the time without it."""

CLEAR = 1.25
"""A difference so large, in either direction, that one block of each is enough."""


class Trial:
    """One worker's part in finding out whether a codec makes iterations shorter.

    Attributes:
        coded: whether the codec is to be used now.
        block: the number of the present block.
        done: the decision is made, and is in ``coded``.
        with_codec: seconds of each counted iteration with the codec, the slowest worker's.
        without: the same without it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.coded = True
        self.block = 0
        self.done = False
        self.with_codec: list[float] = []
        self.without: list[float] = []
        self._rank, self._size = rank, size
        self._heard = 0

    def report(self, seconds: float) -> list[float]:
        """Return the row for the next exchange: what the last iteration took, 0 if unknown."""
        known = math.isfinite(seconds) and seconds > 0
        return [float(seconds) if known else 0.0, float(self.block)]

    def take(self, rows: Sequence[Sequence[float]]) -> bool:
        """Hear one exchange; return whether ``coded`` has changed or the trial is done.

        Raises:
            PeerError: a row is malformed; names the rank that sent it.
        """
        self._check(rows)
        if any(row[1] != self.block or row[0] == 0 for row in rows):
            return False
        self._heard += 1
        settling = SETTLING if self.block else SETTLING_FIRST
        if self._heard > settling:
            times = self.with_codec if self.coded else self.without
            times.append(max(row[0] for row in rows))
        if self._heard == settling + LAPS:
            self._next_block()
            return True
        return False

    @property
    def ratio(self) -> float:
        """Median time with the codec over median time without it."""
        return statistics.median(self.with_codec) / statistics.median(self.without)

    def _next_block(self) -> None:
        self.block += 1
        self._heard = 0
        if self.block % 2 == 0:
            clear = not 1 / CLEAR < self.ratio < CLEAR
            if clear or self.block == MAX_BLOCKS:
                self.done = True
                self.coded = self.ratio <= WORTHWHILE
                return
        self.coded = not self.coded

    def _check(self, rows: Sequence[Sequence[float]]) -> None:
        for rank, row in enumerate(rows):
            right = len(row) == ROW_LENGTH and all(math.isfinite(v) and v >= 0 for v in row)
            if not right or row[1] > MAX_BLOCKS:
                raise PeerError(
                    f"rank {self._rank}: rank {rank} sent a malformed row of a codec's trial: "
                    f"{list(row)[:4]!r}; all workers have to run the same wingbeat"
                )
        if len(rows) != self._size:
            raise PeerError(
                f"rank {self._rank}: the exchange of a codec's trial brought {len(rows)} of "
                f"{self._size} rows"
            )
