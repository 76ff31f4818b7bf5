"""The presets: functions that return a `Strategy`, each with the options of its paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wingbeat import compression as codecs
from wingbeat import parts, topologies
from wingbeat.compression import DTYPES, Compression, TopK
from wingbeat.methods.bounded_staleness.options import AUTO, bundles_of, colayers_of
from wingbeat.methods.model_averaging.options import GRACE_S, in_python
from wingbeat.methods.model_averaging.rules import GROUP_SIZE, THRESHOLD
from wingbeat.methods.parameter_server import options as servers_options
from wingbeat.methods.parameter_server.options import STEPS, Threshold, threshold_of
from wingbeat.parts import names
from wingbeat.parts.plan import (
    COLAYERS,
    MIN_COLAYERS,
    RULES,
    SEARCHES,
    PlanPart,
    fragments_of,
)
from wingbeat.parts.strategy import Strategy
from wingbeat.settings import OptionError, count_of, defaults_of, named, number_of
from wingbeat.strategies.preset import Preset, check_first_mb, check_flags, preset, variant
from wingbeat.topologies import Topology
from wingbeat.traits import ExchangePart

if TYPE_CHECKING:
    import torch


def _refusal(reason: str, **options: Any) -> OptionError:
    """Return the error for these options of the preset that is called."""
    return OptionError.of("", options, reason)


def _along(topology: str) -> Topology:
    """Return the topology of this name, optionally with its size."""
    name = str(topology)
    if name not in topologies.BY_NAME and not name.startswith("bcube@"):
        raise OptionError.of("", {"topology": topology}, names=topologies.BY_NAME)
    return topologies.get(name)


def _members(topology: str, min_replicas: int) -> ExchangePart:
    """Return the exchange of all workers, or of those that are alive."""
    along = _along(topology)
    if min_replicas == 0:
        return along
    return parts.Elastic(min_replicas=min_replicas, topology=topology)


# -- chosen by trial -------------------------------------------------------------------------------


@preset(keys={"file": "plan_file"})
def Auto(
    *,
    exact: bool = True,
    asynchronous: bool = False,
    steps: int = 3,
    drift: float = 1.5,
    plan_file: str = "",
) -> Strategy:
    """The fastest of a few strategies, chosen by a trial in the first iterations of training.

    This is what `distribute` takes if no strategy is given. Each candidate trains for a few
    iterations, then the best three in turn, then the best two, and the fastest stays. With the
    default of ``steps`` that takes 56 iterations at most. All workers change before the same
    backward; no gradient or update is lost. The log and ``plan_file`` have the times of all
    candidates.

    The candidates: ``AllReduce()``, which has the schedule and the bucket sizes of DDP;
    ``DeAR(plan="fixed")`` with buckets of 25 and of 5 MB, and with one bucket per layer; and on
    CPUs of three hosts or more, or of one with three workers or more, ``DeAR(plan="fixed")`` along
    a ``"mesh"``.
    With ``exact=True`` all are exact: the weights equal DDP's.

    With ``exact=False`` the last two of these are replaced by ``DeAR(plan="fixed")`` with a sketch:
    of 8 bits in buckets of either size, and of 4 bits. Its residuals are zero at first. When a
    candidate without the sketch follows, the gradients of the next iteration contain them, so that
    nothing is lost.

    Meanwhile and afterwards updates and gradients behave as under `DeAR`: the optimizer must not
    evaluate the loss in its step (LBFGS).

    Args:
        exact: only try exact strategies.
        asynchronous: refused, because a training cannot change to averages of models.
        steps: iterations for which a candidate is timed in each turn; two more do not count.
        drift: try again when iterations become slower or faster than after the choice by this
            factor.
        plan_file: file in which rank 0 stores the choice; a run that finds the file tries nothing.

    Raises:
        UsageError: a value is out of range, or ``asynchronous`` is set.
    """
    check_flags(exact=exact, asynchronous=asynchronous)
    if asynchronous:
        raise _refusal(
            "a training cannot change from sums of gradients to averages of models; leave it out, "
            "or where workers are uneven use Ripples(), Canary() or DiLoCo()",
            asynchronous=True,
        )
    return Strategy(
        plan=parts.Chosen(steps=steps, drift=drift, file=plan_file),
        compression="fp32" if exact else codecs.Sketch(auto_disable=False),
        schedule=parts.Decoupled(),
    )


# -- all-reduces -----------------------------------------------------------------------------------

_MEASURED = (*SEARCHES, "merged")
_LAYERS = {"layers": 'write plan="layers@7"'}


def _bucket_plan(preset: Preset, plan: str | PlanPart, **options: Any) -> PlanPart:
    """Return the plan of a preset that takes any, with ``options`` for plans by their name alone.

    ``edge_mb``, or ``first_mb`` alone, are the sizes of the first and the last bucket.
    """
    mb, file, edge = options["mb"], options["plan_file"], options.get("edge_mb", 0.0)
    measuring = {"steps": options["steps"], "drift": options["drift"], "file": file}
    edges = {"first_mb": options.get("first_mb", edge), "last_mb": edge}
    searching = {key: options[key] for key in ("min_mb", "max_mb", "trials")}
    check_flags(tune_topology=options["tune_topology"])
    if "first_mb" in options:
        check_first_mb(options["first_mb"])
    # All are made, so that an option of another plan is checked too.
    by_name: dict[str, PlanPart] = {
        "fixed": parts.FixedBuckets(mb=mb, **edges),
        "merged": parts.Merged(**measuring),
    }
    search = plan if plan in SEARCHES else "bo"
    by_name[search] = parts.TunedBuckets(
        search=search, mb=mb, **edges, **searching, **measuring, topology=options["tune_topology"]
    )
    if options["tune_topology"] and plan not in SEARCHES:
        raise _refusal(
            "only plans that are tuned by trials can tune it; allowed are " + ", ".join(SEARCHES),
            plan=plan,
            tune_topology=True,
        )
    made = plan if isinstance(plan, PlanPart) else None
    if made is not None or "@" in str(plan):
        usual = defaults_of(preset)
        for key, value in options.items():
            if value != usual[key]:
                raise _refusal(
                    f"{key} is an option for a plan by its name alone; leave it out, or write it "
                    "into the plan",
                    plan=plan,
                    **{key: value},
                )
    elif file and plan not in _MEASURED:
        raise _refusal(
            f"only a measured plan has a file; allowed are {', '.join(_MEASURED)}",
            plan=plan,
            plan_file=file,
        )
    if made is not None:
        return made
    return by_name[str(plan)] if str(plan) in by_name else named("plan", str(plan), names.PLANS)


@preset(keys={"file": "plan_file"}, instead=_LAYERS)
def AllReduce(
    *,
    plan: str | PlanPart = "fixed",
    mb: float = 25.0,
    first_mb: float = 1.0,
    min_mb: float = 1.0,
    max_mb: float = 100.0,
    trials: int = 10,
    steps: int = 10,
    drift: float = 1.5,
    tune_topology: bool = False,
    plan_file: str = "",
    compression: Compression = "fp32",
    topology: str = "ring",
    min_replicas: int = 0,
) -> Strategy:
    """Wait-free backpropagation: buckets are all-reduced during backward, as in DDP.

    Gradients are complete when ``backward()`` returns. Exact: the weights equal DDP's.

    Args:
        plan: the rule for buckets. ``"fixed"``: up to a size, as in DDP. ``"bo"``, ``"random"``,
            ``"grid"``: the size is tuned during training, as in `DeAR`. ``"layers@4"``: so many
            adjacent layers each. ``"none"``: one tensor each. ``"merged"``: layers are merged by
            measured costs, as in `MGWFBP`. Or a plan of `wingbeat.parts`.
        mb: bucket size, or initial size of tuning, in MB (1 MB = 2**20 bytes); a larger parameter
            is sent alone.
        first_mb: size in MB of the bucket that is ready first; a small one starts communication
            early.
        min_mb: smallest size that tuning tries, in MB.
        max_mb: largest size that tuning tries, in MB.
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
            network interface for each level of a BCube; ``"bcube@3x2"`` sets its size). A ring or
            mesh is one of hosts: workers of one host sum in shared memory first.
        min_replicas: continue without workers that fail, and admit them when they return, while
            there are at least so many; 0: all workers end if one fails. The step of a failure is
            dropped on all, and gradients are the mean over the others. With fewer workers training
            waits for the timeout of `wingbeat.init`, and ends then. Needs a fixed plan.

    Raises:
        UsageError: a value is out of range.
    """
    made = _bucket_plan(
        AllReduce,
        plan,
        mb=mb,
        first_mb=first_mb,
        min_mb=min_mb,
        max_mb=max_mb,
        trials=trials,
        steps=steps,
        drift=drift,
        tune_topology=tune_topology,
        plan_file=plan_file,
    )
    exchange = _members(topology, min_replicas)
    return Strategy(
        plan=made, compression=compression, exchange=exchange, schedule=parts.WaitFree()
    )


@variant(AllReduce, {"min_replicas": 0}, topology="bcube")
def BML(**options: Any) -> None:
    """BML: all-reduces over all interfaces of a BCube at once (Wang et al., NeurIPS 2018).

    `AllReduce` with ``topology="bcube"``. Exact: the weights equal DDP's.

    Args:
        plan, mb, first_mb, min_mb, max_mb, trials, steps, drift, tune_topology, plan_file: as for
            `AllReduce`.
        compression: ``"fp32"`` (the gradients' own dtype), ``"bf16"``, or top-k.
        topology: ``"bcube"``, sized by the workers and their network interfaces, or with its size:
            ``"bcube@3x2"`` has switches of 3 ports, 2 levels and 9 workers.

    Raises:
        UsageError: a value is out of range, or the topology is not a BCube.
    """
    topology = options.get("topology", "bcube")
    if str(topology).partition("@")[0] != "bcube":
        raise _refusal(
            "BML has bcube, or bcube@3x2 with its size; AllReduce has others", topology=topology
        )


@preset(keys={"file": "plan_file", "first_mb": "edge_mb"}, instead=_LAYERS)
def DeAR(
    *,
    plan: str | PlanPart = "bo",
    mb: float = 25.0,
    edge_mb: float = 0.0,
    min_mb: float = 1.0,
    max_mb: float = 100.0,
    trials: int = 10,
    steps: int = 10,
    drift: float = 1.5,
    tune_topology: bool = False,
    plan_file: str = "",
    compression: Compression = "fp32",
    shard_optimizer: bool = False,
    topology: str = "ring",
    min_replicas: int = 0,
) -> Strategy:
    """All-reduce in two halves: reduce-scatter during backward, all-gather during the next forward.

    DeAR (Zhang et al., 2023), section III: BackPipe starts a bucket's reduce-scatter as soon as its
    gradients are ready; FeedPipe gathers buckets in forward order and updates each bucket's
    parameters just before the layer that uses them. Exact: the weights equal DDP's.

    Args:
        plan: the rule for buckets. ``"bo"``: the size is tuned during training by Bayesian
            optimisation (DeAR-BO, section IV-B); ``"random"`` and ``"grid"``: by these searches.
            ``"fixed"``: up to a size (DeAR-FB). ``"layers@4"``: so many adjacent layers
            each (DeAR-NL). ``"none"``: one tensor each. ``"merged"``: layers are merged by measured
            costs. Or a plan of `wingbeat.parts`.
        mb: bucket size in MB (1 MB = 2**20 bytes); the initial size of tuning, as in the paper.
        edge_mb: size in MB of the buckets that are ready first and last; sizes double towards the
            middle up to ``mb``. 0: ``mb``, as in the paper. With few workers and large fixed
            buckets, 1 is a few per cent faster; with many workers or a tuned size it is not.
        min_mb: smallest size that tuning tries, in MB.
        max_mb: largest size that tuning tries, in MB.
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
            network interface for each level of a BCube; ``"bcube@3x2"`` sets its size). A ring or
            mesh is one of hosts: workers of one host sum in shared memory first.
        min_replicas: continue without workers that fail, and admit them when they return, while
            there are at least so many; 0: all workers end if one fails. The step of a failure is
            dropped on all, and gradients are the mean over the others. With fewer workers training
            waits for the timeout of `wingbeat.init`, and ends then. Needs a fixed plan.

    Raises:
        UsageError: a value is out of range.
    """
    check_flags(shard_optimizer=shard_optimizer)
    made = _bucket_plan(
        DeAR,
        plan,
        mb=mb,
        edge_mb=edge_mb,
        min_mb=min_mb,
        max_mb=max_mb,
        trials=trials,
        steps=steps,
        drift=drift,
        tune_topology=tune_topology,
        plan_file=plan_file,
    )
    return Strategy(
        plan=made,
        compression=compression,
        exchange=_members(topology, min_replicas),
        schedule=parts.Decoupled(),
        update=parts.Sharded() if shard_optimizer else "",
    )


# -- merged layers ---------------------------------------------------------------------------------

_UNMEASURED = ("size", "none", "one")
_OF_TOPK = {
    "momentum": "write compression=TopK(momentum=0.9), as text topk:momentum=0.9",
    "groups": "write compression=TopK(groups={...}), as text topk:groups=PATTERN@DENSITY",
}


@preset(
    keys={"file": "plan_file", "rule": "merge", "count": "elements"},
    instead=_OF_TOPK,
)
def OMGS(
    *,
    merge: str = "tried",
    compression: Compression = "topk",
    density: float = TopK.density,
    warmup: int = TopK.warmup,
    elements: int = 8192,
    steps: int = 10,
    drift: float = 1.5,
    plan_file: str = "",
    topology: str = "ring",
) -> Strategy:
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
        compression: encoding of gradients; every codec can be used, such as
            ``TopK(density=0.01, groups={"embedding.*": 0.1}, auto_disable=False)``.
        density: fraction of the gradients that is sent, with ``compression="topk"``; the paper's is
            0.001.
        warmup: steps in which the density falls from 0.25 to ``density``; the paper has none.
        elements: least number of elements of a merged layer, with ``merge="size"``.
        steps: iterations in which backward is measured.
        drift: measure and merge again when iterations become slower or faster than after planning
            by this factor.
        plan_file: file in which rank 0 stores the measurements; a run that finds the file measures
            nothing.
        topology: ``"ring"``, ``"mesh"``, ``"doubling"`` or ``"bcube"``; payloads that are small in
            total are always gathered in few rounds, by doubling or directly between hosts.

    Raises:
        UsageError: a value is out of range, or an option of top-k is set for another compression.
    """
    if merge not in (*RULES, *_UNMEASURED):
        raise OptionError.of("", {"merge": merge}, names=(*RULES, *_UNMEASURED))
    measured = parts.Merged(
        rule=merge if merge in RULES else "tried", steps=steps, drift=drift, file=plan_file
    )
    plans: dict[str, PlanPart] = {
        "size": parts.Elements(count=elements),
        "none": parts.PerTensor(),
        "one": parts.OneBucket(),
    }
    if plan_file and merge in plans:
        raise _refusal(
            f"only a measured plan has a file; allowed are {', '.join(RULES)}",
            merge=merge,
            plan_file=plan_file,
        )
    return Strategy(
        plan=plans.get(merge, measured),
        compression=_merged_codec(compression, density=density, warmup=warmup),
        exchange=_along(topology),
        schedule=parts.WaitFree(),
    )


