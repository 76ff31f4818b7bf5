"""Exchanges by collectives of all workers: dense, encoded, or as payloads that all gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from wingbeat.codecs.factors import Factors
from wingbeat.collectives import Collectives, Encoded
from wingbeat.schedules.events import Operation
from wingbeat.wires import TopK

if TYPE_CHECKING:
    from wingbeat.collectives import Handle
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.engine.gradients.compression import Compression
    from wingbeat.observe.meter import Section
    from wingbeat.types import Span


class CollectiveExchange:
    """Starts collectives on buckets, each as its gradients are to travel this time."""

    def __init__(self, collectives: Collectives, compression: Compression) -> None:
        self._collectives = collectives
        self._compression = compression
        if compression.factored:
            collectives.open_second()

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Any buckets will do."""

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Collectives have no classes."""
        raise NotImplementedError(f"no classes that thresholds {thresholds} would divide")

    def owned(self, bucket: Bucket) -> Span:
        """Return the elements of the buffer that a reduce-scatter leaves whole here."""
        return bucket.owned(self._collectives.world.rank)

    def sections(self) -> Sequence[Section]:
        """All that there is to see is on the interfaces."""
        return ()

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """Begin ``operation`` on the bucket, and keep its handle there.

        Args:
            operation: what to do with ``bucket.flat``.
            bucket: its ``wire`` says what gradients travel as.
            chained: whether chunks may go on as the bucket's collective before is done with them.

        Raises:
            PeerError: an earlier collective failed, so that the workers are no longer in step.
        """
        begin, number, wire = self._collectives, bucket.index, bucket.wire
        blocks = bucket.blocks
        if isinstance(wire, Factors) and operation is not Operation.ALL_GATHER_PARAMETERS:
            if operation is not Operation.ALL_GATHER:  # that first half has brought all of it
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
        elif isinstance(wire, Encoded) and isinstance(self._compression.coded, TopK):
            velocity = self._compression.velocity(bucket)
            bucket.handle = begin.all_gather_sum(
                bucket.flat, wire=wire, bucket=number, velocity=velocity, beside=True
            )
        else:
            bucket.handle = begin.all_reduce(bucket.flat, bucket=number, wire=wire)
