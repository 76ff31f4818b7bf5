"""Partial exchange in virtual time: a part of each bucket is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wingbeat.schedules.events import Operation
from wingbeat.simulator.exchange import Exchange, SimulatedExchanges, SimulationContext, Waitable


def build_exchanges(context: SimulationContext, partitions: int) -> SimulatedExchanges:
    """Make exchanges that gather a part, flags and counts of each bucket."""
    workers, buckets = context.layout.workers, context.buckets
    parts = partitions or workers
    rows = zip(buckets.numel, buckets.members, strict=True)
    numel = tuple(workers * (-(-n // parts) + members + workers) for n, members in rows)
    sent = replace(context, buckets=replace(buckets, numel=numel))
    return SimulatedExchanges([_Gathering(each) for each in sent.collectives().workers])


@dataclass(frozen=True)
class _Gathering(Exchange):
    """Gathers buckets in place of the operation that the schedule starts."""

    inner: Exchange

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:  # noqa: ARG002
        """Start an all-gather of a bucket."""
        self.inner.start(Operation.ALL_GATHER, bucket, chained)

    def under_way(self, bucket: int) -> Sequence[Waitable]:
        """Return the operation that was started last on a bucket."""
        return self.inner.under_way(bucket)