def _merged_codec(compression: Compression, **topk: Any) -> Compression:
    """Return the codec with the options of top-k; merging by its costs presumes it."""
    if compression == "topk":
        return TopK(**topk, auto_disable=False)
    for key, value in topk.items():
        if value != getattr(TopK, key):
            raise _refusal(
                f'{key} is an option of compression="topk"; leave it out, or write it into the '
                "compression",
                compression=compression,
                **{key: value},
            )
    codec = codecs.codec_of(codecs.parse(compression))
    return compression if codec is None or codec is compression else codec.without_trial()


@variant(
    OMGS,
    {"merge": "wfbp", "density": TopK.density, "warmup": TopK.warmup, "elements": 8192},
    compression="fp32",
)
def MGWFBP(**_: Any) -> None:
    """MG-WFBP: dense gradients, merged by network costs (Shi et al., INFOCOM 2019).

    Exact: the weights equal DDP's.

    Args:
        compression: encoding of gradients; all but ``"fp32"`` are not exact.
        steps: iterations in which backward is measured.
        drift: as for `OMGS`.
        plan_file: as for `OMGS`.
        topology: as for `OMGS`.

    Raises:
        UsageError: a value is out of range.
    """


# -- parameter servers -----------------------------------------------------------------------------

_UPDATES = ("worker", "server")
_SERVER_KEYS = {"count": "servers", "file": "plan_file"}


