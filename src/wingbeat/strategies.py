"""The presets: each strategy is a frozen, keyword-only dataclass that names its choices.

On the command line a strategy is ``name`` or ``name:key=value,key=value``; the name is the
class's in lower case and the keys are its fields, so that there is one list of both:

>>> parse("dear:mb=10")
DeAR(mb=10.0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from wingbeat import wires
from wingbeat.errors import UsageError, unknown
from wingbeat.settings import Settings, is_number
from wingbeat.types import Choices, Fusion, Tuning
from wingbeat.wires import Wire

TOPOLOGIES = ("ring", "mesh", "doubling")
PLANS = ("bo", "fixed", "layers", "none", "random", "grid")
SEARCHES = ("bo", "random", "grid")
MAX_MB = 4096


@dataclass(frozen=True, kw_only=True, repr=False)
class AllReduce(Settings):
    """Wait-free backpropagation: buckets are all-reduced while backward goes on, as DDP does.

    Gradients are whole when ``backward()`` returns. Exact: the weights equal DDP's.

    Args:
        mb: bucket size in MB (1 MB = 2**20 bytes); a parameter that is larger travels alone.
        first_mb: size of the bucket that is ready first, small so that the links start early.
        wire: what gradients travel as: ``"fp32"`` (their own dtype); ``"bf16"`` or ``"fp16"``,
            which halve the bytes; ``"sketch"``, ``"topk"`` or ``"lowrank"``, or their settings,
            such as ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        topology: ``"ring"`` (fewest peers), ``"mesh"`` (direct exchange, one hop) or ``"doubling"``
            (fewest messages: for many workers and little data).

    Raises:
        UsageError: a value out of range.
    """

    mb: float = 25.0
    first_mb: float = 1.0
    wire: Wire = "fp32"
    topology: str = "ring"

    def __post_init__(self) -> None:
        _check_size(self, "mb")
        _check_size(self, "first_mb")
        wires.of(self.wire)
        self.check_name("topology", TOPOLOGIES)

    def choices(self) -> Choices:
        """Return the answers to the five questions of the design, for the engine."""
        return Choices(
            schedule="wfbp",
            topology=self.topology,
            fusion=Fusion(bucket_bytes=_bytes(self.mb), first_bytes=_bytes(self.first_mb)),
            wire=wires.of(self.wire),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class DeAR(Settings):
    """All-reduce split in two: reduce-scatter under backward, all-gather under the next forward.

    DeAR (Zhang et al., 2023), section III: BackPipe starts a bucket's reduce-scatter as soon as
    its gradients are ready; FeedPipe gathers buckets in forward order and updates each one's
    parameters just before the layer that needs them. Exact: the weights equal DDP's.

    Args:
        plan: how buckets are chosen. ``"bo"`` tunes their size while training goes on, by
            Bayesian optimisation (DeAR-BO, section IV-B), ``"random"`` and ``"grid"`` by those
            searches; ``"fixed"`` is a fixed buffer (DeAR-FB); ``"layers"`` puts ``layers`` nearby
            layers together (DeAR-NL); ``"none"`` sends every tensor alone.
        mb: bucket size in MB (1 MB = 2**20 bytes); where tuning starts, as in the paper.
        edge_mb: size of the buckets that are ready first and last; towards the middle sizes
            double until ``mb``. Nothing hides the last one's exchange. 0: ``mb``, as in the paper.
        min_mb: smallest size that tuning tries.
        max_mb: largest size that tuning tries.
        layers: nearby layers in a bucket, with ``plan="layers"``.
        trials: sizes that tuning tries before it decides.
        steps: iterations in a trial.
        plan_file: where rank 0 keeps what tuning found; a run that finds it there does not tune.
        wire: what gradients travel as: ``"fp32"`` (their own dtype); ``"bf16"`` or ``"fp16"``,
            which halve the bytes; ``"sketch"``, ``"topk"`` or ``"lowrank"``, or their settings,
            such as ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        shard_optimizer: each worker updates only the part of the parameters whose gradients it
            reduced, and the all-gather carries parameters: the optimizer's state and arithmetic
            are divided among the workers.
        topology: ``"ring"`` (fewest peers), ``"mesh"`` (direct exchange, one hop) or ``"doubling"``
            (fewest messages: for many workers and little data).

    Raises:
        UsageError: a value out of range.
    """

    plan: str = "bo"
    mb: float = 25.0
    edge_mb: float = 1.0
    min_mb: float = 1.0
    max_mb: float = 100.0
    layers: int = 4
    trials: int = 10
    steps: int = 10
    plan_file: str = ""
    wire: Wire = "fp32"
    shard_optimizer: bool = False
    topology: str = "ring"

    def __post_init__(self) -> None:
        self.check_name("plan", PLANS)
        for key in ("mb", "min_mb", "max_mb"):
            _check_size(self, key)
        _check_size(self, "edge_mb", zero=True)
        for key in ("layers", "trials", "steps"):
            self.check_count(key, 1, 10_000)
        if self.plan in SEARCHES and not self.min_mb < self.max_mb:
            raise UsageError(
                f"DeAR(min_mb={self.min_mb!r}, max_mb={self.max_mb!r}): min_mb must be the smaller"
            )
        if self.plan_file and self.plan not in SEARCHES:
            raise UsageError(
                f"DeAR(plan={self.plan!r}, plan_file={self.plan_file!r}): only a tuned plan has a "
                f"file; allowed plans: {', '.join(SEARCHES)}"
            )
        if not isinstance(self.plan_file, str) or "\0" in self.plan_file:
            raise UsageError(f"DeAR(plan_file={self.plan_file!r}): allowed is the name of a file")
        self.check_flag("shard_optimizer")
        wires.of(self.wire)
        self.check_name("topology", TOPOLOGIES)

    def choices(self) -> Choices:
        """Return the answers to the five questions of the design, for the engine."""
        tuned = self.plan in SEARCHES
        return Choices(
            schedule="dear",
            topology=self.topology,
            fusion=Fusion(
                kind="buffer" if tuned or self.plan == "fixed" else self.plan,
                bucket_bytes=_bytes(self.mb),
                first_bytes=_bytes(self.edge_mb),
                last_bytes=_bytes(self.edge_mb),
                layers=self.layers,
            ),
            tuning=self._tuning() if tuned else None,
            wire=wires.of(self.wire),
            shard_optimizer=self.shard_optimizer,
        )

    def _tuning(self) -> Tuning:
        return Tuning(
            search=self.plan,
            low_bytes=_bytes(self.min_mb),
            high_bytes=_bytes(self.max_mb),
            trials=self.trials,
            steps=self.steps,
            file=self.plan_file,
        )


Strategy = AllReduce | DeAR
_CLASSES: dict[str, type[Strategy]] = {c.__name__.lower(): c for c in (AllReduce, DeAR)}


def names() -> list[str]:
    """Return the strategies' names as the command line spells them."""
    return list(_CLASSES)


