"""What workers say of an iteration while something is tuned, and what may be believed of it.

Every tuner is one state machine on each worker. A row begins with the seconds of an iteration and
the number of the decision that they were measured with; then follows the number of a decision,
rank 0's, whose meaning is the tuner's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from wingbeat.errors import PeerError

_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


class TuningRows:
    """Checks everyone's rows, on one worker.

    Args:
        name: what messages call a row.
        length: numbers in each.
        rank: this worker.
        size: number of workers.
    """

    def __init__(self, name: str, length: int, rank: int, size: int) -> None:
        self._name, self._length = name, length
        self._rank, self._size = rank, size

    def check(self, rows: Sequence[Sequence[float]]) -> None:
        """Check everyone's rows, by rank, but for what rank 0 has decided.

        Raises:
            PeerError: a row is malformed; names the rank that sent it.
        """
        if len(rows) != self._size:
            raise PeerError(
                f"rank {self._rank}: the exchange of {self._name}s brought {len(rows)} of "
                f"{self._size} rows"
            )
        for rank, row in enumerate(rows):
            if len(row) != self._length or not all(math.isfinite(value) for value in row):
                raise self.malformed(rank, row, f"allowed are {self._length} finite numbers")
            if row[0] and not is_time(row[0]):
                raise self.malformed(rank, row, "the first is no time of an iteration in seconds")
            if not (row[1] == int(row[1]) and 0 <= row[1] <= rows[0][2]):
                raise self.malformed(rank, row, "the second is no number of a decision")

    def malformed(self, rank: int, row: Sequence[float], why: str) -> PeerError:
        """Return the error that says what is wrong with a rank's row."""
        return PeerError(
            f"rank {self._rank}: rank {rank} sent a malformed {self._name} {list(row)[:8]!r}: "
            f"{why}; all workers have to run the same wingbeat with the same options"
        )


def is_time(seconds: float) -> bool:
    """Whether an iteration can have taken that long."""
    return math.isfinite(seconds) and _SHORTEST_S <= seconds <= _LONGEST_S


def measured(rows: Sequence[Sequence[float]], decision: int) -> list[float]:
    """Return the seconds of those who know them; none unless all had that decision in force."""
    if any(row[1] != decision for row in rows):
        return []
    return [row[0] for row in rows if row[0]]