@preset(readers={"threshold": threshold_of}, keys=_SERVER_KEYS)
def Geryon(
    *,
    servers: int = 0,
    placement: str = "sharded",
    slice: int = 1 << 20,
    update: str = "worker",
    pull: str = "ready",
    classes: int = 2,
    threshold: Threshold = servers_options.THRESHOLD,
    steps: int = STEPS,
    plan_file: str = "",
    pushes: bool = True,
    order: str = "ready",
    mb: float = 1.0,
    compression: Compression = "fp32",
    back: str = "wire",
    encrypted: bool = True,
) -> Strategy:
    """Parameter servers whose urgent sums are sent in prioritised network flows.

    Geryon (Wang et al., 2020), section III. wingbeat starts the servers next to the workers and
    stops them with the job. Parameters of a layer are updated just before the layer runs, by each
    worker or by the servers. Exact with ``compression="fp32"``: the weights equal DDP's.

    Args:
        servers: number of servers; 0: one on each host.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``, each bucket
            on one server.
        slice: largest number of elements that a server sums at a time; 0: shards are not cut. Whole
            buckets are not cut either.
        update: where the optimizer runs. ``"worker"``: on each worker, for the parameters that it
            needs next. ``"server"``, as in the paper: on the servers, which hold its state and
            return parameters in place of sums; for element-wise optimizers.
        pull: when a sum is sent to the workers: ``"ready"``, as soon as it is complete; or
            ``"start"``, when the next iteration starts, as in the paper.
        classes: number of traffic classes that the network distinguishes (DSCP), 1 to 4; 1: no
            priorities.
        threshold: a bucket is sent in a more urgent class if the urgency of its first layer,
            ``1 - l/L`` for the ``l``-th of ``L`` layers in forward order, exceeds this; decreasing
            numbers for several classes. ``"tuned"``: tuned during training. ``"coarse"``: fully
            connected layers in the second of two classes, all others in the first.
        steps: iterations for which each threshold is tried, with ``threshold="tuned"``.
        plan_file: file in which rank 0 stores tuned thresholds; a run that finds the file does not
            tune.
        pushes: send gradients to the servers in these classes too.
        order: which sum is sent first: ``"ready"``, ``"urgent"``, and with ``pull="start"`` also
            ``"forward"`` or ``"random"``; see `wingbeat.parts.Servers`.
        mb: bucket size in MB (1 MB = 2**20 bytes); a larger parameter is sent alone.
        compression: encoding of gradients: ``"fp32"`` (their own dtype), ``"bf16"``, ``"fp16"``,
            ``"sketch"`` or ``"lowrank"``, or a codec's settings, such as
            ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        back: encoding of the sums: ``"wire"``, as the gradients; or ``"dense"``, float32. With
            ``update="server"`` parameters are returned, always in their own dtype.
        encrypted: encrypt all messages between workers and servers.

    Raises:
        UsageError: a value is out of range.
    """
    if update not in _UPDATES:
        raise OptionError.of("", {"update": update}, names=_UPDATES)
    return Strategy(
        plan=parts.FixedBuckets(mb=mb, first_mb=0.0),
        compression=compression,
        exchange=parts.Servers(
            count=servers,
            placement=placement,
            slice=slice,
            classes=classes,
            threshold=threshold,
            steps=steps,
            file=plan_file,
            pushes=pushes,
            order=order,
            back=back,
            encrypted=encrypted,
        ),
        schedule=parts.Served(pull=pull),
        update=parts.OnServers() if update == "server" else "",
    )


