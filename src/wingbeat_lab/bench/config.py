"""The configuration of one bench, checked in the parent before any worker starts. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wingbeat import topologies
from wingbeat.errors import UsageError, unknown
from wingbeat.types import Layout
from wingbeat_lab.bench import contenders, models, slow
from wingbeat_lab.bench.bound import seconds_per_byte
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.models import BenchModel
from wingbeat_lab.bench.protocol import ONLY, WHOLE
from wingbeat_lab.bench.slow import Slow
from wingbeat_lab.lab.spec import MIN_RATE, LabSpec, format_rate


def scaled(spec: LabSpec, factor: float) -> LabSpec:
    """Return the lab with every rate multiplied by ``factor``; loopback is unshaped and unchanged.

    >>> str(scaled(LabSpec.parse("star:4@1gbit,h3@200mbit"), 0.25))
    'star:4@250mbit,h3@50mbit'

    UsageError if a rate would be below the kernel's minimum.
    """
    if not spec.shaped or factor == 1:
        return spec
    rates = [spec.rate, *filter(None, (spec.trunk, spec.cross)), *(o.rate for o in spec.overrides)]
    slowest = min(rates)
    if slowest * factor < MIN_RATE:
        raise UsageError(
            f"lab {str(spec)!r} scaled by {factor:g} has a rate of {slowest * factor:g} bit/s; "
            f"allowed: {format_rate(MIN_RATE)} or more, so scale by at least {MIN_RATE / slowest:g}"
        )
    return replace(
        spec,
        rate=round(spec.rate * factor),
        trunk=round(spec.trunk * factor),
        cross=min(round(spec.cross * factor), round(spec.trunk * factor)),
        overrides=tuple(replace(o, rate=round(o.rate * factor)) for o in spec.overrides),
    )


def reduce_seconds_per_byte(spec: LabSpec) -> float | None:
    """Seconds per byte of a perfect reduce-scatter on this lab; None if links are unshaped.

    >>> reduce_seconds_per_byte(LabSpec.parse("star:4x2@1gbit")) * 250e6
    0.75
    """
    if not spec.shaped:
        return None
    rates = [
        sum(spec.link_rate(host, rail) for rail in range(spec.rails)) / 8
        for host in range(spec.hosts)
    ]
    return seconds_per_byte(rates, _trunks(spec))


def _trunks(spec: LabSpec) -> list[tuple[int, float]]:
    """Each leaf switch's number of hosts and its trunks' rate in bytes per second."""
    if not spec.trunk:
        return []
    sizes = [min(spec.leaf, spec.hosts - first) for first in range(0, spec.hosts, spec.leaf)]
    return [(size, spec.trunk * spec.rails / 8) for size in sizes]


OPTIMIZERS = ("adamw", "sgd")

LOSSES = 10
"""Number of iterations whose mean loss is compared with a target."""

LONGEST_SLEEP_S = 60.0
"""Limit for a slow worker: the others time out after 120 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One bench as plain values; ``check`` parses the texts.

    Attributes:
        lab: the lab's spec, before scaling.
        model: ``digits``, ``paced:NAME`` or a profile's ``FILE.json``, with ``@SCALE``.
        strategies: the rows; the first is the reference.
        iterations: timed iterations of each row, over all rounds.
        rounds: how often the rows take turns.
        warmup: iterations before the timed ones, in each round.
        per_host: workers on each host.
        optimizer: ``sgd`` (momentum 0.9, weight decay 1e-4) or ``adamw``.
        stretch: factor that slows a paced model's compute and the lab's links, so that a machine
            with few cores can carry the traffic.
        seed: of the model and of the data's order.
        trace: whether to record a few iterations of each row after the timed ones.
        breakdown: whether to record each row for its breakdown, and rows of DeAR twice more with
            half of their exchange.
        measure: whether to measure forward, backward and both halves of the exchange alone, once
            per round, for the speed-up and its bound.
        slow: workers that are slowed down, in the format of `slow.parse`.
        traffic: whether to sample each host's sent bytes over time.
        target_loss: the loss to which training is timed; None to omit the figure.

    Raises:
        UsageError: a number is out of range, or a name does not exist.
    """

    lab: str
    model: str
    strategies: tuple[str, ...]
    iterations: int = 30
    rounds: int = 3
    warmup: int = 3
    per_host: int = 1
    optimizer: str = "sgd"
    stretch: float = 1.0
    seed: int = 0
    trace: bool = False
    breakdown: bool = False
    measure: bool = True
    slow: tuple[str, ...] = ()
    target_loss: float | None = None
    traffic: bool = False

    def __post_init__(self) -> None:
        for name, least in (("iterations", 1), ("rounds", 1), ("warmup", 0), ("per_host", 1)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"{name} = {value}; allowed: {least} or more")
        if self.rounds > self.iterations:
            raise UsageError(
                f"{self.rounds} rounds share {self.iterations} iterations; allowed: at most as "
                "many rounds as iterations"
            )
        if not self.strategies:
            raise UsageError(f"no strategies; allowed: {', '.join(contenders.names())}")
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)

    def check(self) -> Checked:
        """Parse every text; UsageError for the first invalid one."""
        spec = LabSpec.parse(self.lab)
        model = models.parse(self.model, stretch=self.stretch)
        rows = tuple(contenders.parse(text) for text in self.strategies)
        for row in rows:
            self._check_row(row, model)
            self._check_topology(row, spec)
        if spec.hosts * self.per_host > 64:
            raise UsageError(
                f"{spec.hosts} hosts x {self.per_host} workers is too many for one machine; "
                "allowed: up to 64 workers"
            )
        if self.traffic and not spec.shaped:
            raise UsageError(
                f"traffic on lab {self.lab!r}, whose links have no rate to compare with; allowed: "
                "a lab with rates, such as star:4@1gbit"
            )
        self._check_target(model)
        scale = 1.0 if model.profile is None else model.profile.scale
        rows = tuple(row.at_scale(scale) for row in rows)
        if model.profile is not None:
            rows = tuple(row.settled() for row in rows)
        return Checked(
            self, spec, scaled(spec, model.link_scale), model, rows, self._slow(spec, model)
        )

    def _slow(self, spec: LabSpec, model: BenchModel) -> tuple[Slow, ...]:
        """Parse the slow workers; refuse sleeps that exceed the other workers' timeout."""
        workers = spec.hosts * self.per_host
        found = slow.parse(self.slow, workers=workers, iterations=self.iterations)
        normal_s = sum(model.compute_s() or ())
        for each in found:
            if each.factor * normal_s > LONGEST_SLEEP_S:
                raise UsageError(
                    f"--slow {each.text!r} sleeps {each.factor * normal_s:.0f} s in an iteration; "
                    f"allowed: up to {LONGEST_SLEEP_S:g} s, as the other workers wait for it"
                )
        return found

    def _check_target(self, model: BenchModel) -> None:
        """Refuse a target that no run can reach, or that is meaningless."""
        target = self.target_loss
        if target is None:
            return
        if not (math.isfinite(target) and target > 0):
            raise UsageError(f"target_loss = {target:g}; allowed: numbers above 0")
        if model.profile is not None:
            raise UsageError(
                f"target_loss = {target:g} with model {model.name!r}, which does not learn; "
                "allowed: digits"
            )
        shortest = self.warmup + self.iterations // self.rounds
        if shortest < LOSSES:
            raise UsageError(
                f"target_loss = {target:g} with {shortest} iterations in a round, warm-up included;"
                f" allowed: {LOSSES} or more, whose mean loss is compared"
            )

    def _check_row(self, row: Contender, model: BenchModel) -> None:
        """Refuse a row that would measure something other than its name."""
        if row.name == "ddp+powersgd" and self.warmup < 3:
            raise UsageError(
                f"warmup = {self.warmup}; {row.name} compresses from its third iteration on: "
                "allowed are 3 or more"
            )
        if row.name == "fsdp" and model.profile is not None:
            raise UsageError(
                f"fsdp with model {model.name!r}: FSDP replaces the parameters that a paced "
                "model keeps its time by; allowed: digits"
            )

    def _check_topology(self, row: Contender, spec: LabSpec) -> None:
        """Refuse a topology that does not fit the number of workers or interfaces."""
        if row.strategy is not None:
            interfaces = spec.rails if spec.hosts > 1 else 1  # a single host uses its loopback
            layout = Layout.even(spec.hosts, self.per_host)
            topologies.fitted(row.strategy.topology, layout, interfaces)

    def share(self, round_: int) -> int:
        """Timed iterations of each row in this round; ``iterations`` are split evenly."""
        each, more = divmod(self.iterations, self.rounds)
        return each + (round_ < more)

    def before(self, round_: int) -> int:
        """Timed iterations of each row in the rounds before this one."""
        return sum(self.share(earlier) for earlier in range(round_))

    def to_json(self) -> str:
        """The values as JSON, for the workers."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, path: Path) -> BenchConfig:
        """Parse the result of ``to_json``."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


