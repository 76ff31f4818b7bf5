"""How long a bench will take, said before it starts and refined while it runs.

A paced model's computation is stated, and bytes over the links' rate are the rest: so an iteration
is known beforehand to a tenth or two, on a machine that has little else to do. What processors
cost on top is a guess from a machine with two cores, and what hundreds of small exchanges cost to
start is not in it. A real model's computation is a guess altogether.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from wingbeat.planning.thresholds import LAG, WARMUP, typical_blocks
from wingbeat.wires import TopK
from wingbeat_lab.bench import slow
from wingbeat_lab.bench.bound import floor
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.links import reduce_seconds_per_byte

OF_LINE_RATE = 0.93
"""Share of the line rate that collectives reach, headers and the starts of messages included."""

CORE_S = 0.012
"""Seconds of a core that a worker's iteration takes beside what is paced: Python and autograd."""

CORE_S_PER_BYTE = 2.5e-9
"""The same for each byte of gradients: copied, summed, through the kernel and back."""

DIGITS_S = 0.012
"""Seconds of a core for an iteration on the digits, forward to update."""

DIGITS_BYTES = 287_016
"""Bytes of the gradients of the network for the digits."""

START_S, START_CORE_S = 3.0, 6.0
"""To make and undo the lab; and of a core, for each worker to import what it needs and meet."""

TURN_S = 0.3
"""To build a model and hand it over, beside sending it to everyone."""

TRIAL = 25
"""Iterations until it is known whether a codec stays on, give or take ten; once for a row."""

PLANS = 80
"""The same until it is known which plan of merged layers stays, give or take fifty."""

PASSES, HALVES = 3, 4
"""Of the measurement of computation and links alone: passes of the model, and how often each half
of an all-reduce carries all gradients."""

RECORDED, RECORDED_BROKEN_DOWN = 3, 7
"""Iterations recorded for a trace, and for a breakdown."""


@dataclass(frozen=True, slots=True)
class RowTimes:
    """What one row takes: seconds of an iteration, and iterations until it has decided, once."""

    iteration_s: float
    deciding: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What each part of a bench takes, in seconds.

    Attributes:
        checked: the bench.
        rows: one for each of its rows.
        start_s: until the workers have met, and after they have parted.
        turn_s: at the begin of a row's turn.
        round_s: measuring computation and links alone, at the begin of a round.
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
        """The whole bench."""
        config = self.checked.config
        last = len(self.rows) - 1
        rounds = config.rounds - 1
        return self.done_s(last, rounds, config.share(rounds) - 1) + self.after_s

    def done_s(self, row: int, round_: int, iteration: int) -> float:
        """What is over once this iteration is: counted from 0 in its turn, below 0 in warm-up."""
        config = self.checked.config
        seconds = self.start_s + (round_ + 1) * self.round_s
        for r in range(round_ + 1):
            for number in range(len(self.rows) if r < round_ else row):
                seconds += self._turn_s(number, r, config.share(r))
        return seconds + self._turn_s(row, round_, iteration + 1)

    def _turn_s(self, row: int, round_: int, iterations: int) -> float:
        """A row's turn up to so many timed iterations; less than none while it warms up."""
        own = self.rows[row]
        count = max(0, self.checked.config.warmup + iterations)
        turns = 1
        if round_ == 0 and own.deciding:  # on a model of its own
            count, turns = count + own.deciding, 2
        return turns * self.turn_s + count * own.iteration_s


def of(checked: Checked, cores: int | None = None) -> Estimate:
    """Estimate one bench.

    Args:
        checked: what is going to be measured.
        cores: that all workers share; default: those this process may use.
    """
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
    turn = TURN_S + half * hosts / max(1, hosts - 1) + busy  # rank 0's weights go to everyone
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
        # Everyone's choice goes to everyone: no sum on the way makes it one.
        per_byte *= checked.workers / 2
    if layers is None:
        moved = 0.0 if contender.alone else 2 * per_byte * nbytes
        seconds = max(1.0, share) * DIGITS_S + moved
    else:
        # Averages may be made under computation, and hide less than all of it.
        kinds = ("whole",) if contender.averages else (contender.traits.bound, "whole")
        least = next(filter(None, (floor(kind, layers, per_byte) for kind in kinds)), 0.0)
        seconds = least + share * (CORE_S + CORE_S_PER_BYTE * nbytes * (not contender.alone))
    slept = slow.longest(checked.slow, iterations=checked.config.iterations)
    seconds += slept * sum(checked.model.compute_s() or (max(1.0, share) * DIGITS_S,))
    return RowTimes(seconds, _deciding(contender, nbytes) if checked.workers > 1 else 0)


def _deciding(contender: Contender, nbytes: int) -> int:
    """Iterations until a row has decided, with so many bytes of gradients."""
    if contender.strategy is None:
        return 0
    choices = contender.strategy.choices()
    tried = not isinstance(choices.wire, str) and choices.wire.auto_disable
    count = TRIAL if tried else 0
    if choices.tuning is not None:
        tuning = choices.tuning
        # A model that the smallest size holds has one plan only, which the first iteration shows.
        count += tuning.trials * (tuning.steps + 4) if nbytes > tuning.low_bytes else 2
    if choices.servers is not None and choices.servers.tuning is not None:
        trial = WARMUP + choices.servers.tuning.steps + LAG
        count += LAG + typical_blocks(choices.servers.classes) * trial
    if choices.merging is not None:
        count += 2 * (choices.merging.steps + 2)
        if choices.merging.rule == "tried":
            # Plans are compared at the density that stays.
            count += PLANS + (choices.wire.warmup if isinstance(choices.wire, TopK) else 0)
    return count


def gradient_bytes(checked: Checked) -> int:
    """Return the bytes of all gradients of the model."""
    profile = checked.model.profile
    if profile is None:
        return DIGITS_BYTES
    return sum(4 * math.prod(p.shape) for layer in profile.layers for p in layer.parameters)


def _per_byte(checked: Checked) -> float:
    """Seconds that half an all-reduce takes for each byte; a loopback is as fast as its cores."""
    return (reduce_seconds_per_byte(checked.lab) or 0.0) / OF_LINE_RATE


def of_all(configs: Iterable[BenchConfig]) -> float:
    """Return what several benches take one after the other, in seconds.

    Raises:
        UsageError: a value in one of them cannot work.
    """
    return sum(of(config.check()).total_s for config in configs)


def about(seconds: float) -> str:
    """Say roughly how long that is.

    >>> [about(s) for s in (4, 38, 89, 91, 1000, 5400)]
    ['10 s', '40 s', '90 s', '2 min', '17 min', '1 h 30 min']
    """
    if seconds <= 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