_NO_CLASSES = {
    "classes": 1,
    "threshold": servers_options.THRESHOLD,
    "steps": STEPS,
    "plan_file": "",
    "pushes": True,
}


@variant(Geryon, _NO_CLASSES)
def ParameterServer(**_: Any) -> None:
    """Servers sum the gradients and return the sums before the layers that need them run.

    Geryon (Wang et al., 2020). wingbeat starts the servers next to the workers and stops them with
    the job. Parameters of a layer are updated just before the layer runs, by each worker or by the
    servers. Exact with ``compression="fp32"``: the weights equal DDP's.

    Args:
        servers: number of servers; 0: one on each host.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``, each bucket
            on one server.
        slice: largest number of elements that a server sums at a time; 0: shards are not cut. Whole
            buckets are not cut either.
        update: where the optimizer runs. ``"worker"``: on each worker, for the parameters that it
            needs next. ``"server"``, as in the paper: on the servers, which hold its state and
            return parameters in place of sums; for element-wise optimizers.
        pull: when a sum is sent to the workers: ``"ready"``, as soon as it is complete; or
            ``"start"``, when the next iteration starts, as in the paper.
        order: which sum is sent first: ``"ready"``, ``"urgent"``, and with ``pull="start"`` also
            ``"forward"`` or ``"random"``; see `wingbeat.parts.Servers`.
        mb: bucket size in MB (1 MB = 2**20 bytes); a larger parameter is sent alone.
        compression: encoding of gradients: ``"fp32"`` (their own dtype), ``"bf16"``, ``"fp16"``,
            ``"sketch"`` or ``"lowrank"``, or a codec's settings, such as
            ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        back: encoding of the sums: ``"wire"``, as the gradients; or ``"dense"``, float32. With
            ``update="server"`` parameters are returned, always in their own dtype.
        encrypted: encrypt all messages between workers and servers.

    Raises:
        UsageError: a value is out of range.
    """


