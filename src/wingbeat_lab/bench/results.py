"""Compute the figures from the workers' time stamps, and the JSON report. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wingbeat_lab.bench import bound, traffic
from wingbeat_lab.bench.breakdown import Parts
from wingbeat_lab.bench.config import LOSSES, Checked, reduce_seconds_per_byte
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.measure import Measured, Quantiles
from wingbeat_lab.bench.traffic import CrossTraffic, Samples, Seen, Traffic

Prices = Mapping[str, Mapping[str, float]]
"""``fixed_s`` and ``s_per_byte`` of a row's codec work, by function."""

Curve = Sequence[tuple[float, float]]
"""Seconds and loss of each iteration, in order, warm-up included; of one worker."""


@dataclass(frozen=True, slots=True)
class TimeToLoss:
    """When a row's loss fell below a target.

    Attributes:
        seconds: median over the rounds; None unless every round reached it.
        by_round: seconds of each round, None where it was not reached.
    """

    target: float
    seconds: float | None
    by_round: list[float | None]


def time_to_loss(target: float, rounds: Sequence[Sequence[Curve]]) -> TimeToLoss:
    """Combine the rounds of a row; each holds one curve for each worker."""
    by_round = [seconds_to(target, curves) for curves in rounds]
    reached = [seconds for seconds in by_round if seconds is not None]
    median = statistics.median(reached) if len(reached) == len(by_round) else None
    return TimeToLoss(target, median, by_round)


def seconds_to(target: float, curves: Sequence[Curve]) -> float | None:
    """Seconds until the mean loss of the last `LOSSES` iterations is below the target, or None.

    An iteration's loss is the mean over the workers; it ends with its last worker. Workers whose
    numbers of iterations differ are not in lockstep: their steps count in order of time.
    """
    if len({len(curve) for curve in curves}) > 1:
        return _of_steps(target, curves)
    losses: list[float] = []
    spent = [0.0] * len(curves)
    for workers in zip(*curves, strict=True):
        losses.append(statistics.fmean(loss for _, loss in workers))
        spent = [before + s for before, (s, _) in zip(spent, workers, strict=True)]
        if len(losses) >= LOSSES and statistics.fmean(losses[-LOSSES:]) < target:
            return max(spent)
    return None


def _of_steps(target: float, curves: Sequence[Curve]) -> float | None:
    """The same for the last `LOSSES` steps times the number of workers, of any worker."""
    steps: list[tuple[float, float]] = []
    for curve in curves:
        ends = itertools.accumulate(seconds for seconds, _ in curve)
        steps += zip(ends, (loss for _, loss in curve), strict=True)
    steps.sort()
    count = LOSSES * len(curves)
    for last in range(count, len(steps) + 1):
        if statistics.fmean(loss for _, loss in steps[last - count : last]) < target:
            return steps[last - 1][0]
    return None


WORKER = "worker"
"""The role of a process that trains."""

SERVER = "server"
"""The role of the parameter servers that a worker has started, combined."""

CORES_FULL = 0.8
"""Share of the cores' time from which a row counts as limited by them.

Less than 1: processes wait for each other between the bursts of an exchange, and the kernel's work
for the links outside of any process is not counted.
"""

Stamps = Sequence[Sequence[float]]
"""For each worker, when each iteration began and when the last one ended; seconds."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Iterations per second: of all workers together, and of each by its rank."""

    total: float
    by_rank: list[float]


def samples_by_rank_s(blocks: Sequence[Stamps]) -> list[list[float]]:
    """Seconds of each worker's iterations by its own clock, over all blocks."""
    return [
        [after - before for stamps in own for before, after in itertools.pairwise(stamps)]
        for own in zip(*blocks, strict=True)
    ]


def rates(samples: Sequence[Sequence[float]]) -> Rates:
    """Iterations per second of workers whose iterations took so many seconds each."""
    by_rank = [len(own) / sum(own) for own in samples]
    return Rates(sum(by_rank), by_rank)


def cpu_s_per_iteration(
    blocks: Sequence[Mapping[str, Sequence[float]]], iterations: int
) -> dict[str, list[float]]:
    """CPU seconds per iteration of each process, by role and rank; servers by their worker."""
    roles = {role: len(own) for block in blocks for role, own in block.items()}
    return {
        role: [
            sum(own) / iterations
            for own in zip(*(b.get(role, [0.0] * ranks) for b in blocks), strict=True)
        ]
        for role, ranks in sorted(roles.items())
    }


