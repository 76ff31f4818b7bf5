"""Trials: candidates are timed in the run itself, in blocks of whole iterations; the best is kept.

The times contain the cost of a candidate, its gain, and the share of both that is hidden. A
*search* is a generator: it yields the candidate to measure next, receives one measurement for each
counted iteration of the block, and returns the chosen candidate and its result.

One trial runs on every worker. Each contributes a row of numbers after an iteration; later every
worker receives the rows of all, in the same order. All workers change candidates before the same
iteration, however long exchanges take and whatever a worker measures:

- In a `Trial` every worker runs the search on the same rows, and so reaches the same conclusion.
- In a `LedTrial` rank 0 alone runs the search. Its decisions travel in its rows, and all workers,
  rank 0 included, apply a decision when the exchange delivers it.

A `DriftDetector` begins a trial again when iteration times have changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from wingbeat.errors import PeerError

C = TypeVar("C")
R = TypeVar("R")

Search = Generator[C, list[float], tuple[C, R]]
Rows = Sequence[Sequence[float]]

_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


def is_time(seconds: float) -> bool:
    """Return whether this is a valid iteration time."""
    return math.isfinite(seconds) and _SHORTEST_S <= seconds <= _LONGEST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How candidates are measured.

    The first ``warmup`` iterations after a change do not count, or ``first_warmup`` in the first
    block; the next ``iterations`` do. ``combine`` returns one measurement from the seconds of all
    workers.
    """

    name: str
    warmup: int
    iterations: int
    combine: Callable[[Sequence[float]], float]
    first_warmup: int | None = None


class _Trial(Generic[C, R]):
    """The common part of both kinds of trials.

    A row begins with the seconds of the last iteration, 0 if unknown, and the number of its block
    or decision. ``rank`` is this worker's number, and ``ranks`` has the rank in the job of each
    worker, as used in error messages.
    """

    candidate: C

    def __init__(
        self, search: Search[C, R], blocks: Blocks, rank: int, ranks: Sequence[int]
    ) -> None:
        self.done = False
        self.result: R | None = None
        self._search, self._blocks = search, blocks
        self._rank, self._ranks = rank, ranks
        self._warmup = blocks.warmup if blocks.first_warmup is None else blocks.first_warmup
        self.number = 0
        self._seen = 0
        self._values: list[float] = []

    def report(self, seconds: float) -> list[float]:
        """Return this worker's row for the next exchange; invalid ``seconds`` count as unknown."""
        return [float(seconds) if is_time(seconds) else 0.0, float(self.number)]

    def _count(self, seconds: Sequence[float]) -> list[float] | None:
        """Count one iteration; return the measurements of the block at its end."""
        self._seen += 1
        if self._seen > self._warmup:
            self._values.append(self._blocks.combine(seconds))
        if len(self._values) < self._blocks.iterations:
            return None
        values, self._values, self._seen = self._values, [], 0
        self._warmup = self._blocks.warmup
        return values

    def _check(self, rows: Rows, length: int, latest: float) -> None:
        """Validate all rows; their block or decision has to be a number up to ``latest``."""
        if len(rows) != len(self._ranks):
            raise PeerError(
                f"rank {self._ranks[self._rank]}: the exchange for the {self._blocks.name} "
                f"returned {len(rows)} of {len(self._ranks)} rows"
            )
        for rank, row in enumerate(rows):
            if len(row) != length or not all(math.isfinite(value) for value in row):
                raise self._malformed(rank, row, f"allowed: {length} finite numbers")
            if row[0] and not is_time(row[0]):
                raise self._malformed(rank, row, "the first is no iteration time in seconds")
            if not (row[1] == int(row[1]) and 0 <= row[1] <= latest):
                raise self._malformed(rank, row, "the second is no block or decision")

    def _malformed(self, rank: int, row: Sequence[float], why: str) -> PeerError:
        return PeerError(
            f"rank {self._ranks[self._rank]}: rank {self._ranks[rank]} sent a malformed row for "
            f"the {self._blocks.name} {list(row)[:8]!r}: {why}; all workers have to run the same "
            "wingbeat with the same options"
        )