# -- bounded staleness -----------------------------------------------------------------------------


@preset(
    readers={"s": count_of, "p": colayers_of, "colayers": bundles_of, "in_flight": count_of},
    keys={"count": "colayers"},
)
def Canary(
    *,
    s: int | None = 18,
    p: int | str | None = AUTO,
    colayers: int | str = COLAYERS,
    measured: bool = False,
    compression: Compression = AUTO,
    encrypted: bool = True,
    in_flight: int | None = 2,
) -> Strategy:
    """Bounded staleness: workers run their own iterations and exchange gradients in pieces.

    Canary (Zhou et al., 2023), sections 4.3 to 5.3. When the backward of a colayer is complete, its
    gradients are sent in pieces. Each worker sums one piece of the gradients that have arrived, and
    all workers apply these sums in the same order. ``s`` and ``p`` bound how far a slow worker may
    fall behind before the others wait:

    - ``s=0``: no worker runs ahead (BSP). Exact: the weights equal DDP's. Gradients are complete
      when backward returns, so any optimizer and any code that changes gradients works as with
      `AllReduce`.
    - ``s=2, p=None``: a worker waits if it is more than 2 iterations ahead of the slowest (SSP).
    - ``s=18, p=6``, the defaults, as in the paper: a worker that is more than 18 iterations behind
      drops its iteration and continues from the fastest worker's, unless it has already sent 6 of
      its colayers.
    - ``s=None``: workers never wait for a slow worker, and nothing is dropped (ASP).

    Replicas differ by the rounds that they have applied, until `wingbeat.synchronize`.

    Args:
        s: iterations that a worker may be behind the fastest. None (``none`` on the command line):
            no bound.
        p: colayers that a worker must have sent for its iteration to be kept. ``"auto"``: 6 of 10,
            in proportion for other counts, if ``s`` is 1 or more. None (``none``): nothing is
            dropped, and the others wait.
        colayers: number of bundles of layers, k; a model with fewer layers has one per layer.
            ``"auto"``: 10 at first, then 4 to 10 as ``measured``.
        measured: bundle layers again, once, by the backward time of each parameter and the width of
            the distribution of its gradients, measured in the first iterations. All workers use the
            same bundles. Not allowed with ``s=0``.
        compression: encoding of the pieces: ``"fp32"`` (the gradients' own dtype), ``"sketch"``,
            ``"lowrank"`` or ``"fp16"``, or their settings, such as ``wingbeat.Sketch(bits=4)``.
            Whether it is faster is not measured. All but fp32 are not exact. ``"auto"``: the 8-bit
            sketch, as in the paper; ``"fp32"`` with ``s=0``.
        encrypted: encrypt messages between workers: gradients, and the model that a rejoining
            worker copies. Without encryption, anyone on the network can read and forge them. For
            its cost, see ``docs/how-to/averaging.md``.
        in_flight: rounds of sums that may be outstanding when an iteration begins while another
            worker is slow, at most ``s``. If no worker is slow, one round may be outstanding, so
            that slow connections do not delay gradients. None (``none``): as many as ``s``, as in
            the paper; with ``s=None`` the amount of unsent data is then unbounded.

    Raises:
        UsageError: a value is out of range.
    """
    check_flags(measured=measured)
    if colayers == AUTO and not measured:
        raise _refusal("allowed are whole numbers; 'auto' with measured=True", colayers=colayers)
    count = COLAYERS if colayers == AUTO else colayers
    least = 0
    if colayers == AUTO:
        least = max(MIN_COLAYERS, p) if isinstance(p, int) else MIN_COLAYERS
    plan = parts.Colayers(count=count, measured=measured)  # type: ignore[arg-type]
    if p not in (None, AUTO, *range(1, plan.count + 1)) or isinstance(p, bool):
        most = f"whole numbers, 1 to {plan.count} (colayers), None and 'auto'"
        raise _refusal(f"allowed are {most}", p=p)
    exchange = parts.Bounded(
        s=s,
        # None means all colayers, also in a model with fewer.
        p=None if p == plan.count else p,
        encrypted=encrypted,
        in_flight=in_flight,
    )
    if compression == AUTO:
        compression = "fp32" if exchange.exact else "sketch"
    return Strategy(
        plan=replace(plan, least=least),
        compression=compression,
        exchange=exchange,
        schedule=parts.Stale(),
    )


