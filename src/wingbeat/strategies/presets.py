"""The presets: the papers' systems, each a frozen, keyword-only dataclass of its own options.

What a preset stands for, ``compose()`` returns as a `Strategy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from wingbeat import parts, topologies, wires
from wingbeat.errors import UsageError
from wingbeat.parts import plan as plans
from wingbeat.parts.plan import PlanPart
from wingbeat.strategies.bucketed import Bucketed
from wingbeat.strategies.canary import Canary
from wingbeat.strategies.local import ADPSGD, DiLoCo, LocalSGD, Ripples
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.served import Geryon, ParameterServer
from wingbeat.strategies.strategy import Strategy
from wingbeat.wires import TopK, Wire

TOPOLOGIES = tuple(topologies.BY_NAME)


def check_topology(preset: AllReduce | DeAR | OMGS) -> None:
    """Raise a `UsageError` unless the option is a topology's name, maybe with its size."""
    if str(preset.topology).startswith("bcube@"):
        topologies.get(str(preset.topology))
    else:
        preset.check_name("topology", TOPOLOGIES)


_UNMEASURED = ("size", "none", "one")
_TOPK_OPTIONS = {f.name: f.default for f in fields(TopK) if f.name not in ("auto_disable", "bits")}


@dataclass(frozen=True, kw_only=True, repr=False)
class AllReduce(Bucketed):
    """Wait-free backpropagation: buckets are all-reduced while backward goes on, as DDP does.

    Gradients are whole when ``backward()`` returns. Exact: the weights equal DDP's.

    Args:
        plan: how buckets are chosen: ``"fixed"``, up to a size, as DDP's are; ``"bo"``,
            ``"random"``, ``"grid"``: their size is tuned while training goes on, as in `DeAR`;
            ``"layers"`` puts ``layers`` nearby layers together; ``"none"`` sends every tensor
            alone; ``"merged"`` merges layers by what is measured, as `MGWFBP` does. Or a plan of
            `wingbeat.parts`.
        mb: bucket size in MB (1 MB = 2**20 bytes), or where tuning starts; a parameter that is
            larger travels alone.
        first_mb: size of the bucket that is ready first, small so that the links start early.
        min_mb: smallest size that tuning tries.
        max_mb: largest size that tuning tries.
        layers: nearby layers in a bucket, with ``plan="layers"``.
        trials: sizes that tuning tries before it decides.
        steps: iterations in a trial, or in which backward is measured.
        drift: tune or measure anew when iterations take this many times as long, or as short, as
            right after.
        tune_topology: whether tuning looks for the best of ``"ring"``, ``"mesh"`` and
            ``"doubling"`` together with the size, beginning with ``topology``.
        plan_file: where rank 0 keeps what was found; a run that finds it there does not look.
        compression: what gradients travel as: ``"fp32"`` (their own dtype); ``"bf16"`` or
            ``"fp16"``, which halve the bytes; ``"sketch"``, ``"topk"`` or ``"lowrank"``, or their
            settings, such as ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        topology: ``"ring"`` (fewest peers), ``"mesh"`` (direct exchange, one hop), ``"doubling"``
            (fewest messages: for many workers and little data) or ``"bcube"`` (hosts with one
            network interface for each level of a BCube; ``"bcube@3x2"``: of this size).

    Raises:
        UsageError: a value out of range.
    """

    edges: ClassVar[tuple[str, ...]] = ("first_mb",)

    first_mb: float = 1.0
    compression: Wire = "fp32"
    topology: str = "ring"

    def __post_init__(self) -> None:
        self.check_size("first_mb")
        self.check_buckets()
        check_topology(self)
        self.compose()

    def edge_sizes(self) -> Mapping[str, float]:
        """Return the size of the bucket that is ready first; the last one is as any."""
        return {"first_mb": self.first_mb, "last_mb": 0.0}

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        return Strategy(
            plan=self.plan_part(),
            compression=self.compression,
            exchange=self.topology,
            schedule=parts.WaitFree(),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class BML(AllReduce):
    """BML: all-reduces over all interfaces of a BCube at once (Wang et al., NeurIPS 2018).

    The buckets and the order of `AllReduce`, along ``topology="bcube"``. Exact: the weights equal
    DDP's.

    Args:
        plan: as for `AllReduce`, and so are its options.
        mb: as for `AllReduce`.
        first_mb: as for `AllReduce`.
        min_mb: as for `AllReduce`.
        max_mb: as for `AllReduce`.
        layers: as for `AllReduce`.
        trials: as for `AllReduce`.
        steps: as for `AllReduce`.
        drift: as for `AllReduce`.
        tune_topology: as for `AllReduce`.
        plan_file: as for `AllReduce`.
        compression: ``"fp32"`` (the gradients' own dtype), ``"bf16"``, or top-k.
        topology: ``"bcube"``, found from the workers and their network interfaces, or with its
            size, as in ``"bcube@3x2"``: switches of 3 ports, 2 levels, 9 workers.

    Raises:
        UsageError: a value out of range, or another topology.
    """

    topology: str = "bcube"

    def __post_init__(self) -> None:
        AllReduce.__post_init__(self)
        if self.topology.partition("@")[0] != "bcube":
            raise UsageError(
                f"BML(topology={self.topology!r}): BML has bcube, or bcube@3x2 with its size; "
                "AllReduce has others"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class DeAR(Bucketed):
    """All-reduce split in two: reduce-scatter under backward, all-gather under the next forward.

    DeAR (Zhang et al., 2023), section III: BackPipe starts a bucket's reduce-scatter as soon as
    its gradients are ready; FeedPipe gathers buckets in forward order and updates each one's
    parameters just before the layer that needs them. Exact: the weights equal DDP's.

    Args:
        plan: how buckets are chosen. ``"bo"`` tunes their size while training goes on, by
            Bayesian optimisation (DeAR-BO, section IV-B), ``"random"`` and ``"grid"`` by those
            searches; ``"fixed"`` is a fixed buffer (DeAR-FB); ``"layers"`` puts ``layers`` nearby
            layers together (DeAR-NL); ``"none"`` sends every tensor alone; ``"merged"`` merges
            layers by what is measured. Or a plan of `wingbeat.parts`.
        mb: bucket size in MB (1 MB = 2**20 bytes); where tuning starts, as in the paper.
        edge_mb: size of the buckets that are ready first and last; towards the middle sizes
            double until ``mb``. 0: ``mb``, as in the paper. With a few workers and large fixed
            buckets 1 is some per cent faster; with many, or a tuned size, it is not.
        min_mb: smallest size that tuning tries.
        max_mb: largest size that tuning tries.
        layers: nearby layers in a bucket, with ``plan="layers"``.
        trials: sizes that tuning tries before it decides.
        steps: iterations in a trial, or in which backward is measured.
        drift: tune or measure anew when iterations take this many times as long, or as short, as
            right after.
        tune_topology: whether tuning looks for the best of ``"ring"``, ``"mesh"`` and
            ``"doubling"`` together with the size, beginning with ``topology``.
        plan_file: where rank 0 keeps what was found; a run that finds it there does not look.
        compression: what gradients travel as: ``"fp32"`` (their own dtype); ``"bf16"`` or
            ``"fp16"``, which halve the bytes; ``"sketch"``, ``"topk"`` or ``"lowrank"``, or their
            settings, such as ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        shard_optimizer: each worker updates only the part of the parameters whose gradients it
            reduced, and the all-gather carries parameters: the optimizer's state and arithmetic
            are divided among the workers.
        topology: ``"ring"`` (fewest peers), ``"mesh"`` (direct exchange, one hop), ``"doubling"``
            (fewest messages: for many workers and little data) or ``"bcube"`` (hosts with one
            network interface for each level of a BCube; ``"bcube@3x2"``: of this size).

    Raises:
        UsageError: a value out of range.
    """

    edges: ClassVar[tuple[str, ...]] = ("edge_mb",)

    plan: str | PlanPart = "bo"
    edge_mb: float = 0.0
    compression: Wire = "fp32"
    shard_optimizer: bool = False
    topology: str = "ring"

    def __post_init__(self) -> None:
        self.check_size("edge_mb", zero=True)
        self.check_buckets()
        self.check_flag("shard_optimizer")
        check_topology(self)
        self.compose()

    def edge_sizes(self) -> Mapping[str, float]:
        """Return the size of the buckets that are ready first and last."""
        return {"first_mb": self.edge_mb, "last_mb": self.edge_mb}

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        return Strategy(
            plan=self.plan_part(),
            compression=self.compression,
            exchange=self.topology,
            schedule=parts.Decoupled(),
            update=parts.Sharded() if self.shard_optimizer else "",
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class OMGS(Preset):
    """Top-k gradients of layers that are merged by what they are measured to cost.

    OMGS-SGD (Shi et al., INFOCOM 2020): each merged layer is sparsified as its last gradient
    arrives, and its largest values are gathered while backward goes on. Few merged layers have few
    startup times; many hide more of the exchange. The first iterations measure backward, the codec
    and the links; then layers are merged so that the iteration is shortest, and whole iterations
    with each plan decide which stays. Not exact: what does not travel waits in a residual, by
    parameter, and comes later.

    Args:
        merge: which layers are merged: ``"tried"``, the fastest of what ``"exact"``, ``"paper"``
            and ``"one"`` make, by a trial of whole iterations. Without a trial: ``"exact"``, the
            plan with the shortest iteration of all, as predicted; ``"paper"``, Algorithm 1 with its
            lines put right by the equations that it stands for; ``"printed"``, Algorithm 1 line by
            line; ``"wfbp"``, MG-WFBP, which knows no codec; ``"size"``, until there are
            ``elements`` elements; ``"none"``; or ``"one"``, all into one.
        compression: what gradients travel as; any codec can be merged.
        density: share of the gradients that travel, with ``compression="topk"``; the paper's is
            0.001.
        warmup: steps in which the density falls from 0.25 to ``density``; the paper has none.
        momentum: momentum correction, in place of the optimizer's momentum.
        groups: densities of parameters by name pattern, such as ``{"embedding.*": 0.01}``.
        elements: elements of a merged layer at least, with ``merge="size"``.
        steps: iterations in which backward is measured.
        drift: measure and merge anew when iterations take this many times as long, or as short,
            as right after planning.
        plan_file: where rank 0 keeps what was measured; a run that finds it there measures nothing.
        topology: ``"ring"``, ``"mesh"``, ``"doubling"`` or ``"bcube"``; payloads that are
            small together are gathered by doubling in any case.

    Raises:
        UsageError: a value out of range, or options of top-k with another compression.
    """

    merge: str = "tried"
    compression: Wire = "topk"
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
        self.check_name("merge", (*plans.RULES, *_UNMEASURED))
        name, usual = type(self).__name__, type(self).merge
        if type(self) is not OMGS and self.merge != usual:
            raise UsageError(f"{name}(merge={self.merge!r}): {name} has {usual!r}; OMGS has others")
        self.check_count("elements", 1, 2**40)
        self.check_count("steps", 1, 10_000)
        plans.check_drift(self)
        check_topology(self)
        self.check_file("plan_file")
        object.__setattr__(self, "groups", wires.pairs(self.groups))
        self.compose()

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        return Strategy(
            plan=self._plan(),
            compression=self._coded(),
            exchange=self.topology,
            schedule=parts.WaitFree(),
        )

    def _plan(self) -> PlanPart:
        if self.merge in plans.RULES:
            return parts.Merged(
                rule=self.merge, steps=self.steps, drift=self.drift, file=self.plan_file
            )
        if self.plan_file:
            raise UsageError(
                f"{type(self).__name__}(merge={self.merge!r}, plan_file={self.plan_file!r}): only "
                f"a measured plan has a file; allowed are {', '.join(plans.RULES)}"
            )
        if self.merge == "size":
            return parts.Elements(count=self.elements)
        return parts.OneBucket() if self.merge == "one" else parts.PerTensor()

    def _coded(self) -> Wire:
        """Return the compression with the options of top-k in it."""
        given = {key: getattr(self, key) for key in _TOPK_OPTIONS}
        if self.compression == "topk":
            return TopK(**given, auto_disable=False)
        for key, value in given.items():
            if value != _TOPK_OPTIONS[key]:
                raise UsageError(
                    f"{type(self).__name__}(compression={self.compression!r}, {key}={value!r}): "
                    f'{key} is an option of compression="topk"; leave it out, or write it into the '
                    "compression"
                )
        coded = wires.of(self.compression)
        if isinstance(coded, str) or not isinstance(self.compression, str):
            return self.compression
        # Whoever merges encoded layers by a codec's name has chosen to encode them.
        return replace(coded, auto_disable=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class MGWFBP(OMGS):
    """MG-WFBP: dense gradients, merged by what links cost (Shi et al., INFOCOM 2019).

    Exact: the weights equal DDP's.
    """

    merge: str = "wfbp"
    compression: Wire = "fp32"


PRESETS: dict[str, type[Preset]] = {
    cls.__name__.lower(): cls
    for cls in (
        AllReduce,
        BML,
        DeAR,
        OMGS,
        MGWFBP,
        ParameterServer,
        Geryon,
        Canary,
        Ripples,
        ADPSGD,
        LocalSGD,
        DiLoCo,
    )
}
"""All of them, by their names on the command line."""
