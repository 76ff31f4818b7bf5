"""DistributedDataParallel and its communication hooks, as strategies of the simulator.

gloo's ring, and NCCL's over sockets, pass through all ranks in order, on whatever hosts, so each
host's interface carries one stream out and one in. Sums inside hosts first, as wingbeat makes them,
are not assumed. Buckets are DDP's: the first of 1 MiB, then 25 MiB. The hook that rounds to
bfloat16 stands for that of float16 too. PowerSGD is in one bucket, since two at once can block
gloo's threads for ever; its arithmetic is taken to cost what wingbeat's low rank does, and rows of
it took 6 to 24% longer than predicted. Several interfaces share a bucket, as NCCL's channels do;
gloo uses one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wingbeat import parts
from wingbeat.compression import LowRank
from wingbeat.parts.plan import PlanPart
from wingbeat.parts.strategy import Strategy
from wingbeat.simulator.exchange import SimulatedExchanges, SimulationContext
from wingbeat.topologies import Ring
from wingbeat.traits import ExchangePart


@dataclass(frozen=True)
class FlatRing(ExchangePart):
    """A ring over all ranks, also where hosts have several."""

    collective: ClassVar[bool] = True

    def build_simulated(self, context: SimulationContext) -> SimulatedExchanges:
        """Make the exchange of each worker in virtual time."""
        return context.collectives(Ring())


_BUCKETS = parts.FixedBuckets(mb=25.0, first_mb=1.0)


def _ddp(compression: str | LowRank = "fp32", plan: PlanPart = _BUCKETS) -> Strategy:
    return Strategy(
        plan=plan, compression=compression, exchange=FlatRing(), schedule=parts.WaitFree()
    )


DDP = "ddp"
"""The name of DDP without a hook."""

BASELINES = {
    DDP: _ddp(),
    "ddp+bf16": _ddp("bf16"),
    **{
        f"ddp+powersgd:rank={rank}": _ddp(LowRank(rank=rank, auto_disable=False), parts.OneBucket())
        for rank in (1, 2, 4)
    },
}
"""DDP and its hooks by their names in `wingbeat bench`."""

HSDP = "hsdp"
"""The name of FSDP2's own replication."""


def baselines_for(*, inside: bool) -> dict[str, Strategy]:
    """Return what to compare with: DDP and its hooks, or HSDP, which has none.

    HSDP sums the gradients of a layer over the replicas when they are reduced inside.
    """
    if not inside:
        return dict(BASELINES)
    layers = parts.Layers(count=1)
    return {HSDP: _ddp(plan=layers)}