# -- averages of models ----------------------------------------------------------------------------


@preset(readers={"threshold": count_of})
def Ripples(
    *,
    policy: str = "smart",
    size: int = GROUP_SIZE,
    threshold: int | None = THRESHOLD,
    every: int = 1,
    overlap: bool = False,
    compression: Compression = "fp32",
    average_state: bool = False,
    encrypted: bool = True,
) -> Strategy:
    """Partial all-reduce: after a local step, models are averaged within dynamic groups.

    Ripples (Luo et al., 2020). Each worker updates its model with its own gradients and requests a
    group from the group generator, so that slow workers do not delay the others. Not exact: models
    differ until `wingbeat.synchronize`.

    Args:
        policy: ``"smart"``, the paper's smart groups (section 5) with corrections. ``"paper"``, the
            same exactly as published: a worker that has fallen behind once stays excluded, and
            subsets of workers may train without exchanging models with the rest. ``"random"``, the
            paper's random groups (section 4.1). ``"buffered"`` (+ Group Buffer), ``"divided"`` (+
            Global Division) and ``"inter-intra"`` each add one step from ``"random"`` to
            ``"smart"``. ``"static"``, a schedule without a generator (section 4.2).
        size: number of members of a random group.
        threshold: C_thres of the slowdown filter (section 5.3), for ``"smart"`` and ``"paper"``.
            None (``none`` on the command line): no filter.
        every: steps from one average to the next.
        overlap: compute an average during the next forward and backward and apply it in the next
            step; otherwise each step waits for its average.
        compression: encoding of parameters: ``"fp32"`` (unchanged) or ``"bf16"``.
        average_state: average the optimizer's state per element (momentum, the two moments of Adam)
            together with the parameters; otherwise each worker keeps its own.
        encrypted: encrypt messages to and from the generator. Parameters use the connections of
            collectives (``encrypted`` of `wingbeat.init`). No effect with ``"static"``.

    Raises:
        UsageError: a value is out of range.
    """
    check_flags(overlap=overlap, average_state=average_state)
    return Strategy(
        plan=parts.OneBucket(),
        compression=compression,
        exchange=parts.Groups(policy=policy, size=size, threshold=threshold, encrypted=encrypted),
        schedule=parts.Local(every=every, delay=int(overlap)),
        update=parts.Averaged(state=average_state),
    )