def cores_share(
    stamps: Sequence[Stamps], cpu_s: Sequence[Mapping[str, Sequence[float]]], cores: int
) -> float:
    """Share of the cores' time, 0 to 1, that the bench's processes used in the timed iterations.

    ``stamps`` and ``cpu_s`` (seconds, by role) are those of each block.
    """
    wall = sum(max(own[-1] for own in each) - min(own[0] for own in each) for each in stamps)
    used = sum(sum(own) for block in cpu_s for own in block.values())
    return used / (cores * wall)


@dataclass(frozen=True, slots=True)
class Block:
    """The results of one row in one round.

    Attributes:
        row: index into the rows.
        starts: for each worker, when each timed iteration began and, last, when the one after
            them began; seconds of the machine's monotonic clock, one for all workers.
        sent_bytes: for each worker, what its host's interfaces sent in each iteration, over the
            timed ones and the last warm-up, with no traffic in flight before and after.
        cpu_s: by role, the CPU seconds of each of its processes over the timed iterations.
        loss: of the last timed iteration, mean over workers.
        accuracy: on the test set after the block, 0 to 1; None for a paced model.
        coded: whether gradients went through the row's codec; None without one.
        merge: what the row's plan reports; None without one.
        curves: for each worker, seconds and loss of each iteration, warm-up included; None
            unless the bench has a target loss.
        sent_by_class: for each worker, ``sent_bytes`` by class of the lab's links, on the wire;
            empty without classes.
        traffic: for each worker, its host's sent bytes over time; None unless sampled.
        steps_by_rank: for averaged models, the steps of each worker in the timed iterations.
        fired_by_rank: under bounded staleness, how often the bound acted on each worker in the
            timed iterations, by action.
    """

    row: int
    starts: list[list[float]]
    sent_bytes: list[float]
    cpu_s: dict[str, list[float]]
    loss: float
    accuracy: float | None = None
    coded: bool | None = None
    merge: dict[str, Any] | None = None
    curves: list[Curve] | None = None
    sent_by_class: list[dict[str, float]] = field(default_factory=list)
    traffic: list[Samples] | None = None
    steps_by_rank: list[int] | None = None
    fired_by_rank: list[dict[str, int]] | None = None

    def iterations_s(self) -> list[float]:
        """Seconds between the last worker's start of one iteration and of the next."""
        return [after - before for before, after in itertools.pairwise(self.last_starts())]

    def last_starts(self) -> list[float]:
        """When the last worker began each timed iteration and, last, the one after them."""
        return [max(stamps) for stamps in zip(*self.starts, strict=True)]

    def bytes_per_iteration(self, sharing: int) -> float:
        """Bytes per worker and iteration, where ``sharing`` workers share a host's counters."""
        return statistics.fmean(self.sent_bytes) / sharing

    def class_bytes_per_iteration(self, sharing: int) -> dict[str, float]:
        """The same by class; empty if the lab has none."""
        names = self.sent_by_class[0] if self.sent_by_class else {}
        sent = {name: [each[name] for each in self.sent_by_class] for name in names}
        return {name: statistics.fmean(each) / sharing for name, each in sent.items()}


