"""The presets: each strategy is a frozen, keyword-only dataclass that names its choices.

On the command line a strategy is ``name`` or ``name:key=value,key=value``; the name is the
class's in lower case and the keys are its fields, so that there is one list of both:

>>> parse("dear:mb=10")
DeAR(mb=10.0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from wingbeat import wires
from wingbeat.errors import UsageError, unknown
from wingbeat.settings import Settings, is_number
from wingbeat.types import Choices, Fusion, Merging, Tuning
from wingbeat.wires import Coded, TopK, Wire

TOPOLOGIES = ("ring", "mesh", "doubling")
PLANS = ("bo", "fixed", "layers", "none", "random", "grid")
SEARCHES = ("bo", "random", "grid")
MERGES = ("exact", "paper", "wfbp")
_UNMEASURED = {"size": "elements", "none": "none", "one": "one"}
_TOPK_OPTIONS = {f.name: f.default for f in fields(TopK) if f.name != "auto_disable"}
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
        _check_file(self, self.plan in SEARCHES, f"plan={self.plan!r}", SEARCHES)
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


@dataclass(frozen=True, kw_only=True, repr=False)
class OMGS(Settings):
    """Top-k gradients of layers that are merged by what they are measured to cost.

    OMGS-SGD (Shi et al., INFOCOM 2020): each merged layer is sparsified as its last gradient
    arrives, and its largest values are gathered while backward goes on. Few merged layers pay few
    startup times; many hide more of the exchange. The first iterations measure backward, the codec
    and the links; then layers are merged so that the iteration is shortest. Not exact: what does
    not travel waits in a residual, by parameter, and comes later.

    Args:
        merge: which layers are merged: ``"exact"``, the shortest iteration of all plans;
            ``"paper"``, Algorithm 1; ``"wfbp"``, MG-WFBP, which knows no codec; ``"size"``, until
            there are ``elements`` elements; ``"none"``; or ``"one"``, all into one.
        wire: what gradients travel as; any codec can be merged.
        density: share of the gradients that travel, with ``wire="topk"``; the paper's is 0.001.
        warmup: steps in which the density falls from 0.25 to ``density``; the paper has none.
        momentum: momentum correction, in place of the optimizer's momentum.
        groups: densities of parameters by name pattern, such as ``{"embedding.*": 0.01}``.
        elements: elements of a merged layer at least, with ``merge="size"``.
        steps: iterations in which backward is measured.
        drift: measure and merge anew when iterations take this many times as long, or as short,
            as right after planning.
        plan_file: where rank 0 keeps what was measured; a run that finds it there measures nothing.
        topology: ``"ring"``, ``"mesh"`` or ``"doubling"``; payloads that are small together are
            gathered by doubling in any case.

    Raises:
        UsageError: a value out of range, or options of top-k with another wire.
    """

    merge: str = "exact"
    wire: Wire = "topk"
    density: float = TopK.density
    warmup: int = TopK.warmup
    momentum: float = TopK.momentum
    groups: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    elements: int = 8192
    steps: int = 10
    drift: float = 1.5
    plan_file: str = ""
    topology: str = "ring"

    def __post_init__(self) -> None:
        self.check_name("merge", (*MERGES, *_UNMEASURED))
        name, usual = type(self).__name__, type(self).merge
        if type(self) is not OMGS and self.merge != usual:
            raise UsageError(f"{name}(merge={self.merge!r}): {name} has {usual!r}; OMGS has others")
        self.check_count("elements", 1, 2**40)
        self.check_count("steps", 1, 10_000)
        self.check_number("drift", "numbers above 1", lambda v: v > 1)
        self.check_name("topology", TOPOLOGIES)
        _check_file(self, self.merge in MERGES, f"merge={self.merge!r}", MERGES)
        object.__setattr__(self, "groups", wires.pairs(self.groups))
        self._coded()

    def choices(self) -> Choices:
        """Return the answers to the five questions of the design, for the engine."""
        return Choices(
            schedule="wfbp",
            topology=self.topology,
            # Until all is measured, layers are one: so nothing disturbs the measuring.
            fusion=Fusion(kind=_UNMEASURED.get(self.merge, "one"), elements=self.elements),
            merging=self._merging() if self.merge in MERGES else None,
            wire=self._coded(),
        )

    def _merging(self) -> Merging:
        return Merging(rule=self.merge, steps=self.steps, drift=self.drift, file=self.plan_file)

    def _coded(self) -> str | Coded:
        """Return the wire with the options of top-k in it."""
        given = {key: getattr(self, key) for key in _TOPK_OPTIONS}
        if self.wire == "topk":
            return TopK(**given, auto_disable=False)
        for key, value in given.items():
            if value != _TOPK_OPTIONS[key]:
                raise UsageError(
                    f"{type(self).__name__}(wire={self.wire!r}, {key}={value!r}): {key} is an "
                    'option of wire="topk"; leave it out, or write it into the wire'
                )
        coded = wires.of(self.wire)
        # Whoever merges encoded layers by a codec's name has chosen to encode them.
        named = isinstance(self.wire, str) and not isinstance(coded, str)
        return replace(coded, auto_disable=False) if named else coded  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True, repr=False)
class PSGD(OMGS):
    """P-SGD: dense gradients, each tensor all-reduced alone (OMGS-SGD, section II-B). Exact."""

    merge: str = "none"
    wire: Wire = "fp32"


@dataclass(frozen=True, kw_only=True, repr=False)
class MGWFBP(OMGS):
    """MG-WFBP: dense gradients, merged by what links cost (Shi et al., INFOCOM 2019). Exact."""

    merge: str = "wfbp"
    wire: Wire = "fp32"


@dataclass(frozen=True, kw_only=True, repr=False)
class TopKSGD(OMGS):
    """TopK-SGD: the largest of all gradients, after backward (OMGS-SGD, section II-C)."""

    merge: str = "one"


@dataclass(frozen=True, kw_only=True, repr=False)
class LAGS(OMGS):
    """LAGS-SGD: the largest gradients of each tensor by itself (OMGS-SGD, section II-D)."""

    merge: str = "none"


@dataclass(frozen=True, kw_only=True, repr=False)
class MGS(OMGS):
    """MGS-SGD: layers merged up to a size, 8192 elements (OMGS-SGD, section V-D)."""

    merge: str = "size"


Strategy = AllReduce | DeAR | OMGS
_CLASSES: dict[str, type[Strategy]] = {
    c.__name__.lower(): c for c in (AllReduce, DeAR, OMGS, PSGD, MGWFBP, TopKSGD, LAGS, MGS)
}


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
    if kind is tuple:
        return _groups(key, value, where)
    try:
        return kind(value)
    except ValueError:
        kind_name = getattr(kind, "__name__", "value")
        raise UsageError(f"option {key}={value!r} in {where!r} is no valid {kind_name}") from None


def _groups(key: str, text: str, where: str) -> tuple[tuple[str, float], ...]:
    """Read ``PATTERN@DENSITY+PATTERN@DENSITY``; commas would end the option."""
    found = []
    for item in text.split("+"):
        pattern, _, density = item.rpartition("@")
        try:
            found.append((pattern, float(density)))
        except ValueError:
            pattern = ""
        if not pattern:
            raise UsageError(
                f"option {key}={text!r} in {where!r}: {item!r} is no group; write "
                "PATTERN@DENSITY, several with + between, such as embedding.*@0.01+*.bias@1"
            )
    return tuple(found)


def _check_file(strategy: Any, has_one: bool, plan: str, with_one: Sequence[str]) -> None:
    """Raise a `UsageError` unless ``plan_file`` is a file's name, and its plan one for a file."""
    name, file = type(strategy).__name__, strategy.plan_file
    if not isinstance(file, str) or "\0" in file:
        raise UsageError(f"{name}(plan_file={file!r}): allowed is the name of a file")
    if file and not has_one:
        raise UsageError(
            f"{name}({plan}, plan_file={file!r}): only a measured plan has a file; allowed are "
            f"{', '.join(with_one)}"
        )


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