class Trial(_Trial[C, R]):
    """A trial in which every worker runs the search, of at most ``max_blocks`` blocks.

    ``candidate`` is the one in use, and the chosen one once the trial is ``done``.
    """

    def __init__(
        self,
        search: Search[C, R],
        blocks: Blocks,
        rank: int,
        ranks: Sequence[int],
        max_blocks: int,
    ) -> None:
        super().__init__(search, blocks, rank, ranks)
        self._max_blocks = max_blocks
        self._advance(None)

    def process_rows(self, rows: Rows) -> bool:
        """Process the rows of an exchange; return whether ``candidate`` changed or the trial ended.

        An iteration counts if all workers measured it and ran the current block.
        """
        self._check(rows, 2, self._max_blocks)
        if self.done or any(row[1] != self.number or row[0] == 0 for row in rows):
            return False
        values = self._count([row[0] for row in rows])
        if values is None:
            return False
        before = self.candidate
        self.number += 1
        self._advance(values)
        return self.done or self.candidate != before

    def _advance(self, values: list[float] | None) -> None:
        try:
            self.candidate = next(self._search) if values is None else self._search.send(values)
        except StopIteration as end:
            self.candidate, self.result = end.value
            self.done = True


class LedTrial(_Trial[C, R]):
    """A trial in which rank 0 runs the search, from the first call of `report` on.

    A row has four numbers and those of a candidate: seconds; the number of the decision in force;
    and, from rank 0 (zeros from others), the number of its last decision, 1 if the trial ends with
    it, and the candidate. The start is decision 0. ``decisions`` are the number of the first
    decision with which the trial may end, and of the last. ``encode`` makes equally many numbers of
    any candidate; ``decode`` raises `ValueError` with the reason if they are none. ``result`` is
    set on rank 0 only.
    """

    def __init__(
        self,
        search: Search[C, R],
        blocks: Blocks,
        rank: int,
        ranks: Sequence[int],
        *,
        start: C,
        encode: Callable[[C], list[float]],
        decode: Callable[[list[float]], C],
        decisions: tuple[int, int],
    ) -> None:
        super().__init__(search, blocks, rank, ranks)
        self.candidate = start
        self.exchanges = 0
        self._encode, self._decode, self._decisions = encode, decode, decisions
        self._width = len(encode(start))
        # On rank 0: its last decision.
        self._begun = False
        self._decided, self._decision, self._ends = 0, start, False
        self._result: R | None = None

    def report(self, seconds: float) -> list[float]:
        """Return this worker's row for the next exchange; invalid ``seconds`` count as unknown."""
        row = super().report(seconds)
        if self._rank:
            return row + [0.0] * (2 + self._width)
        if not self._begun:
            self._begun = True
            self._decision = next(self._search)
            self._decided = int(self._decision != self.candidate)
        return [*row, float(self._decided), float(self._ends), *self._encode(self._decision)]

    def process_rows(self, rows: Rows) -> C | None:
        """Process the rows of an exchange; return the next candidate, None to keep the current."""
        self._check(rows, 4 + self._width, rows[0][2] if rows and len(rows[0]) > 2 else 0.0)
        number, candidate, ends = self._checked_decision(rows[0])
        self.exchanges += 1
        if number > self.number:
            changed = candidate != self.candidate
            self.number, self.candidate = number, candidate
            self._seen = 0 if changed else self._warmup
            self.done, self.result = ends, self._result
            return candidate if changed else None
        if self._rank == 0 and not self.done and self._decided == self.number:
            self._measure(rows)
        return None

    def _checked_decision(self, row: Sequence[float]) -> tuple[int, C, bool]:
        number, ends, *numbers = row[2:]
        earliest, last = self._decisions
        if number not in (self.number, min(self.number + 1, last)):
            raise self._malformed(0, row, f"decision {self.number} or the next one was expected")
        try:
            candidate = self._decode(numbers)
        except ValueError as err:
            raise self._malformed(0, row, str(err)) from None
        if ends not in (0, 1) or (ends and number < earliest) or (number == last and not ends):
            limits = f"{last}" if earliest == last else f"{earliest} to {last}"
            raise self._malformed(0, row, f"the trial ends with decision {limits}")
        if number == self.number and (candidate != self.candidate or ends != self.done):
            raise self._malformed(0, row, f"that decision was {self.candidate}")
        return int(number), candidate, bool(ends)

    def _measure(self, rows: Rows) -> None:
        """Count an iteration if all workers ran the current candidate; decide after a block."""
        if any(row[1] != self.number for row in rows):
            return
        seconds = [row[0] for row in rows if row[0]]
        values = self._count(seconds) if seconds else None
        if values is None:
            return
        self._decided += 1
        try:
            self._decision = self._search.send(values)
        except StopIteration as end:
            self._decision, self._result = end.value
            self._ends = True


