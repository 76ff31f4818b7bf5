"""Estimate how long a bench will take, before it starts and while it runs.

A paced model's computation is given, and bytes over the links' rate are the rest: the estimate of
an iteration is accurate to 10 to 20% on an otherwise idle machine. The CPU overhead is a guess from
a machine with two cores, and the start-up cost of hundreds of small exchanges is not included. A
real model's computation is a guess.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from wingbeat.compression import options_of
from wingbeat.parts import Servers
from wingbeat.planning.thresholds import LAG, WARMUP, typical_blocks
from wingbeat_lab.bench import slow
from wingbeat_lab.bench.bound import floor
from wingbeat_lab.bench.config import BenchConfig, Checked, reduce_seconds_per_byte
from wingbeat_lab.bench.contenders import Contender

OF_LINE_RATE = 0.93
"""Share of the line rate that collectives reach, with headers and the start of messages."""

CORE_S = 0.012
"""CPU seconds of a worker's iteration in addition to the paced time: Python and autograd."""

CORE_S_PER_BYTE = 2.5e-9
"""The same for each byte of gradients: copies, sums, sending and receiving."""

DIGITS_S = 0.012
"""CPU seconds of an iteration on the digits, forward to update."""

DIGITS_BYTES = 287_016
"""Bytes of the gradients of the network for the digits."""

START_S, START_CORE_S = 3.0, 6.0
"""Seconds to create and remove the lab; CPU seconds for each worker's imports and rendezvous."""

TURN_S = 0.3
"""Seconds to build and wrap a model, without its broadcast."""

TRIAL = 25
"""Iterations until a codec's use is decided, plus or minus ten; once for each row."""

PLANS = 40
"""Iterations until a plan of merged layers is chosen, plus or minus thirty."""

PASSES, HALVES = 3, 4
"""For the measurement of computation and links alone: passes of the model, and repetitions of each
half of an all-reduce of all gradients.
"""

RECORDED, RECORDED_BROKEN_DOWN = 3, 7
"""Iterations recorded for a trace, and for a breakdown."""


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Durations of one row: seconds of an iteration, and iterations of its tuning, once."""

    iteration_s: float
    deciding: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The duration of each part of a bench, in seconds.

    Attributes:
        start_s: rendezvous and shutdown.
        turn_s: at the start of a row's turn.
        round_s: measuring computation and links alone, at the start of a round.
        after_s: recording, after all rounds.
    """

    checked: Checked
    rows: tuple[RowTimes, ...]
    start_s: float
    turn_s: float
    round_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        """Total of the bench."""
        config = self.checked.config
        last = len(self.rows) - 1
        rounds = config.rounds - 1
        return self.done_s(last, rounds, config.share(rounds) - 1) + self.after_s

    def done_s(self, row: int, round_: int, iteration: int) -> float:
        """Time up to the end of this iteration: counted from 0 in its turn, below 0 in warm-up."""
        config = self.checked.config
        seconds = self.start_s + (round_ + 1) * self.round_s
        for r in range(round_ + 1):
            for number in range(len(self.rows) if r < round_ else row):
                seconds += self._turn_s(number, r, config.share(r))
        return seconds + self._turn_s(row, round_, iteration + 1)

    def _turn_s(self, row: int, round_: int, iterations: int) -> float:
        """Time of a row's turn up to so many timed iterations; negative during warm-up."""
        own = self.rows[row]
        count = max(0, self.checked.config.warmup + iterations)
        turns = 1
        if round_ == 0 and own.deciding:  # tuning has its own model
            count, turns = count + own.deciding, 2
        return turns * self.turn_s + count * own.iteration_s


def of(checked: Checked, cores: int | None = None) -> Estimate:
    """Estimate one bench on so many cores; by default those this process may use."""
    share = checked.workers / (cores or len(os.sched_getaffinity(0)))
    config, nbytes = checked.config, gradient_bytes(checked)
    half = nbytes * _per_byte(checked)
    times = checked.model.compute_s()
    compute = sum(times) if times else DIGITS_S * max(1.0, share)
    busy = max(1.0, share) * CORE_S_PER_BYTE * nbytes
    rows = tuple(_row(checked, contender, share) for contender in checked.rows)
    count = RECORDED_BROKEN_DOWN if config.breakdown else RECORDED
    count += max(2, config.warmup)
    hosts = checked.lab.hosts
    turn = TURN_S + half * hosts / max(1, hosts - 1) + busy  # broadcast of rank 0's weights
    recorded = sum(turn + count * rows[row].iteration_s for row, _ in checked.recorded)
    return Estimate(
        checked=checked,
        rows=rows,
        start_s=START_S + START_CORE_S * max(1.0, share),
        turn_s=turn,
        round_s=(PASSES * compute + 2 * HALVES * (half + busy / 4)) if config.measure else 0.0,
        after_s=recorded,
    )


