"""Tuning of the bucket size as a state machine: what to say, and what to do about what was heard.

One `Tuner` runs on every worker. After an iteration each one says a row of numbers, and some time
later every worker hears the rows of all. Rank 0 alone decides. Its decision travels in its rows,
and everyone, rank 0 too, acts on it only when the exchange brings it. So all workers change size
and stop tuning in the same exchange, however long exchanges take and whatever a worker measures.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence

from wingbeat.observe.log import log
from wingbeat.planning.plans.result import Result, best, setting
from wingbeat.planning.plans.sample import Sample
from wingbeat.planning.plans.search import suggest_setting
from wingbeat.planning.plans.tuning_rows import TuningRows, is_time, measured
from wingbeat.types import Tuning

__all__ = ["ROW_LENGTH", "SETTLING", "Result", "Tuner"]

ROW_LENGTH = 6
"""A row: seconds, the number of the size they were measured with; rank 0's decision (zeros from
others): its number, the size in bytes, 1 if tuning ends with it, and the place of the topology
among those that are tuned. Numbers count decisions."""

SETTLING = 2
"""Iterations after each change that do not count: new buffers are touched for the first time."""


class Tuner:
    """One worker's part in tuning the bucket size.

    A trial is ``SETTLING`` iterations that do not count and ``tuning.steps`` that do. The first
    trial is of the size that training starts with. After ``tuning.trials`` trials the best size
    tried is chosen, and tuning is done.

    Args:
        tuning: search, range, topologies, number of trials and steps; the same on all workers.
        start_bytes: the size in use, in bytes; it may lie outside the range.
        rank: this worker.
        size: number of workers.
        topology: the one in use, of ``tuning.topologies``; empty if there are none.

    Attributes:
        done: tuning has ended: there is nothing to report or take any more.
        result: what was found; on rank 0 only, once done.
    """

    def __init__(
        self, tuning: Tuning, start_bytes: int, rank: int, size: int, topology: str = ""
    ) -> None:
        self.done = False
        self.result: Result | None = None
        self._tuning = tuning
        self._rank = rank
        self._rows = TuningRows("tuning row", ROW_LENGTH, rank, size)
        self._start = self._current = start_bytes
        self._names = tuning.topologies or (topology,)
        self._along = self._names.index(topology)
        self._taken = 0  # decisions acted on
        # From here on rank 0's only: its last decision, and what it knows.
        self._decided, self._decision, self._route = 0, start_bytes, self._along
        self._result: Result | None = None
        self._seen = 0
        self._steps: list[float] = []
        self._samples: list[Sample] = []
        self._costs: list[float] = []
        self._prepared = rank != 0

    @property
    def topology(self) -> str:
        """The topology in force; empty where they are not tuned."""
        return self._names[self._along]

    def report(self, seconds: float) -> list[float]:
        """Return the row that this worker gives to the next exchange.

        Args:
            seconds: what the last iteration took; 0 or anything that is no time if unknown.

        Returns:
            ``ROW_LENGTH`` numbers, float64.
        """
        self._prepare()
        row = [float(seconds) if is_time(seconds) else 0.0, float(self._taken), 0.0, 0.0, 0.0, 0.0]
        if self._rank == 0:
            row[2:] = map(float, (self._decided, self._decision, self._ends(), self._route))
        return row

    def take(self, rows: Sequence[Sequence[float]]) -> int | None:
        """Act on one exchange; every worker gets the same rows.

        Args:
            rows: everyone's rows by rank.

        Returns:
            The bucket size in bytes to change to now, None to go on with the present one. The
            topology to change to is `topology`.

        Raises:
            PeerError: a row is malformed; names the rank that sent it.
        """
        number, nbytes, along, ends = self._checked(rows)
        change = None
        if number > self._taken:
            self._taken, self._seen = number, 0
            change = nbytes if nbytes != self._current else None
            self._current, self._along = nbytes, along
            self.done = ends
            self.result = self._result
        elif self._rank == 0 and not self.done and self._decided == self._taken:
            self._collect(rows)
        return change

    # -- what arrives ---------------------------------------------------------------------

    def _checked(self, rows: Sequence[Sequence[float]]) -> tuple[int, int, int, bool]:
        """Return rank 0's decision: number, size in bytes, topology, whether tuning ends."""
        self._rows.check(rows)
        return self._checked_decision(rows[0])

    def _checked_decision(self, row: Sequence[float]) -> tuple[int, int, int, bool]:
        wrong = functools.partial(self._rows.malformed, 0, row)
        _, _, number, nbytes, ends, along = row
        if number not in (self._taken, min(self._taken + 1, self._tuning.trials)):
            raise wrong(f"decision {self._taken} or the next one was expected")
        low, high = self._tuning.low_bytes, self._tuning.high_bytes
        if nbytes != int(nbytes) or not (low <= nbytes <= high or nbytes == self._start):
            raise wrong(f"the size has to be the start, {self._start} bytes, or {low} to {high}")
        if along not in range(len(self._names)):
            raise wrong(f"the topology has to be 0 to {len(self._names) - 1}, of {self._names!r}")
        if number == self._taken and (nbytes, along) != (self._current, self._along):
            raise wrong(f"that decision was {self._current} bytes, topology {self._along}")
        if ends != float(number == self._tuning.trials):
            raise wrong(f"tuning ends with decision {self._tuning.trials}")
        return int(number), int(nbytes), int(along), bool(ends)

    # -- rank 0 ---------------------------------------------------------------------------

    def _ends(self) -> bool:
        return self._decided == self._tuning.trials

    def _prepare(self) -> None:
        """Load the libraries before the first trial, where no iteration counts yet."""
        if not self._prepared:
            self._prepared = True
            best([Sample(self._start, 1.0)])

    def _collect(self, rows: Sequence[Sequence[float]]) -> None:
        """Count one iteration, if everyone had the present size in it."""
        seconds = measured(rows, self._taken)
        if not seconds:
            return
        self._seen += 1
        if self._seen > SETTLING:
            self._steps.append(statistics.fmean(1.0 / value for value in seconds))
        if len(self._steps) == self._tuning.steps:
            self._end_trial()

    def _end_trial(self) -> None:
        # The median: an iteration with an evaluation or a checkpoint before it says nothing.
        throughput = statistics.median(self._steps)
        self._samples.append(Sample(self._current, throughput, self.topology))
        self._steps.clear()
        begin = time.perf_counter()
        self._decided += 1
        expected: tuple[float, ...] = ()
        if self._ends():
            chosen, expected = best(self._samples)
            self._decision, name = self._samples[chosen].nbytes, self._samples[chosen].topology
        else:
            self._decision, name = suggest_setting(self._tuning, self._samples)
        self._route = self._names.index(name)
        self._costs.append(time.perf_counter() - begin)
        if expected:
            self._result = self._make_result(expected)
        self._say()

    def _make_result(self, expected: tuple[float, ...]) -> Result:
        return Result(
            search=self._tuning.search,
            low_bytes=self._tuning.low_bytes,
            high_bytes=self._tuning.high_bytes,
            steps=self._tuning.steps,
            samples=tuple(self._samples),
            expected=expected,
            chosen_bytes=self._decision,
            costs_s=tuple(self._costs),
            chosen_topology=self._names[self._route],
        )

    def _say(self) -> None:
        now, first = self._samples[-1].throughput, self._samples[0].throughput
        which = f"trial {self._decided} of {self._tuning.trials}"
        than = f" ({now / first:.2f}x the start)" if self._decided > 1 else ""
        following = setting(self._decision, self._names[self._route])
        after = "" if self._ends() else f"; next {following}"
        present = setting(self._current, self.topology)
        what = f"{present}, {now:.4g} iterations/s{than}{after}"
        log.info("bucket tuning, %s: %s", which, what)
        if self._result is not None:
            log.info("%s", self._result.explain())