# -- compression ---------------------------------------------------------------------------------

COMPRESSION_ITERATIONS = 3
"""Counted iterations of a block; blocks with compression and without it alternate."""

COMPRESSION_BLOCKS = 6
"""Most blocks."""

COMPRESSION_WARMUP = 1
"""Iterations at the start of a block that do not count, for buffers and sockets to warm up."""

COMPRESSION_FIRST_WARMUP = 3
"""The same for the first block, in which the order of gradients is recorded as well."""

WORTHWHILE = 0.97
"""Compression is kept if iterations take at most this share of the time without it."""

CLEAR = 1.25
"""A ratio of times, in either direction, with which one block of each is enough."""


@dataclass(frozen=True, slots=True)
class CompressionTimes:
    """Median seconds of an iteration with compression and without it, of the slowest worker."""

    compressed_s: float
    uncompressed_s: float

    @property
    def ratio(self) -> float:
        """Time with compression over time without it."""
        return self.compressed_s / self.uncompressed_s


def compression_trial(rank: int, ranks: Sequence[int]) -> Trial[bool, CompressionTimes]:
    """Return a trial of whether compression makes iterations shorter."""
    blocks = Blocks(
        name="compression trial",
        warmup=COMPRESSION_WARMUP,
        first_warmup=COMPRESSION_FIRST_WARMUP,
        iterations=COMPRESSION_ITERATIONS,
        combine=max,
    )
    return Trial(_search_compression(), blocks, rank, ranks, COMPRESSION_BLOCKS)