def _row(checked: Checked, contender: Contender, share: float) -> RowTimes:
    layers = checked.model.layers(contender)
    per_byte, nbytes = _per_byte(checked), gradient_bytes(checked)
    if contender.traits.gathered:
        # Without sums on the way, each worker's choice is sent to all workers.
        per_byte *= checked.workers / 2
    if layers is None:
        moved = 0.0 if contender.alone else 2 * per_byte * nbytes
        seconds = max(1.0, share) * DIGITS_S + moved
    else:
        # Averages may overlap computation, so this may be too high.
        kinds = ("whole",) if contender.averages else (contender.traits.bound, "whole")
        least = next(filter(None, (floor(kind, layers, per_byte) for kind in kinds)), 0.0)
        seconds = least + share * (CORE_S + CORE_S_PER_BYTE * nbytes * (not contender.alone))
    slept = slow.longest(checked.slow, iterations=checked.config.iterations)
    seconds += slept * sum(checked.model.compute_s() or (max(1.0, share) * DIGITS_S,))
    return RowTimes(seconds, _deciding(contender, nbytes) if checked.workers > 1 else 0)


def _deciding(contender: Contender, nbytes: int) -> int:
    """Iterations until a row has tuned itself, for so many bytes of gradients."""
    if contender.strategy is None:
        return 0
    plan, wire, exchange = (
        contender.strategy.plan,
        contender.strategy.wire,
        contender.strategy.exchange,
    )
    count = TRIAL if options_of(wire).auto_disable else 0
    if (tuning := plan.tuning()) is not None:
        # A model within the smallest size has only one plan, known after the first iteration.
        count += tuning.trials * (tuning.steps + 4) if nbytes > tuning.low_bytes else 2
    if (chosen := plan.choosing()) is not None:
        # Up to six candidates, three of them again, then two; of each block two do not count.
        count += 1 + (6 + 3 + 2) * (chosen.steps + 2)
    if exchange.tuned:
        servers = cast(Servers, exchange)
        count += LAG + typical_blocks(servers.classes) * (WARMUP + servers.steps + LAG)
    if (merged := plan.merging()) is not None:
        count += 2 * (merged.steps + 2)
        if merged.rule == "tried":
            # Plans are compared at the final density.
            count += PLANS + options_of(wire).warmup_steps
    return count


def gradient_bytes(checked: Checked) -> int:
    """Return the bytes of all gradients of the model."""
    profile = checked.model.profile
    if profile is None:
        return DIGITS_BYTES
    return sum(4 * math.prod(p.shape) for layer in profile.layers for p in layer.parameters)


def _per_byte(checked: Checked) -> float:
    """Seconds of half an all-reduce for each byte; a loopback is limited by its cores."""
    return (reduce_seconds_per_byte(checked.lab) or 0.0) / OF_LINE_RATE


def of_all(configs: Iterable[BenchConfig]) -> float:
    """Return the total of several benches that run one after the other, in seconds.

    UsageError if a value in one of them is invalid.
    """
    return sum(of(config.check()).total_s for config in configs)


def about(seconds: float) -> str:
    """Format a rough duration.

    >>> [about(s) for s in (4, 38, 89, 91, 1000, 5400)]
    ['10 s', '40 s', '90 s', '2 min', '17 min', '1 h 30 min']
    """
    if seconds <= 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Progress:
    """Shows the expected duration, then strategy, round, iteration and the time left.

    Output goes to standard error. The time left is the estimate's, times the ratio of the elapsed
    time to its estimate.
    """

    def __init__(self, checked: Checked, *, quiet: bool = False) -> None:
        self._checked = checked
        self._estimate = of(checked)
        self._began = time.monotonic()
        console = Console(stderr=True, quiet=quiet)
        self._live = console.file.isatty()  # which FORCE_COLOR does not change
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not self._live,
        )
        self._task = self._bar.add_task("starting the workers", total=self._estimate.total_s)
        self._bar.start()
        self._turn: tuple[int, int] | None = None

    def __enter__(self) -> Progress:
        rows = ", ".join(row.text for row in self._checked.rows)
        self.phase(
            f"{self._checked.model.name} on {self._checked.lab}, {self._checked.workers} workers: "
            f"{rows}; takes about {about(self._estimate.total_s)}"
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def at(self, done: int, row: int, round_: int, iteration: int) -> None:
        """Report that ``done`` iterations are complete; ``iteration`` is below 0 in warm-up."""
        config = self._checked.config
        turn = f"{self._checked.rows[row].text}, round {round_ + 1}/{config.rounds}"
        if (row, round_) != self._turn and not self._live:
            self._turn = (row, round_)
            left = about(self.left_s(row, round_, iteration))
            total = self._checked.total_iterations
            self.phase(f"{turn} ({done}/{total} iterations done, about {left} left)")
        what = "warm-up" if iteration < 0 else f"{iteration + 1}/{config.share(round_)}"
        done_s = self._estimate.done_s(row, round_, iteration)
        self._bar.update(self._task, completed=done_s, description=f"{turn}, {what}")

    def left_s(self, row: int, round_: int, iteration: int) -> float:
        """Seconds from the end of this iteration to the end of the bench, at the current pace."""
        over = self._estimate.done_s(row, round_, iteration)
        pace = (time.monotonic() - self._began) / over
        return pace * max(0.0, self._estimate.total_s - over)

    def phase(self, text: str) -> None:
        """Show a phase that consists of no iterations."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