@preset()
def ADPSGD(
    *,
    overlap: bool = True,
    compression: Compression = "fp32",
    average_state: bool = False,
    encrypted: bool = True,
) -> Strategy:
    """Asynchronous decentralised SGD: after a local step, a worker averages with one other worker.

    AD-PSGD (Lian et al., 2018), as compared in the Ripples paper (sections 2.3 and 7). A worker of
    even rank selects a random worker of odd rank, which averages at once, independent of its
    computation; without these two halves there are deadlocks (Fig. 2a). For pairs without halves,
    use ``Ripples(policy="random", size=2)``. Not exact: models differ until
    `wingbeat.synchronize`.

    Args:
        overlap: compute averages during the next forward and backward.
        compression: encoding of parameters: ``"fp32"`` (unchanged) or ``"bf16"``.
        average_state: average the optimizer's state per element (momentum, the two moments of Adam)
            together with the parameters; otherwise each worker keeps its own.
        encrypted: encrypt messages between workers, including parameters. `wingbeat.synchronize`
            uses the connections of collectives (``encrypted`` of `wingbeat.init`).

    Raises:
        UsageError: a value is out of range.
    """
    check_flags(overlap=overlap, average_state=average_state)
    return Strategy(
        plan=parts.OneBucket(),
        compression=compression,
        exchange=parts.Pairs(encrypted=encrypted),
        schedule=parts.Local(delay=int(overlap)),
        update=parts.Averaged(state=average_state),
    )


@preset(readers={"quorum": count_of})
def LocalSGD(
    *,
    every: int = 8,
    overlap: bool = False,
    compression: Compression = "fp32",
    average_state: bool = False,
    quorum: int | None = None,
    grace: float = GRACE_S,
    encrypted: bool = True,
) -> Strategy:
    """Local steps; all models are averaged periodically.

    Local SGD (Stich, 2019). With ``every=1`` and SGD, with or without momentum, the weights equal
    DDP's. Otherwise not exact.

    Args:
        every: steps from one average to the next, H.
        overlap: compute an average during the next forward and backward and apply it in the next
            step; otherwise the step waits for it.
        compression: encoding of parameters: ``"fp32"`` (unchanged), ``"bf16"``, or a codec. A codec
            encodes each worker's change since the last average and adds its error to the next
            change.
        average_state: average the optimizer's state per element (momentum, the two moments of Adam)
            together with the parameters; otherwise each worker keeps its own.
        quorum: workers, or replicas, with which an average is made: once as many have ended their
            steps, it waits ``grace`` seconds for the others, and leaves out those that are late.
            They copy the shared model later, keep their steps and merge them in the next average.
            None: it waits for all that are alive.
        grace: those seconds.
        encrypted: encrypt messages to and from the generator, which tracks the membership.
            Parameters use the connections of collectives (``encrypted`` of `wingbeat.init`).

    Raises:
        UsageError: a value is out of range.
    """
    check_flags(overlap=overlap, average_state=average_state)
    update: parts.UpdatePart = parts.Averaged(state=average_state)
    coded = str(compression) not in DTYPES
    if coded or quorum is not None:
        if average_state:
            raise _refusal(
                "an average of changes, which codecs and a quorum need, leaves the optimizer's "
                'state out; allowed: average_state=False, or compression="fp32" without a quorum',
                **({"compression": compression} if coded else {"quorum": quorum}),
                average_state=True,
            )
        update = parts.Outer(lr=1.0, momentum=0.0)
    return Strategy(
        plan=parts.OneBucket(),
        compression=compression,
        exchange=parts.Groups(policy="all", quorum=quorum, grace=grace, encrypted=encrypted),
        schedule=parts.Local(every=every, delay=int(overlap)),
        update=update,
    )


