"""Exchange by collectives of all workers: dense, encoded, or as gathered payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from wingbeat.codecs.lowrank import Factors
from wingbeat.collectives import Collectives, Encoded
from wingbeat.schedules.events import Operation

if TYPE_CHECKING:
    from wingbeat.collectives import Handle
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.engine.gradients.compression import Compression
    from wingbeat.observe.meter import Section


class CollectiveExchange:
    """Starts collectives on buckets, each in its current encoding."""

    def __init__(self, collectives: Collectives, compression: Compression) -> None:
        self._collectives = collectives
        self._compression = compression
        if compression.factored:
            collectives.open_second()

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Accept any buckets."""

    def sections(self) -> Sequence[Section]:
        """Return no sections: the interfaces have their own."""
        return ()

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """As `Exchange.start`."""
        begin, number, wire = self._collectives, bucket.index, bucket.wire
        blocks, coded = bucket.blocks, self._compression.coded
        if isinstance(wire, Factors) and operation is not Operation.ALL_GATHER_PARAMETERS:
            if operation is not Operation.ALL_GATHER:  # the first half has reduced the whole bucket
                bucket.handle = begin.all_reduce_factors(bucket.flat, wire, bucket=number)
        elif operation is Operation.REDUCE_SCATTER:
            bucket.handle = begin.reduce_scatter(
                bucket.flat, bucket=number, wire=wire, blocks=blocks
            )
        elif operation is Operation.ALL_GATHER:
            after = cast("Handle | None", bucket.handle) if chained else None
            bucket.handle = begin.all_gather(
                bucket.flat, bucket=number, after=after, wire=wire, blocks=blocks
            )
        elif operation is Operation.ALL_GATHER_PARAMETERS:
            bucket.handle = begin.all_gather(bucket.flat, bucket=number, blocks=blocks)
        elif isinstance(wire, Encoded) and coded is not None and coded.gathers:
            velocity = self._compression.velocity(bucket)
            bucket.handle = begin.all_gather_sum(
                bucket.flat, wire=wire, bucket=number, velocity=velocity, beside=True
            )
        else:
            bucket.handle = begin.all_reduce(bucket.flat, bucket=number, wire=wire)