def _search_compression() -> Search[bool, CompressionTimes]:
    compressed: list[float] = []
    uncompressed: list[float] = []
    for _ in range(COMPRESSION_BLOCKS // 2):
        compressed += yield True
        uncompressed += yield False
        times = CompressionTimes(statistics.median(compressed), statistics.median(uncompressed))
        if not 1 / CLEAR < times.ratio < CLEAR:
            break
    return times.ratio <= WORTHWHILE, times


# -- merge plans ---------------------------------------------------------------------------------

PLAN_ITERATIONS = 6
"""Counted iterations of a block."""

PLAN_WARMUP = 2
"""Iterations at the start of a block that do not count, for buffers and sockets to warm up."""

PLAN_MARGINS = (0.10, 0.05, 0.02)
"""By round, the relative excess over the least median up to which a plan remains. A plan also
remains while a quarter of its iterations are as short as that median: the difference is noise. It
does not remain if three quarters of its iterations are longer than three quarters of the best
plan's: then even a small difference is none."""

PLAN_EQUAL = 0.02
"""Relative difference of medians at which a trial ends after its second round."""


def plan_trial(count: int, rank: int, ranks: Sequence[int]) -> Trial[int, list[float]]:
    """Return a trial of which of ``count`` merge plans makes iterations shortest.

    Predictions do not cover other jobs, caches, and threads that wait for each other. Rounds
    alternate in direction, so that a slowdown of the machine affects all plans. A single plan is
    not measured. Candidates are the numbers of plans; the result is the median of the iterations of
    each in seconds, the mean of all workers.
    """
    blocks = Blocks(
        name="plan trial",
        warmup=PLAN_WARMUP,
        iterations=PLAN_ITERATIONS,
        combine=lambda seconds: math.fsum(seconds) / len(ranks),
    )
    return Trial(_search_plans(count), blocks, rank, ranks, len(PLAN_MARGINS) * count)


def _search_plans(count: int) -> Search[int, list[float]]:
    times: list[list[float]] = [[] for _ in range(count)]
    medians = [math.inf] * count
    remaining = list(range(count))
    for number, margin in enumerate(PLAN_MARGINS):
        if len(remaining) == 1:
            break
        for plan in remaining[::-1] if number % 2 else list(remaining):
            times[plan] += yield plan
            medians[plan] = statistics.median(times[plan])
        best = min(remaining, key=lambda plan: medians[plan])
        remaining = [plan for plan in remaining if _remains(times[plan], times[best], margin)]
        if (
            number
            and max(medians[plan] for plan in remaining) <= (1.0 + PLAN_EQUAL) * medians[best]
        ):
            break
    return min(remaining, key=lambda plan: medians[plan]), medians


def _remains(times: Sequence[float], best: Sequence[float], margin: float) -> bool:
    """Return whether a plan may still be the fastest; ``best`` has the least median."""
    least, quarter = statistics.median(best), max(1, len(times) // 4)
    low = sorted(times)[quarter - 1]
    if low <= least:
        return True
    return statistics.median(times) <= (1.0 + margin) * least and low <= sorted(best)[-quarter]


# -- strategies ----------------------------------------------------------------------------------

STRATEGY_WARMUP = 1
"""Iterations at the start of a block that do not count."""

STRATEGY_MARGINS = (0.5, 0.1)
"""By round but the last, the relative excess over the least median up to which one remains. A block
is short, and another job may disturb all of it, so the first round only drops what is far behind.
"""

STRATEGIES_LEFT = (3, 2, 1)
"""Most strategies that remain after each round."""


def strategy_trial(
    count: int, steps: int, rank: int, ranks: Sequence[int]
) -> Trial[int, list[float]]:
    """Return a trial of which of ``count`` strategies makes iterations shortest.

    Candidates, result and directions are as in `plan_trial`; a block has ``steps`` counted
    iterations.
    """
    blocks = Blocks(
        name="strategy trial",
        warmup=STRATEGY_WARMUP,
        iterations=steps,
        combine=lambda seconds: math.fsum(seconds) / len(ranks),
    )
    rounds = len(STRATEGY_MARGINS) + 1
    return Trial(_search_strategies(count), blocks, rank, ranks, rounds * count)


def _search_strategies(count: int) -> Search[int, list[float]]:
    times: list[list[float]] = [[] for _ in range(count)]
    medians = [math.inf] * count
    remaining = list(range(count))
    rounds = zip((*STRATEGY_MARGINS, 0.0), STRATEGIES_LEFT, strict=True)
    for number, (margin, left) in enumerate(rounds):
        for each in remaining[::-1] if number % 2 else list(remaining):
            times[each] += yield each
            medians[each] = statistics.median(times[each])
        fastest = sorted(remaining, key=lambda each: medians[each])[:left]
        most = (1.0 + margin) * medians[fastest[0]]
        remaining = [each for each in remaining if each in fastest and medians[each] <= most]
        if len(remaining) == 1:
            break
    return remaining[0], medians


# -- drift ---------------------------------------------------------------------------------------

DRIFT_WARMUP = 2
"""Iterations after a change of buckets that do not count."""

DRIFT_WINDOW = 50
"""Iterations of a window, whose median is compared with that of the first window."""


class DriftDetector:
    """Counts iterations on one worker: first a measuring phase, then windows.

    Every worker counts the same iterations and compares the same medians, so all plan and detect
    drift before the same backward.

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
        return self.measuring and self._seen > DRIFT_WARMUP + self._steps

    def count(self, seconds: float) -> None:
        """Count one iteration boundary."""
        self._seen += 1
        if self._seen > DRIFT_WARMUP + 1 and seconds > 0:
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
        return not self.measuring and self._seen == DRIFT_WARMUP + DRIFT_WINDOW

    def compare(self, medians: Sequence[float], ranks: Sequence[int]) -> tuple[float, float] | None:
        """Compare the medians of all workers, equal on each, and begin the next window.

        Return the reference and the current median in seconds after drift, None otherwise. A median
        that is no time is a `PeerError`, which names its sender by its rank in ``ranks``.
        """
        for rank, value in zip(ranks, medians, strict=True):
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
