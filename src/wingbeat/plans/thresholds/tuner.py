"""Tuning of thresholds as a state machine: what to say, and what to do about what was heard.

One `ThresholdTuner` runs on every worker, as a `wingbeat.plans.tuner.Tuner` of the bucket size
does: each says a row of numbers after an iteration, and hears all rows some time later. Rank 0
decides; its decision travels in its rows, and everyone acts on it when the exchange brings it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from wingbeat.errors import PeerError
from wingbeat.observe.log import log
from wingbeat.plans.thresholds.cuts import Cuts, cuts_of, fits, levels_of
from wingbeat.plans.thresholds.result import Result, result_of
from wingbeat.plans.thresholds.search import most_trials, search

SETTLING = 1
"""Iterations after each change that do not count: sums of the one before may still come."""

LAG = 2
"""Iterations from the last that counts until all have changed: rank 0 hears, then all hear it."""

_HEAD = 4
"""Numbers at the begin of a row: seconds, and the number of the decision they were measured with;
from rank 0 (zeros from others) the number of its decision, and 1 if tuning ends with it. Then
follow its cuts, one less than there are classes, the missing ones 0."""

_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


class ThresholdTuner:
    """One worker's part in tuning the thresholds.

    Args:
        layers: how many buckets there are, two or more.
        start: the thresholds in use.
        steps: iterations that count in a trial.
        rank: this worker.
        size: number of workers.

    Attributes:
        done: tuning has ended: there is nothing to report or take any more.
        result: what was found; on rank 0 only, once done.
    """

    def __init__(
        self, layers: int, start: Sequence[float], steps: int, rank: int, size: int
    ) -> None:
        self.done = False
        self.result: Result | None = None
        self._layers, self._classes, self._steps = layers, len(start) + 1, steps
        self._rank, self._size = rank, size
        self._most = most_trials(layers, self._classes) + 1
        self._current: Cuts = cuts_of(start, layers)
        self._taken = 0  # decisions acted on
        # From here on rank 0's only: its last decision, and what it knows.
        self._search = search(layers, self._classes)
        self._decided, self._decision = 1, next(self._search)
        self._result: Result | None = None
        self._heard = self._seen = 0
        self._times: list[float] = []

    def report(self, seconds: float) -> list[float]:
        """Return the row that this worker gives to the next exchange.

        Args:
            seconds: what the last iteration took; 0 or anything that is no time if unknown.
        """
        known = math.isfinite(seconds) and _SHORTEST_S <= seconds <= _LONGEST_S
        row = [float(seconds) if known else 0.0, float(self._taken), 0.0, 0.0]
        cuts: list[int] = [0] * (self._classes - 1)
        if self._rank == 0:
            row[2:] = [float(self._decided), float(self._result is not None)]
            cuts[: len(self._decision)] = self._decision
        return row + [float(cut) for cut in cuts]

    def take(self, rows: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
        """Act on one exchange; every worker gets the same rows.

        Args:
            rows: everyone's rows by rank.

        Returns:
            The thresholds to change to now, None to go on with the present ones.

        Raises:
            PeerError: a row is malformed; names the rank that sent it.
        """
        number, cuts, ends = self._checked(rows)
        self._heard += 1
        if number > self._taken:
            changed = cuts != self._current
            self._taken, self._current = number, cuts
            self._seen = 0 if changed else SETTLING
            self.done = ends
            self.result = self._result
            return levels_of(cuts, self._layers, self._classes) if changed else None
        if self._rank == 0 and not self.done and self._decided == self._taken:
            self._collect(rows)
        return None

    # -- what arrives ---------------------------------------------------------------------

    def _checked(self, rows: Sequence[Sequence[float]]) -> tuple[int, Cuts, bool]:
        """Return rank 0's decision: its number, the cuts, whether tuning ends with it."""
        if len(rows) != self._size:
            raise PeerError(
                f"rank {self._rank}: the exchange of threshold rows brought {len(rows)} of "
                f"{self._size} rows"
            )
        length = _HEAD + self._classes - 1
        for rank, row in enumerate(rows):
            if len(row) != length or not all(math.isfinite(value) for value in row):
                raise self._malformed(rank, row, f"allowed are {length} finite numbers")
            if row[0] and not _SHORTEST_S <= row[0] <= _LONGEST_S:
                raise self._malformed(rank, row, "the first is no time of an iteration in seconds")
            if not (row[1] == int(row[1]) and 0 <= row[1] <= rows[0][2]):
                raise self._malformed(rank, row, "the second is no number of a decision")
        return self._checked_decision(rows[0])

    def _checked_decision(self, row: Sequence[float]) -> tuple[int, Cuts, bool]:
        _, _, number, ends, *padded = row
        if number not in (self._taken, self._taken + 1) or not 1 <= number <= self._most:
            raise self._malformed(0, row, f"decision {self._taken} or the next one was expected")
        cuts = tuple(int(cut) for cut in padded if cut)
        missing = len(padded) - len(cuts)
        if padded != [*cuts, *[0] * missing] or not fits(cuts, self._layers, self._classes):
            raise self._malformed(0, row, f"these do not divide {self._layers} buckets")
        if ends not in (0, 1) or (number == self._most and not ends):
            raise self._malformed(0, row, f"tuning ends at decision {self._most} at the latest")
        if number == self._taken and (cuts != self._current or ends):
            raise self._malformed(0, row, f"that decision was {self._current}")
        return int(number), cuts, bool(ends)

    def _malformed(self, rank: int, row: Sequence[float], why: str) -> PeerError:
        return PeerError(
            f"rank {self._rank}: rank {rank} sent a malformed row of thresholds "
            f"{list(row)[:8]!r}: {why}; all workers have to run the same wingbeat with the same "
            "options"
        )

    # -- rank 0 ---------------------------------------------------------------------------

    def _collect(self, rows: Sequence[Sequence[float]]) -> None:
        """Count one iteration, if everyone had the present thresholds in it."""
        seconds = [row[0] for row in rows if row[0]]
        if not seconds or any(row[1] != self._taken for row in rows):
            return
        self._seen += 1
        if self._seen > SETTLING:
            self._times.append(statistics.fmean(seconds))
        if len(self._times) == self._steps:
            times, self._times = self._times, []
            self._decide(times)

    def _decide(self, times: list[float]) -> None:
        self._decided += 1
        try:
            self._decision = self._search.send(times)
        except StopIteration as end:
            found = end.value
            self._decision = found.cuts
            self._result = result_of(found, self._layers, self._classes, self._heard)
            log.info("%s", self._result.explain())


def most_iterations(layers: int, classes: int, steps: int) -> int:
    """Return after how many iterations tuning has ended, if everyone measures each of them."""
    return LAG + most_trials(layers, classes) * (SETTLING + steps + LAG)
