"""What stands in a bench's rows: wingbeat's strategies and what PyTorch itself offers.

A row is written ``name`` or ``name:key=value,key=value``. Nothing here imports torch: a row is
checked before any worker starts. ``attach`` makes it real inside a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from wingbeat import strategies, wires
from wingbeat.bench.bound import low_rank_bytes
from wingbeat.errors import UsageError, unknown


@dataclass(frozen=True, slots=True)
class Baseline:
    """What PyTorch offers, to be compared with; the attributes are a `Contender`'s."""

    kind: str
    exact: bool
    note: str
    defaults: dict[str, Any] = field(default_factory=dict)


BASELINES: dict[str, Baseline] = {
    "single": Baseline("single", False, "no communication: every worker trains alone"),
    "ddp": Baseline("allreduce", True, "DistributedDataParallel as it is", {"mb": 25.0}),
    "ddp+fp16": Baseline("allreduce", False, "DDP with PyTorch's fp16_compress_hook", {"mb": 25.0}),
    "ddp+powersgd": Baseline(
        "allreduce", False, "DDP with PyTorch's PowerSGD hook, in one bucket", {"rank": 1}
    ),
    "fsdp": Baseline("fsdp", True, "fully_shard over the children of the model"),
}
"""Rows that are not wingbeat's own: kind of bound, whether gradients stay exact, what it is."""

_HALF_BYTES = 2
"""Bytes of an element in fp16 and bf16."""

_SCHEDULES = {"wfbp": "allreduce", "dear": "dear"}


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table.

    Attributes:
        text: as the user wrote it.
        name: a key of ``BASELINES`` or a strategy's name.
        kind: which floor of ``bound.FORMULAS`` holds; ``"other"`` where none is known.
        exact: whether its gradients are the mean over all workers, up to rounding.
        options: a baseline's options, defaults filled in; empty for strategies.
        strategy: wingbeat's dataclass, or None for a baseline.
        scale: factor on every bucket size, the model's scale.
    """

    text: str
    name: str
    kind: str
    exact: bool
    options: dict[str, Any]
    strategy: strategies.Strategy | None = None
    scale: float = 1.0

    def at_scale(self, scale: float) -> Contender:
        """The same row for a model of ``scale`` of its size: buckets shrink with the model.

        Otherwise a model of eight buckets would become one of two, and lose its overlap.
        """
        strategy = self.strategy
        if strategy is not None:
            sizes = [f.name for f in fields(strategy) if f.name.endswith("mb")]
            changes = {name: getattr(strategy, name) * scale for name in sizes}
            strategy = replace(strategy, **changes)
        return replace(self, strategy=strategy, scale=scale)

    def settled(self) -> Contender:
        """The same row without the warm-up of top-k that it has by default.

        For a model that does not learn: what is timed is to be what training settles to.
        """
        wire = _wire(self.strategy)
        if self.strategy is None or not isinstance(wire, wires.TopK) or "warmup=" in self.text:
            return self
        own: dict[str, Any] = {"warmup": 0}
        if not isinstance(self.strategy, strategies.OMGS) or self.strategy.wire != "topk":
            own = {"wire": replace(wire, warmup=0)}
        return replace(self, strategy=replace(self.strategy, **own))

    def wire_bytes(self, shapes: Sequence[Sequence[int]], itemsize: int = 4) -> int:
        """Bytes of the gradients of tensors of these shapes, as they travel here."""
        if self.name == "ddp+powersgd":
            return sum(low_rank_bytes(shape, self.options["rank"], itemsize) for shape in shapes)
        if self.name == "single":
            return 0
        width = min(itemsize, _HALF_BYTES) if self.name == "ddp+fp16" else itemsize
        wire = _wire(self.strategy)
        return sum(wires.least_bytes(wire, shape, width) for shape in shapes)


def names() -> list[str]:
    """Every name that a row may have."""
    return [*BASELINES, *strategies.names()]


def parse(text: str) -> Contender:
    """Read one row.

    >>> parse("ddp+powersgd:rank=4").options
    {'rank': 4}

    Raises:
        UsageError: an unknown name or option, or a value that cannot work; names the nearest.
    """
    name, _, rest = text.partition(":")
    name = name.lower()
    if name in strategies.names():
        strategy = strategies.parse(text)
        kind = _SCHEDULES.get(strategy.choices().schedule, "other")
        return Contender(text, name, kind, not _wire(strategy), {}, strategy)
    if name not in BASELINES:
        raise unknown("strategy", name, names())
    known = BASELINES[name]
    kinds = {key: type(value) for key, value in known.defaults.items()}
    given = strategies.options(rest, kinds, where=text)
    for key, value in given.items():
        if not 0 < value <= 4096:
            raise UsageError(f"option {key}={value} in {text!r}: allowed are values from 0 to 4096")
    return Contender(text, name, known.kind, known.exact, {**known.defaults, **given})


def _wire(strategy: strategies.Strategy | None) -> str | wires.Coded:
    """Return what gradients travel as; empty for their own dtype."""
    return strategy.choices().wire if strategy is not None else ""
