"""The preset without a sum: each worker trains on its own gradients and on parts of the others'."""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat import parts
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.strategy import Strategy
from wingbeat.wires import Wire


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
        wire: what parts travel as: ``"fp32"`` (the gradients' own dtype) or ``"bf16"``; what that
            rounds away is sent later.
        topology: along which connections; ``"mesh"`` sends straight to each worker.

    Raises:
        UsageError: a value out of range.
    """

    partitions: int = 0
    mb: float = 25.0
    first_mb: float = 1.0
    wire: Wire = "fp32"
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
            wire=self.wire,
            exchange=parts.Partial(partitions=self.partitions, topology=self.topology),
            schedule=parts.WaitFree(),
        )
