"""Baseline presets: the systems that the papers compare theirs with.

They are composed and spelled like wingbeat's own presets:

>>> parse("p3:mb=2")
P3(mb=2.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wingbeat import parts, strategies
from wingbeat.compression import Compression, TopK
from wingbeat.strategies import OMGS, ParameterServer, Preset, Strategy
from wingbeat.strategies.preset import check_first_mb, preset, variant
from wingbeat_lab.ako import Partial
from wingbeat_lab.bytescheduler import Partitioned

_UNMEASURED = {"steps": 10, "drift": 1.5, "plan_file": ""}
_NO_SIZE = {**_UNMEASURED, "elements": 8192}
_DENSE = {**_NO_SIZE, "density": TopK.density, "warmup": TopK.warmup}


@variant(OMGS, {**_DENSE, "merge": "none"}, compression="fp32")
def PSGD(**_: Any) -> None:
    """P-SGD: dense gradients, each tensor all-reduced alone (OMGS-SGD, section II-B).

    Exact: the weights equal DDP's.
    """


@variant(OMGS, {**_NO_SIZE, "merge": "one"})
def TopKSGD(**_: Any) -> None:
    """TopK-SGD: the largest of all gradients, sent after backward (OMGS-SGD, section II-C)."""


@variant(OMGS, {**_NO_SIZE, "merge": "none"})
def LAGS(**_: Any) -> None:
    """LAGS-SGD: the largest gradients of each tensor (OMGS-SGD, section II-D)."""


@variant(OMGS, {**_UNMEASURED, "merge": "size"})
def MGS(**_: Any) -> None:
    """MGS-SGD: layers merged up to a size of 8192 elements (OMGS-SGD, section V-D)."""


@variant(ParameterServer, {"placement": "whole", "pull": "start", "order": "random"})
def VanillaPS(**_: Any) -> None:
    """Whole tensors on one server each, pulled in random order, as in TensorFlow (Fig. 3a)."""


@variant(ParameterServer)
def PartitionedPS(**_: Any) -> None:
    """Parameters are divided among the servers, sliced, and sent when ready (section IV)."""


@variant(ParameterServer, {"pull": "start", "order": "forward"})
def TicTac(**_: Any) -> None:
    """TICTAC: servers send strictly in forward order."""


@variant(ParameterServer, {"order": "urgent"})
def P3(**_: Any) -> None:
    """P3: senders have a priority queue by urgency, with few bytes in flight."""


@preset()
def Ako(
    *,
    partitions: int = 0,
    mb: float = 25.0,
    first_mb: float = 1.0,
    compression: Compression = "fp32",
    topology: str = "mesh",
) -> Strategy:
    """Partial gradient exchange: each worker sends a part of its gradients per iteration, in turn.

    Ako (Watcharapichat et al., SoCC 2016), in lockstep, as compared in the Canary paper (section
    6.1.3). A worker applies its own gradients at once and accumulates them until their part is
    sent. Not exact: every gradient is applied once on every worker, but at different times, so
    weights differ between workers.

    Args:
        partitions: number of parts of each bucket, of which one is sent per iteration; 0: the
            number of workers.
        mb: bucket size in MB (1 MB = 2**20 bytes); a larger parameter is sent alone.
        first_mb: size in MB of the bucket that is ready first; a small one starts communication
            early.
        compression: encoding of the parts: ``"fp32"`` (the gradients' own dtype) or ``"bf16"``,
            whose rounding error is sent later.
        topology: name of the topology; ``"mesh"`` sends directly to each worker.

    Raises:
        UsageError: a value is out of range.
    """
    check_first_mb(first_mb)
    return Strategy(
        plan=parts.FixedBuckets(mb=mb, first_mb=first_mb),
        compression=compression,
        exchange=Partial(partitions=partitions, topology=topology),
        schedule=parts.WaitFree(),
    )


@preset()
def ByteScheduler(
    *,
    partition_mb: float = 4.0,
    credit: int = 4,
    mb: float = 0.0,
    compression: Compression = "fp32",
    topology: str = "ring",
) -> Strategy:
    """ByteScheduler: all-reduces of partitions, in the order in which forward needs them.

    Peng et al., SOSP 2019, in all-reduce mode, as compared in the DeAR paper (section VI-C). Each
    parameter is divided into partitions, which wait in a priority queue; rank 0 decides the order
    for all. Sums may arrive after backward: parameters of a layer are updated just before the layer
    runs. Exact with ``compression="fp32"``: the weights equal DDP's. Sizes are not tuned.

    Args:
        partition_mb: largest partition in MB (1 MB = 2**20 bytes).
        credit: limit of the bytes in flight, in partitions of this size. Both defaults are about
            those of the authors' code; for all-reduces their documentation recommends larger
            values, about ``partition_mb=32, credit=2``.
        mb: bucket size in MB; a larger parameter is alone. 0: each parameter is, as in the paper.
        compression: encoding of gradients: ``"fp32"`` (their own dtype) or ``"bf16"``.
        topology: name of the topology.

    Raises:
        UsageError: a value is out of range.
    """
    return Strategy(
        plan=parts.PerTensor() if mb == 0 else parts.FixedBuckets(mb=mb, first_mb=0.0),
        compression=compression,
        exchange=Partitioned(partition_mb=partition_mb, credit=credit, topology=topology),
        schedule=parts.Served(),
    )


PRESETS: Mapping[str, Preset] = {
    **strategies.PRESETS,
    **{
        made.__name__.lower(): made
        for made in (
            PSGD,
            TopKSGD,
            LAGS,
            MGS,
            VanillaPS,
            PartitionedPS,
            TicTac,
            P3,
            Ako,
            ByteScheduler,
        )
    },
}
"""The presets of wingbeat and of this module, by their names on the command line."""


def names() -> list[str]:
    """Return the names of all strategies on the command line."""
    return strategies.names(PRESETS)


def parse(text: str) -> Strategy:
    """Parse as `wingbeat.strategies.parse`, with these presets too; raises its `UsageError`."""
    return strategies.parse(text, PRESETS)