@dataclass(frozen=True, slots=True)
class Deciding:
    """The tuning of a row, before its first turn.

    Attributes:
        seconds: of the training, by rank 0's clock.
        decision: the result, as in `wingbeat.planning.control.Decisions`.
    """

    iterations: int
    seconds: float
    decision: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One row's figures; ``notes.NOTES`` describes each."""

    strategy: str
    iteration_s: Quantiles
    typical_s: float
    ratio: float
    bytes_per_iteration: float
    exposed_s: float | None
    bound_s: float | None
    bound_eq6_s: float | None
    bound_formula: str
    fraction_of_bound: float | None
    final_loss: float
    accuracy: float | None
    exact: bool
    samples_s: list[float]
    samples_by_rank_s: list[list[float]]
    iterations_per_s: Rates
    cpu_s_per_iteration: dict[str, list[float]]
    cores_share: float
    limited_by_cores: bool
    ratio_to_best_ddp: float | None = None
    speedup: float | None = None
    bound_measured_s: float | None = None
    fraction_of_s_max: float | None = None
    breakdown: dict[str, Parts] | None = None
    codec: str | None = None
    codec_prices: Prices | None = None
    merge: dict[str, Any] | None = None
    deciding: Deciding | None = None
    time_to_loss: TimeToLoss | None = None
    class_bytes_per_iteration: dict[str, float] = field(default_factory=dict)
    traffic: Traffic | None = None
    steps_by_rank: list[int] | None = None
    fired_by_rank: list[dict[str, int]] | None = None
    cross_traffic: CrossTraffic | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole bench: configuration, environment and results."""

    lab: str
    model: str
    machine: dict[str, Any]
    runs: list[Run]
    asked_lab: str
    workers: int
    config: dict[str, Any]
    command: str
    date: str
    versions: dict[str, str]
    compute_s: dict[str, float] | None
    notes: dict[str, str]
    measured: Measured | None = None
    normal_iteration_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; ``lab, model, machine, runs`` come first."""
        return asdict(self)


def runs(
    checked: Checked,
    blocks: Sequence[Block],
    measured: Measured | None = None,
    *,
    cores: int,
    deciding: Sequence[Deciding | None] = (),
    prices: Sequence[Prices | None] = (),
    cross: Seen | None = None,
) -> list[Run]:
    """Turn the blocks into one run for each row, in the rows' order.

    ``measured`` has the times of computation and links alone, ``deciding`` the tuning of each row,
    ``prices`` those of each row's codec, ``cross`` the samples of cross-traffic.
    """
    by_row = [[block for block in blocks if block.row == i] for i in range(len(checked.rows))]
    samples = [[s for block in own for s in block.iterations_s()] for own in by_row]
    quantiles = [Quantiles.of(own) for own in samples]
    # Without lockstep several gradients or steps may complete at once after a long wait, so a
    # median would omit the waits.
    typical = [
        times.median if row.traits.synchronous else statistics.fmean(own)
        for row, own, times in zip(checked.rows, samples, quantiles, strict=True)
    ]
    ddp = [q.median for row, q in zip(checked.rows, quantiles, strict=True) if row.ddp]
    frame = _Frame(
        checked=checked,
        measured=measured,
        cores=cores,
        compute_s=_compute_s(checked, quantiles),
        first_s=typical[0],
        best_ddp_s=min(ddp, default=None),
        cross=cross or {},
    )
    decided = deciding or [None] * len(by_row)
    charged = prices or [None] * len(by_row)
    rows = zip(checked.rows, by_row, samples, quantiles, typical, decided, charged, strict=True)
    return [_run(frame, *each) for each in rows]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What all rows have in common."""

    checked: Checked
    measured: Measured | None
    cores: int
    compute_s: float | None
    first_s: float
    best_ddp_s: float | None
    cross: Seen


def _run(
    frame: _Frame,
    row: Contender,
    own: list[Block],
    samples: list[float],
    times: Quantiles,
    typical: float,
    deciding: Deciding | None,
    prices: Prices | None,
) -> Run:
    checked, measured = frame.checked, frame.measured
    floor, eq6, formula = _bounds(checked, row, reduce_seconds_per_byte(checked.lab))
    alone = None if measured is None or row.alone else measured.bound_s
    sharing = checked.config.per_host if checked.lab.shaped else checked.workers
    compute = frame.compute_s
    return Run(
        strategy=row.text,
        iteration_s=times,
        typical_s=typical,
        ratio=typical / frame.first_s,
        ratio_to_best_ddp=None if frame.best_ddp_s is None else typical / frame.best_ddp_s,
        bytes_per_iteration=statistics.fmean(b.bytes_per_iteration(sharing) for b in own),
        exposed_s=None if compute is None else max(0.0, typical - compute),
        bound_s=floor,
        bound_eq6_s=eq6,
        bound_formula=formula,
        fraction_of_bound=None if floor is None else floor / typical,
        final_loss=own[-1].loss,
        accuracy=own[-1].accuracy,
        exact=row.traits.exact,
        samples_s=samples,
        speedup=None if measured is None else measured.speedup(typical),
        bound_measured_s=alone,
        fraction_of_s_max=None if alone is None else alone / typical,
        codec=_codec(own),
        codec_prices=prices,
        merge=next((b.merge for b in own if b.merge is not None), None),
        deciding=deciding,
        time_to_loss=_time_to_loss(checked, own),
        traffic=_traffic(checked, own),
        cross_traffic=_cross_traffic(frame, own),
        steps_by_rank=_steps_by_rank(own),
        fired_by_rank=all_fired(block.fired_by_rank for block in own),
        class_bytes_per_iteration=_mean([b.class_bytes_per_iteration(sharing) for b in own]),
        **_of_clocks(frame, own),
    )


def _of_clocks(frame: _Frame, blocks: Sequence[Block]) -> dict[str, Any]:
    """The fields of a run that derive from each worker's clock and CPU time."""
    stamps, cpu_s = [b.starts for b in blocks], [b.cpu_s for b in blocks]
    by_rank = samples_by_rank_s(stamps)
    busy = cores_share(stamps, cpu_s, frame.cores)
    return {
        "samples_by_rank_s": by_rank,
        "iterations_per_s": rates(by_rank),
        "cpu_s_per_iteration": cpu_s_per_iteration(cpu_s, len(by_rank[0])),
        "cores_share": busy,
        "limited_by_cores": busy >= CORES_FULL,
    }


