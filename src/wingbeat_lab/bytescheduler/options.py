"""The part of ByteScheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wingbeat import topologies
from wingbeat.settings import SIZE, Settings
from wingbeat.traits import ONCE, ExchangePart
from wingbeat_lab.divided import check_divided

if TYPE_CHECKING:
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.parts.strategy import Strategy
    from wingbeat.simulator.exchange import SimulatedExchanges, SimulationContext


@dataclass(frozen=True, kw_only=True, repr=False)
class Partitioned(Settings, ExchangePart):
    """Buckets are all-reduced in partitions, those that forward needs first before the others.

    ByteScheduler (Peng et al., SOSP 2019), in all-reduce mode: rank 0 decides which partition is
    all-reduced next, and the other workers follow. The credit limits the bytes that are in flight,
    because no partition overtakes one in flight.

    Args:
        partition_mb: largest partition in MB (1 MB = 2**20 bytes); a larger bucket is divided
            evenly. The default is that of the authors' code, 10**6 parameters, for servers and
            all-reduces; their documentation recommends about 32 MB for all-reduces.
        credit: limit of the bytes in flight, in partitions of this size. The default is that of the
            authors' code, 4 * 10**6 parameters; they recommend about 64 MB for all-reduces.
        topology: name of the topology along which partitions are all-reduced.

    Raises:
        UsageError: a number or a name is out of range.
    """

    partition_mb: float = field(default=4.0, metadata=SIZE)
    credit: int = 4
    topology: str = "ring"

    def __post_init__(self) -> None:
        self.check_size("partition_mb")
        self.check_count("credit", 1, 1024)
        topologies.get(str(self.topology))

    @property
    def needs(self) -> frozenset[str]:
        """A schedule that starts one operation for each bucket."""
        return frozenset({ONCE})

    @property
    def partition_bytes(self) -> int:
        """Bytes of the largest partition."""
        return max(1, round(self.partition_mb * 2**20))

    @property
    def credit_bytes(self) -> int:
        """Bytes that may be in flight."""
        return self.credit * self.partition_bytes

    def key(self) -> dict[str, Any]:
        """Return the options for which sizes in a plan file are valid."""
        return {"partition_mb": self.partition_mb, "credit": self.credit}

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for parts that partitions do not support."""
        check_divided(self, strategy, "partitions", "PerTensor()")

    def build(self, context: BuildContext) -> Runtime:
        """Make a runtime that all-reduces partitions in the order of rank 0."""
        from wingbeat_lab.bytescheduler.exchange import PartitionedExchange

        collectives = context.training.collectives
        return context.runtime(
            lambda: PartitionedExchange(
                collectives.world, self.topology, self.partition_bytes, self.credit_bytes
            )
        )

    def build_simulated(self, context: SimulationContext) -> SimulatedExchanges:
        """Make exchanges of partitions in virtual time, in the order of rank 0."""
        from wingbeat_lab.bytescheduler.simulated import build_exchanges

        return build_exchanges(context, self.partition_bytes, self.credit_bytes)