@dataclass(frozen=True, slots=True)
class Checked:
    """A config with its parsed texts.

    Attributes:
        asked: the lab as specified by the user.
        lab: the lab as built: its rates follow the model's scale and the stretch.
        rows: what is compared, in the user's order.
        slow: which workers are slowed down, and when.
    """

    config: BenchConfig
    asked: LabSpec
    lab: LabSpec
    model: BenchModel
    rows: tuple[Contender, ...]
    slow: tuple[Slow, ...]

    @property
    def workers(self) -> int:
        """Total number of workers."""
        return self.lab.hosts * self.config.per_host

    @property
    def recorded(self) -> list[tuple[int, str]]:
        """What is recorded after the timed iterations: rows and their variants."""
        out = []
        if self.config.trace or self.config.breakdown:
            for number, row in enumerate(self.rows):
                split = self.config.breakdown and row.traits.halves and self.workers > 1
                out += [(number, each) for each in (WHOLE, *(ONLY if split else ()))]
        return out

    @property
    def bucket_bytes(self) -> int:
        """The usual bucket size, 25 MB (2**20 bytes), at the model's scale."""
        scale = 1.0 if self.model.profile is None else self.model.profile.scale
        return int(25 * 2**20 * scale)

    @property
    def total_iterations(self) -> int:
        """Iterations of the whole bench with warm-up, without tuning and tracing."""
        config = self.config
        return len(self.rows) * (config.iterations + config.rounds * config.warmup)