def _time_to_loss(checked: Checked, blocks: Sequence[Block]) -> TimeToLoss | None:
    target = checked.config.target_loss
    if target is None:
        return None
    return time_to_loss(target, [b.curves for b in blocks if b.curves is not None])


def _steps_by_rank(blocks: Sequence[Block]) -> list[int] | None:
    steps = [block.steps_by_rank for block in blocks if block.steps_by_rank is not None]
    return [sum(own) for own in zip(*steps, strict=True)] if steps else None


def all_fired(blocks: Iterable[list[dict[str, int]] | None]) -> list[dict[str, int]] | None:
    """Sum by rank how often a bound has acted; None without a bound."""
    fired = [by_rank for by_rank in blocks if by_rank is not None]
    if not fired:
        return None
    return [
        {what: sum(one[what] for one in of_rank) for what in of_rank[0]}
        for of_rank in zip(*fired, strict=True)
    ]


def _traffic(checked: Checked, blocks: Sequence[Block]) -> Traffic | None:
    """Traffic of hosts over time; workers of one host have the same samples."""
    each = checked.config.per_host if checked.lab.shaped else checked.workers
    rounds = [block.traffic[::each] for block in blocks if block.traffic is not None]
    if not rounds:
        return None
    lab = checked.lab

    def rate(host: int) -> float:
        return float(sum(lab.link_rate(host, interface) for interface in range(lab.rails)))

    return traffic.traffic(rounds, rate, traffic.WINDOW_S * checked.config.stretch)


def _cross_traffic(frame: _Frame, blocks: Sequence[Block]) -> CrossTraffic | None:
    if not frame.cross:
        return None
    directions = len(frame.cross) * frame.checked.lab.rails
    return traffic.during(frame.cross, [block.last_starts() for block in blocks], directions)


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in each) for name in each[0]}


def _codec(blocks: Sequence[Block]) -> str | None:
    """Whether the row's codec was on, by the earlier decision; None without a codec."""
    return {None: None, True: "on", False: "off"}[blocks[-1].coded]


def _compute_s(checked: Checked, quantiles: Sequence[Quantiles]) -> float | None:
    times = checked.model.compute_s()
    if times is not None:
        return sum(times)
    for row, own in zip(checked.rows, quantiles, strict=True):
        if row.alone:
            return own.median
    return None


def _bounds(
    checked: Checked, row: Contender, per_byte: float | None
) -> tuple[float | None, float | None, str]:
    """The bound, its simple form, and the formula or the reason why there is none."""
    layers = checked.model.layers(row)
    if layers is None:
        return None, None, f"none: {checked.model.name} has no stated compute time"
    if row.traits.bound not in bound.BOUNDS:
        return None, None, f"none: no floor is known for {row.name}"
    if per_byte is None and not row.alone:
        return None, None, "none: the lab's links have no stated rate"
    rate = per_byte or 0.0
    own = bound.BOUNDS[row.traits.bound]
    return own.floor(layers, rate), own.simple(layers, rate), own.formula
