"""Tuning of thresholds as a state machine: what to say, and what to do about what was heard.

One `ThresholdTuner` runs on every worker, as a `wingbeat.planning.plans.tuner.Tuner` of the bucket
size does: each says a row of numbers after an iteration, and hears all rows some time later. Rank 0
decides; its decision travels in its rows, and everyone acts on it when the exchange brings it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

from wingbeat.observe.log import log
from wingbeat.planning.plans.thresholds.cuts import Cuts, cuts_of, fits, levels_of
from wingbeat.planning.plans.thresholds.result import Result, result_of
from wingbeat.planning.plans.thresholds.search import most_trials, search
from wingbeat.planning.plans.tuning_rows import TuningRows, is_time, measured

SETTLING = 1
"""Iterations after each change that do not count: sums of the one before may still come."""

LAG = 2
"""Iterations from the last that counts until all have changed: rank 0 hears, then all hear it."""

_HEAD = 4
"""Numbers at the begin of a row: seconds, and the number of the decision they were measured with;
from rank 0 (zeros from others) the number of its decision, and 1 if tuning ends with it. Then
follow its cuts, one less than there are classes, the missing ones 0."""


class ThresholdTuner:
    """One worker's part in tuning the thresholds.

    Args:
        layers: how many layers there are, two or more.
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
        self._rank = rank
        self._rows = TuningRows("threshold row", _HEAD + self._classes - 1, rank, size)
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
        row = [float(seconds) if is_time(seconds) else 0.0, float(self._taken), 0.0, 0.0]
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
        self._rows.check(rows)
        return self._checked_decision(rows[0])

    def _checked_decision(self, row: Sequence[float]) -> tuple[int, Cuts, bool]:
        wrong = functools.partial(self._rows.malformed, 0, row)
        _, _, number, ends, *padded = row
        if number not in (self._taken, self._taken + 1) or not 1 <= number <= self._most:
            raise wrong(f"decision {self._taken} or the next one was expected")
        cuts = tuple(int(cut) for cut in padded if cut)
        missing = len(padded) - len(cuts)
        if padded != [*cuts, *[0] * missing] or not fits(cuts, self._layers, self._classes):
            raise wrong(f"these do not divide {self._layers} layers")
        if ends not in (0, 1) or (number == self._most and not ends):
            raise wrong(f"tuning ends at decision {self._most} at the latest")
        if number == self._taken and (cuts != self._current or ends):
            raise wrong(f"that decision was {self._current}")
        return int(number), cuts, bool(ends)

    # -- rank 0 ---------------------------------------------------------------------------

    def _collect(self, rows: Sequence[Sequence[float]]) -> None:
        """Count one iteration, if everyone had the present thresholds in it."""
        seconds = measured(rows, self._taken)
        if not seconds:
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
