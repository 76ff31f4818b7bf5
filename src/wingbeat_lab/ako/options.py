"""The part of partial exchange (Ako)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.settings import Settings
from wingbeat.traits import WHOLE, ExchangePart
from wingbeat_lab.divided import check_divided

if TYPE_CHECKING:
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.parts.strategy import Strategy
    from wingbeat.simulator.exchange import SimulatedExchanges, SimulationContext


@dataclass(frozen=True, kw_only=True, repr=False)
class Partial(Settings, ExchangePart):
    """Each worker sends a part of its gradients per iteration and accumulates the rest (Ako).

    Partial gradient exchange (Watcharapichat et al., SoCC 2016), in lockstep: an iteration ends
    when all parts sent in it have arrived. A worker applies its own gradients completely and at
    once, and those of other workers when they arrive. Every gradient is applied once on every
    worker, but at different times, so weights differ between workers.

    Args:
        partitions: number of parts of each bucket, of which one is sent per iteration, in turn,
            with all gradients accumulated for it. 0: the number of workers, so that a worker sends
            at most the size of its gradients, and a gradient reaches all workers within that number
            of iterations.
        topology: name of the topology along which parts are sent.

    Raises:
        UsageError: a number or a name is out of range.
    """

    exact: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False
    bound: ClassVar[str] = "partial"  # type: ignore[misc]

    partitions: int = 0
    topology: str = "mesh"

    def __post_init__(self) -> None:
        self.check_count("partitions", 0, 4096)
        topologies.get(str(self.topology))

    @property
    def needs(self) -> frozenset[str]:
        """A schedule that waits for each bucket before the step."""
        return frozenset({WHOLE})

    def key(self) -> dict[str, Any]:
        """Return the options for which sizes and thresholds in a plan file are valid."""
        return {"partitions": self.partitions}

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for parts that partial exchange does not support."""
        check_divided(self, strategy, "parts of gradients", "FixedBuckets()")

    def build(self, context: BuildContext) -> Runtime:
        """Make a runtime that sends parts of gradients; a `UsageError` for LBFGS."""
        import torch

        from wingbeat_lab.ako.partial import MixedGradients, PartialExchange
        from wingbeat_lab.ako.unsent import UnsentGradients

        training = context.training
        if isinstance(training.optimizer, torch.optim.LBFGS):
            raise UsageError(
                "torch.optim.LBFGS with gradients that are exchanged in parts (Partial, Ako) is "
                "not possible: how often it evaluates the loss depends on gradients, which differ "
                "between workers; use wingbeat.AllReduce()"
            )
        unsent = UnsentGradients(
            context.strategy.wire, training.bucketing.slots, training.collectives
        )
        context.compression = unsent
        return context.runtime(
            lambda: PartialExchange(training.collectives, unsent, self.partitions),
            MixedGradients(training.bucketing),
        )

    def build_simulated(self, context: SimulationContext) -> SimulatedExchanges:
        """Make exchanges that gather a part, flags and counts of each bucket in virtual time."""
        from wingbeat_lab.ako.simulated import build_exchanges

        return build_exchanges(context, self.partitions)
