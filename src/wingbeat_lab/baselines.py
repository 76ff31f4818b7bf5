"""Baseline presets: the systems that the papers compare theirs with.

They are composed and spelled like wingbeat's own presets:

>>> parse("p3:mb=2")
P3(mb=2.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wingbeat import parts, strategies
from wingbeat.compression import Compression
from wingbeat.strategies import OMGS, ParameterServer, Preset, Strategy


@dataclass(frozen=True, kw_only=True, repr=False)
class PSGD(OMGS):
    """P-SGD: dense gradients, each tensor all-reduced alone (OMGS-SGD, section II-B).

    Exact: the weights equal DDP's.
    """

    merge: str = "none"
    compression: Compression = "fp32"


@dataclass(frozen=True, kw_only=True, repr=False)
class TopKSGD(OMGS):
    """TopK-SGD: the largest of all gradients, sent after backward (OMGS-SGD, section II-C)."""

    merge: str = "one"


@dataclass(frozen=True, kw_only=True, repr=False)
class LAGS(OMGS):
    """LAGS-SGD: the largest gradients of each tensor (OMGS-SGD, section II-D)."""

    merge: str = "none"


@dataclass(frozen=True, kw_only=True, repr=False)
class MGS(OMGS):
    """MGS-SGD: layers merged up to a size of 8192 elements (OMGS-SGD, section V-D)."""

    merge: str = "size"


@dataclass(frozen=True, kw_only=True, repr=False)
class VanillaPS(ParameterServer):
    """Whole tensors on one server each, pulled in random order, as in TensorFlow (Fig. 3a)."""

    placement: str = "whole"
    pull: str = "start"
    order: str = "random"


@dataclass(frozen=True, kw_only=True, repr=False)
class PartitionedPS(ParameterServer):
    """Parameters are divided among the servers, sliced, and sent when ready (section IV)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TicTac(ParameterServer):
    """TICTAC: servers send strictly in forward order."""

    pull: str = "start"
    order: str = "forward"


@dataclass(frozen=True, kw_only=True, repr=False)
class P3(ParameterServer):
    """P3: senders have a priority queue by urgency, with few bytes in flight."""

    order: str = "urgent"


@dataclass(frozen=True, kw_only=True, repr=False)
class Ako(Preset):
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

    partitions: int = 0
    mb: float = 25.0
    first_mb: float = 1.0
    compression: Compression = "fp32"
    topology: str = "mesh"

    def __post_init__(self) -> None:
        self.check_count("partitions", 0, 4096)
        self.check_size("mb")
        self.check_size("first_mb")
        self.compose()

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
        return Strategy(
            plan=parts.FixedBuckets(mb=self.mb, first_mb=self.first_mb),
            compression=self.compression,
            exchange=parts.Partial(partitions=self.partitions, topology=self.topology),
            schedule=parts.WaitFree(),
        )


PRESETS: Mapping[str, type[Preset]] = {
    **strategies.PRESETS,
    **{
        cls.__name__.lower(): cls
        for cls in (
            PSGD,
            TopKSGD,
            LAGS,
            MGS,
            VanillaPS,
            PartitionedPS,
            TicTac,
            P3,
            Ako,
        )
    },
}
"""The presets of wingbeat and of this module, by their names on the command line."""


def names() -> list[str]:
    """Return the names of all strategies on the command line."""
    return strategies.names(PRESETS)


def parse(text: str) -> Preset | Strategy:
    """Parse as `wingbeat.strategies.parse`, with these presets too; raises its `UsageError`."""
    return strategies.parse(text, PRESETS)