@preset(
    keys={
        "lr": "outer_lr",
        "momentum": "outer_momentum",
        "optimizer": "outer_optimizer",
        "count": "fragments",
        "names": "fragments",
    },
    readers={
        "fragments": fragments_of,
        "alpha": number_of,
        "quorum": count_of,
        "outer_optimizer": in_python,
    },
)
def DiLoCo(
    *,
    every: int = 30,
    fragments: int | Sequence[Sequence[str]] = 1,
    delay: int = 0,
    alpha: float | None = None,
    weights: str = "equal",
    quorum: int | None = None,
    grace: float = GRACE_S,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    outer_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    compression: Compression = "fp32",
    encrypted: bool = True,
) -> Strategy:
    """Local steps; the average change of the models is the gradient of an outer optimizer.

    DiLoCo (Douillard et al., 2023). With ``fragments`` and ``delay`` it is Streaming DiLoCo
    (Douillard et al., 2025): fragments of the model are averaged in turn, each during training. Any
    inner optimizer can be used. Not exact.

    Args:
        every: steps from one average of a fragment to its next, H.
        fragments: number of fragments into which the model's layers are divided; or the fragments,
            each a list of names of modules and parameters, which must be all that are trained. On
            the command line ``fragments=embedding+layers.0/layers.1+head``.
        delay: steps during which an average is computed before it is applied; 0: the step waits for
            it. The step that applies it has a gradient of the weights before.
        alpha: the share of a worker's own parameters when it applies an average, 0 to 1; the rest
            is the shared model (torchft's ``fragment_update_alpha``). None: the shared model plus
            all that the worker has moved since it sent.
        weights: of workers in the average. ``"equal"``. ``"tokens"``: by the tokens or samples that
            a worker has counted by `count_tokens` since its last merge. ``"decoupled"``: by these
            times its tokens per step, the rule of Decoupled DiLoCo (Douillard et al., 2026).
        quorum: workers, or replicas, with which an average is made: once as many have ended their
            steps, it waits ``grace`` seconds for the others, and leaves out those that are late.
            They copy the shared model later, keep their steps and merge them in the next average.
            None: it waits for all that are alive.
        grace: those seconds.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        outer_optimizer: makes another outer optimizer of a list of parameters, one flat one for
            each fragment, such as ``functools.partial(torch.optim.Adam, lr=0.1)``. It must update
            each element by itself. Not with ``outer_lr`` or ``outer_momentum``.
        compression: encoding of the changes: ``"fp32"`` (unchanged), ``"bf16"``, or a codec, such
            as ``"sketch@4"`` or ``TopK(density=0.02, bits=2)`` (SparseLoCo, Sarfi et al., 2025),
            whose error is added to the next change.
        encrypted: encrypt messages to and from the generator, which tracks the membership.
            Parameters use the connections of collectives (``encrypted`` of `wingbeat.init`).

    Raises:
        UsageError: a value is out of range.
    """
    pieces: parts.PlanPart = parts.OneBucket()
    if isinstance(fragments, (list, tuple)):
        pieces = parts.Fragments(names=fragments)  # type: ignore[arg-type]
    elif fragments != 1:
        pieces = parts.Colayers(count=fragments)  # type: ignore[arg-type]
    return Strategy(
        plan=pieces,
        compression=compression,
        exchange=parts.Groups(policy="all", quorum=quorum, grace=grace, encrypted=encrypted),
        schedule=parts.Local(every=every, delay=delay),
        update=parts.Outer(
            lr=outer_lr,
            momentum=outer_momentum,
            optimizer=outer_optimizer,
            alpha=alpha,
            weights=weights,
        ),
    )


PRESETS: dict[str, Preset] = {
    made.__name__.lower(): made
    for made in (
        Auto,
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