def parse(text: str) -> Strategy:
    """Turn ``name`` or ``name:key=value,key=value`` into the dataclass that Python users write.

    Raises:
        UsageError: an unknown name or key, or a value of the wrong kind; names the nearest match.
    """
    name, _, rest = text.partition(":")
    if name.lower() not in _CLASSES:
        raise unknown("strategy", name, _CLASSES)
    cls = _CLASSES[name.lower()]
    return cls(**options(rest, {f.name: type(f.default) for f in fields(cls)}, where=text))


def options(text: str, kinds: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Parse ``key=value,key=value`` with each value converted to its field's type.

    Raises:
        UsageError: an unknown key, a missing value, or one that does not convert.
    """
    out: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, eq, value = item.partition("=")
        if key not in kinds:
            raise unknown("option", key, kinds, where=repr(where))
        if not eq or not value:
            raise UsageError(f"option {key!r} in {where!r} has no value; write {key}=VALUE")
        out[key] = _convert(kinds[key], key, value, where)
    return out


def _convert(kind: Callable[[str], Any], key: str, value: str, where: str) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise UsageError(f"option {key}={value!r} in {where!r}: allowed are true and false")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        kind_name = getattr(kind, "__name__", "value")
        raise UsageError(f"option {key}={value!r} in {where!r} is no valid {kind_name}") from None


def _bytes(mb: float) -> int:
    return max(1, int(mb * 2**20)) if mb else 0


def _check_size(strategy: Strategy, key: str, *, zero: bool = False) -> None:
    value = getattr(strategy, key)
    ok = is_number(value) and (0 < value <= MAX_MB or (zero and value == 0))
    if not ok:
        least = "sizes from 0" if zero else "sizes above 0"
        raise UsageError(
            f"{type(strategy).__name__}({key}={value!r}): allowed are {least} up to {MAX_MB} MB"
        )
