"""The presets: frozen, keyword-only dataclasses whose ``compose()`` returns a `Strategy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from wingbeat import compression, parts, topologies
from wingbeat.compression import Compression, TopK
from wingbeat.errors import UsageError
from wingbeat.parts import plan as plans
from wingbeat.parts.plan import PlanPart
from wingbeat.strategies.bucketed import Bucketed
from wingbeat.strategies.canary import Canary
from wingbeat.strategies.local import ADPSGD, DiLoCo, LocalSGD, Ripples
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.served import Geryon, ParameterServer
from wingbeat.strategies.strategy import Strategy

TOPOLOGIES = tuple(topologies.BY_NAME)


def check_topology(preset: AllReduce | DeAR | OMGS) -> None:
    """Raise a `UsageError` unless ``topology`` is a topology's name, optionally with its size."""
    if str(preset.topology).startswith("bcube@"):
        topologies.get(str(preset.topology))
    else:
        preset.check_name("topology", TOPOLOGIES)


_UNMEASURED = ("size", "none", "one")
_TOPK_OPTIONS = {f.name: f.default for f in fields(TopK) if f.name not in ("auto_disable", "bits")}


@dataclass(frozen=True, kw_only=True, repr=False)
class AllReduce(Bucketed):
    """Wait-free backpropagation: buckets are all-reduced during backward, as in DDP.

    Gradients are complete when ``backward()`` returns. Exact: the weights equal DDP's.

    Args:
        plan: the rule for buckets. ``"fixed"``: up to a size, as in DDP. ``"bo"``, ``"random"``,
            ``"grid"``: the size is tuned during training, as in `DeAR`. ``"layers"``: ``layers``
            adjacent layers each. ``"none"``: one tensor each. ``"merged"``: layers are merged by
            measured costs, as in `MGWFBP`. Or a plan of `wingbeat.parts`.
        mb: bucket size, or initial size of tuning, in MB (1 MB = 2**20 bytes); a larger parameter
            is sent alone.
        first_mb: size in MB of the bucket that is ready first; a small one starts communication
            early.
        min_mb: smallest size that tuning tries, in MB.
        max_mb: largest size that tuning tries, in MB.
        layers: adjacent layers in a bucket, with ``plan="layers"``.
        trials: number of sizes that tuning tries.
        steps: iterations of a trial, or of the measurement of backward.
        drift: tune or measure again when iterations become slower or faster by this factor.
        tune_topology: tune the topology, one of ``"ring"``, ``"mesh"`` and ``"doubling"``, together
            with the size, starting with ``topology``.
        plan_file: file in which rank 0 stores the result; a run that finds the file does not tune
            or measure.
        compression: encoding of gradients: ``"fp32"`` (their own dtype); ``"bf16"`` or ``"fp16"``,
            which halve the bytes; ``"sketch"``, ``"topk"`` or ``"lowrank"``, or their settings,
            such as ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        topology: ``"ring"`` (fewest peers), ``"mesh"`` (direct exchange, one hop), ``"doubling"``
            (fewest messages: for many workers and little data) or ``"bcube"`` (hosts with one
            network interface for each level of a BCube; ``"bcube@3x2"`` sets its size).

    Raises:
        UsageError: a value is out of range.
    """

    edges: ClassVar[tuple[str, ...]] = ("first_mb",)

    first_mb: float = 1.0
    compression: Compression = "fp32"
    topology: str = "ring"

    def __post_init__(self) -> None:
        self.check_size("first_mb")
        self.check_buckets()
        check_topology(self)
        self.compose()

    def edge_sizes(self) -> Mapping[str, float]:
        """Return ``first_mb``; the last bucket has no size of its own."""
        return {"first_mb": self.first_mb, "last_mb": 0.0}

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
        return Strategy(
            plan=self.plan_part(),
            compression=self.compression,
            exchange=self.topology,
            schedule=parts.WaitFree(),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class BML(AllReduce):
    """BML: all-reduces over all interfaces of a BCube at once (Wang et al., NeurIPS 2018).

    `AllReduce` with ``topology="bcube"``. Exact: the weights equal DDP's.

    Args:
        plan, mb, first_mb, min_mb, max_mb, layers, trials, steps, drift, tune_topology, plan_file:
            as for `AllReduce`.
        compression: ``"fp32"`` (the gradients' own dtype), ``"bf16"``, or top-k.
        topology: ``"bcube"``, sized by the workers and their network interfaces, or with its size:
            ``"bcube@3x2"`` has switches of 3 ports, 2 levels and 9 workers.

    Raises:
        UsageError: a value is out of range, or the topology is not a BCube.
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
    """All-reduce in two halves: reduce-scatter during backward, all-gather during the next forward.

    DeAR (Zhang et al., 2023), section III: BackPipe starts a bucket's reduce-scatter as soon as its
    gradients are ready; FeedPipe gathers buckets in forward order and updates each bucket's
    parameters just before the layer that uses them. Exact: the weights equal DDP's.

    Args:
        plan: the rule for buckets. ``"bo"``: the size is tuned during training by Bayesian
            optimisation (DeAR-BO, section IV-B); ``"random"`` and ``"grid"``: by these searches.
            ``"fixed"``: up to a size (DeAR-FB). ``"layers"``: ``layers`` adjacent layers each
            (DeAR-NL). ``"none"``: one tensor each. ``"merged"``: layers are merged by measured
            costs. Or a plan of `wingbeat.parts`.
        mb: bucket size in MB (1 MB = 2**20 bytes); the initial size of tuning, as in the paper.
        edge_mb: size in MB of the buckets that are ready first and last; sizes double towards the
            middle up to ``mb``. 0: ``mb``, as in the paper. With few workers and large fixed
            buckets, 1 is a few per cent faster; with many workers or a tuned size it is not.
        min_mb: smallest size that tuning tries, in MB.
        max_mb: largest size that tuning tries, in MB.
        layers: adjacent layers in a bucket, with ``plan="layers"``.
        trials: number of sizes that tuning tries.
        steps: iterations of a trial, or of the measurement of backward.
        drift: tune or measure again when iterations become slower or faster by this factor.
        tune_topology: tune the topology, one of ``"ring"``, ``"mesh"`` and ``"doubling"``, together
            with the size, starting with ``topology``.
        plan_file: file in which rank 0 stores the result; a run that finds the file does not tune
            or measure.
        compression: encoding of gradients: ``"fp32"`` (their own dtype); ``"bf16"`` or ``"fp16"``,
            which halve the bytes; ``"sketch"``, ``"topk"`` or ``"lowrank"``, or their settings,
            such as ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        shard_optimizer: each worker updates only the parameters whose gradients it reduced, and the
            all-gather sends parameters. The optimizer's state and arithmetic are divided among the
            workers.
        topology: ``"ring"`` (fewest peers), ``"mesh"`` (direct exchange, one hop), ``"doubling"``
            (fewest messages: for many workers and little data) or ``"bcube"`` (hosts with one
            network interface for each level of a BCube; ``"bcube@3x2"`` sets its size).

    Raises:
        UsageError: a value is out of range.
    """

    edges: ClassVar[tuple[str, ...]] = ("edge_mb",)

    plan: str | PlanPart = "bo"
    edge_mb: float = 0.0
    compression: Compression = "fp32"
    shard_optimizer: bool = False
    topology: str = "ring"

    def __post_init__(self) -> None:
        self.check_size("edge_mb", zero=True)
        self.check_buckets()
        self.check_flag("shard_optimizer")
        check_topology(self)
        self.compose()

    def edge_sizes(self) -> Mapping[str, float]:
        """Return ``edge_mb`` for both edges."""
        return {"first_mb": self.edge_mb, "last_mb": self.edge_mb}

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
        return Strategy(
            plan=self.plan_part(),
            compression=self.compression,
            exchange=self.topology,
            schedule=parts.Decoupled(),
            update=parts.Sharded() if self.shard_optimizer else "",
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class OMGS(Preset):
    """Top-k gradients of layers that are merged by measured costs.

    OMGS-SGD (Shi et al., INFOCOM 2020): each merged layer is sparsified when its last gradient is
    ready, and its largest values are gathered during backward. Few merged layers have low startup
    costs; many overlap more of the exchange with backward. The first iterations measure backward,
    the codec and the network. Layers are then merged to minimise the iteration time, and a trial of
    whole iterations selects the plan. Not exact: gradients that are not sent are kept in a residual
    per parameter and sent later.

    Args:
        merge: which layers are merged. ``"tried"``: the fastest of ``"exact"``, ``"paper"`` and
            ``"one"`` in a trial of whole iterations. ``"exact"``: the plan with the shortest
            predicted iteration. ``"paper"``: Algorithm 1, corrected by the equations that it
            implements. ``"printed"``: Algorithm 1 line by line. ``"wfbp"``: MG-WFBP, which ignores
            the codec. ``"size"``: up to ``elements`` elements. ``"none"``: no layers. ``"one"``:
            all layers.
        compression: encoding of gradients; every codec can be used.
        density: fraction of the gradients that is sent, with ``compression="topk"``; the paper's is
            0.001.
        warmup: steps in which the density falls from 0.25 to ``density``; the paper has none.
        momentum: momentum correction; replaces the optimizer's momentum.
        groups: densities of parameters by name pattern, such as ``{"embedding.*": 0.01}``.
        elements: least number of elements of a merged layer, with ``merge="size"``.
        steps: iterations in which backward is measured.
        drift: measure and merge again when iterations become slower or faster than after planning
            by this factor.
        plan_file: file in which rank 0 stores the measurements; a run that finds the file measures
            nothing.
        topology: ``"ring"``, ``"mesh"``, ``"doubling"`` or ``"bcube"``; payloads that are small in
            total are always gathered by doubling.

    Raises:
        UsageError: a value is out of range, or an option of top-k is set for another compression.
    """

    merge: str = "tried"
    compression: Compression = "topk"
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
        object.__setattr__(self, "groups", compression.density_groups(self.groups))
        self.compose()

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
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

    def _coded(self) -> Compression:
        """Return the compression with the options of top-k."""
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
        coded = compression.parse(self.compression)
        if isinstance(coded, str) or not isinstance(self.compression, str):
            return self.compression
        # Merging by a codec's costs presumes the codec, so it must not disable itself.
        return coded.without_trial()


@dataclass(frozen=True, kw_only=True, repr=False)
class MGWFBP(OMGS):
    """MG-WFBP: dense gradients, merged by network costs (Shi et al., INFOCOM 2019).

    Exact: the weights equal DDP's.
    """

    merge: str = "wfbp"
    compression: Compression = "fp32"


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
"""All presets by their names on the command line."""
