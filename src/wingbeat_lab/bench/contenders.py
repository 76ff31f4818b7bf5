"""The rows of a bench: wingbeat's strategies and PyTorch's own methods.

A row is written ``name`` or ``name:key=value,key=value``. This module does not import torch: a row
is checked before any worker starts. ``attach`` sets it up inside a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wingbeat import compression
from wingbeat.errors import UsageError, unknown
from wingbeat.settings import read_options
from wingbeat.strategies import Strategy
from wingbeat.traits import Traits
from wingbeat_lab import baselines
from wingbeat_lab.bench.bound import low_rank_bytes


def _traits(bound: str, *, exact: bool, synchronous: bool = True) -> Traits:
    return Traits(
        exact=exact,
        synchronous=synchronous,
        bound=bound,
        halves=False,
        in_parts=False,
        gathered=False,
    )


@dataclass(frozen=True, slots=True)
class Baseline:
    """A method of PyTorch to compare with: traits, description, default options.

    ``ddp`` is whether it is a form of DistributedDataParallel.
    """

    traits: Traits
    note: str
    defaults: dict[str, Any] = field(default_factory=dict)
    ddp: bool = False


_EXACT, _INEXACT = _traits("whole", exact=True), _traits("whole", exact=False)

BASELINES: dict[str, Baseline] = {
    "single": Baseline(
        _traits("single", exact=False, synchronous=False),
        "No communication: every worker trains alone.",
    ),
    "ddp": Baseline(_EXACT, "PyTorch's DistributedDataParallel as it is.", {"mb": 25.0}, ddp=True),
    "ddp+fp16": Baseline(
        _INEXACT, "DDP with PyTorch's fp16_compress_hook.", {"mb": 25.0}, ddp=True
    ),
    "ddp+bf16": Baseline(
        _INEXACT, "DDP with PyTorch's bf16_compress_hook.", {"mb": 25.0}, ddp=True
    ),
    "ddp+powersgd": Baseline(
        _INEXACT, "DDP with PyTorch's PowerSGD hook, in one bucket.", {"rank": 1}, ddp=True
    ),
    "fsdp": Baseline(_traits("fsdp", exact=True), "fully_shard over the children of the model."),
}
"""Rows that are not wingbeat's own."""

COMPOSED = "strategy:plan=merged,compression=sketch,schedule=dear"
"""How a row is written that is no preset."""

_HALVED = ("ddp+fp16", "ddp+bf16")
"""Rows whose gradients are sent with 16 bits."""

_HALF_BYTES = 2
"""Bytes of an element in fp16 and bf16."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table.

    Attributes:
        name: a key of ``BASELINES`` or a strategy's name.
        traits: its guarantees, and which bound holds.
        options: a baseline's options with defaults; empty for strategies.
        strategy: wingbeat's composition, or None for a baseline.
        scale: factor on every bucket size, the model's scale.
    """

    text: str
    name: str
    traits: Traits
    options: dict[str, Any]
    strategy: Strategy | None = None
    scale: float = 1.0

    def at_scale(self, scale: float) -> Contender:
        """The same row for a model of ``scale`` of its size, with buckets scaled alike.

        Otherwise a model of eight buckets would have two, and lose its overlap.
        """
        strategy = None if self.strategy is None else self.strategy.scaled(scale)
        return replace(self, strategy=strategy, scale=scale)

    def settled(self) -> Contender:
        """The same row without top-k's default warm-up, for models that do not learn.

        The timed iterations are then those of the steady state.
        """
        strategy = self.strategy
        if strategy is None or strategy.codec is None or "warmup=" in self.text:
            return self
        settled = replace(strategy, compression=strategy.codec.without_warmup())
        return replace(self, strategy=settled)

    @property
    def wire(self) -> str | compression.Coded:
        """The encoding of gradients; empty for their own dtype."""
        return "" if self.strategy is None else self.strategy.wire

    def wire_bytes(
        self, shapes: Sequence[Sequence[int]], itemsize: int = 4, names: Sequence[str] = ()
    ) -> int:
        """Bytes of the encoded gradients of tensors of these shapes.

        ``names`` are the tensors' names, for rows that treat groups of them differently.
        """
        if self.name == "ddp+powersgd":
            return sum(low_rank_bytes(shape, self.options["rank"], itemsize) for shape in shapes)
        if self.alone:
            return 0
        width = min(itemsize, _HALF_BYTES) if self.name in _HALVED else itemsize
        own = [compression.for_parameter(self.wire, name) for name in names] or [self.wire] * len(
            shapes
        )
        return sum(map(compression.least_bytes, own, shapes, [width] * len(shapes)))

    @property
    def ddp(self) -> bool:
        """Whether it is DistributedDataParallel, with any hook."""
        return self.name in BASELINES and BASELINES[self.name].ddp

    @property
    def decides(self) -> bool:
        """Whether it tunes itself by measuring, before it can be timed."""
        if self.strategy is None:
            return False
        plan, wire = self.strategy.plan, self.strategy.wire
        tried = compression.options_of(wire).auto_disable
        tunes = plan.tuning() or plan.merging() or plan.choosing() or self.strategy.exchange.tuned
        return tried or bool(tunes)

    @property
    def averages(self) -> bool:
        """Whether workers average their models and make local steps in between."""
        return self.traits.bound == "local"

    @property
    def alone(self) -> bool:
        """Whether nothing is exchanged."""
        return self.traits.bound == "single"


def names() -> list[str]:
    """All valid names of rows."""
    return [*BASELINES, *baselines.names()]


def about() -> dict[str, str]:
    """Return a one-line description of every name, and its traits without options."""
    descriptions = {
        name: f"{known.note} ({known.traits.words()})" for name, known in BASELINES.items()
    }
    for name, preset in baselines.PRESETS.items():
        what = (preset.__doc__ or "").partition("\n")[0]
        descriptions[name] = f"{what} ({preset().traits.words()})"
    return descriptions | {"strategy": f"A composition of your own, as in {COMPOSED}."}


def parse(text: str) -> Contender:
    """Parse one row.

    >>> parse("ddp+powersgd:rank=4").options
    {'rank': 4}

    UsageError for an unknown name or option (the nearest is named), or an invalid value.
    """
    name, _, rest = text.partition(":")
    name = name.lower()
    if name in baselines.names():
        strategy = baselines.parse(text)
        return Contender(text, name, strategy.traits, {}, strategy)
    if name == "hsdp":
        raise UsageError(
            "strategy 'hsdp': in a bench each worker trains a whole model, and HSDP divides it; "
            "compare strategies with HSDP by python benchmarks/hsdp.py --lab star:2@1gbit "
            "--per-host 4, in a checkout of wingbeat"
        )
    if name not in BASELINES:
        raise unknown("strategy", name, names())
    known = BASELINES[name]
    kinds = {key: type(value) for key, value in known.defaults.items()}
    given = read_options(rest, kinds, where=text)
    for key, value in given.items():
        if not 0 < value <= 4096:
            raise UsageError(f"option {key}={value} in {text!r}: allowed are values from 0 to 4096")
    return Contender(text, name, known.traits, {**known.defaults, **given})
