"""Presets that exist to be compared with: what the papers measure their systems against.

They compose the same parts as wingbeat's own presets, and are spelled alike:

>>> parse("p3:mb=2")
P3(mb=2.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wingbeat import parts, strategies
from wingbeat.strategies import OMGS, ParameterServer, Preset, Strategy
from wingbeat.wires import Wire


@dataclass(frozen=True, kw_only=True, repr=False)
class PSGD(OMGS):
    """P-SGD: dense gradients, each tensor all-reduced alone (OMGS-SGD, section II-B).

    Exact: the weights equal DDP's.
    """

    merge: str = "none"
    compression: Wire = "fp32"


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


@dataclass(frozen=True, kw_only=True, repr=False)
class VanillaPS(ParameterServer):
    """Whole tensors on one server each, pulled in random order, as TensorFlow does (Fig. 3a)."""

    placement: str = "whole"
    pull: str = "start"
    order: str = "random"


@dataclass(frozen=True, kw_only=True, repr=False)
class PartitionedPS(ParameterServer):
    """Parameters are divided among the servers and sliced, and sent as they come (section IV)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TicTac(ParameterServer):
    """TICTAC: a server sends in the order of forward, and nothing before its turn."""

    pull: str = "start"
    order: str = "forward"


@dataclass(frozen=True, kw_only=True, repr=False)
class P3(ParameterServer):
    """P3: senders have a queue by urgency, with little under way."""

    order: str = "urgent"


@dataclass(frozen=True, kw_only=True, repr=False)
class Ako(Preset):
    """Partial gradient exchange: each worker sends a part of its gradients an iteration, in turn.

    Ako (Watcharapichat et al., SoCC 2016), in step, as Canary compares itself with it (section
    6.1.3). A worker applies its own gradients at once and gathers them until it is a part's turn
    to be sent. Not exact: every gradient is applied once on every worker, at different times, so
    that weights differ between workers.

    Args:
        partitions: of each bucket, of which one is sent an iteration; 0: as many as workers.
        mb: bucket size in MB (1 MB = 2**20 bytes); a parameter that is larger travels alone.
        first_mb: size of the bucket that is ready first, small so that the links start early.
        compression: what parts travel as: ``"fp32"`` (the gradients' own dtype) or ``"bf16"``; what
            that rounds away is sent later.
        topology: along which connections; ``"mesh"`` sends straight to each worker.

    Raises:
        UsageError: a value out of range.
    """

    partitions: int = 0
    mb: float = 25.0
    first_mb: float = 1.0
    compression: Wire = "fp32"
    topology: str = "mesh"

    def __post_init__(self) -> None:
        self.check_count("partitions", 0, 4096)
        self.check_size("mb")
        self.check_size("first_mb")
        self.compose()

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
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
"""Those of wingbeat and these, by their names on the command line."""


def names() -> list[str]:
    """Return the names of all strategies as the command line spells them."""
    return strategies.names(PRESETS)


def parse(text: str) -> Preset | Strategy:
    """Do as `wingbeat.strategies.parse`, with these presets too.

    Raises:
        UsageError: an unknown name or key, or a value of the wrong kind; names the nearest match.
    """
    return strategies.parse(text, PRESETS)
