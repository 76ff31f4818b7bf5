"""The interface of exchanges, and the exchange by collectives of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from wingbeat.collectives import Collectives, encoded_of, factors_of
from wingbeat.schedules.events import Operation

if TYPE_CHECKING:
    from wingbeat.collectives import Handle
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.engine.gradients.compression import Compression
    from wingbeat.observe.meter import Section


class Exchange(Protocol):
    """Starts operations on buckets, in the order of the calls, which is the same on all workers.

    Exchanges with traffic classes also satisfy `wingbeat.planning.controllers.Prioritized`.
    """

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """Begin ``operation`` on ``bucket.flat``, in place, and store its handle in the bucket.

        The bucket's ``wire`` is the encoding of its gradients. With ``chained``, a chunk may start
        when the bucket's previous operation has finished with it. A `PeerError` if an earlier
        exchange failed.
        """

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Use these buckets from now on; a `UsageError` if the exchange does not support one.

        ``buckets`` are in the order in which their gradients become ready, ``forward`` in the order
        in which forward needs them.
        """

    def sections(self) -> Sequence[Section]:
        """Return the sections of `wingbeat top`. Other threads call this; it must not block."""


class CollectiveExchange:
    """Starts collectives on buckets, each in its current encoding."""

    def __init__(self, collectives: Collectives, compression: Compression) -> None:
        self._collectives = collectives
        self._compression = compression
        self._gathers = compression.coded is not None and compression.coded.gathers
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
        blocks, encoded, factors = bucket.blocks, encoded_of(wire), factors_of(wire)
        if factors is not None and operation is not Operation.ALL_GATHER_PARAMETERS:
            if operation is not Operation.ALL_GATHER:  # the first half has reduced the whole bucket
                bucket.handle = begin.all_reduce_factors(bucket.flat, factors, bucket=number)
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
        elif encoded is not None and self._gathers:
            velocity = self._compression.velocity(bucket)
            bucket.handle = begin.all_gather_sum(
                bucket.flat, wire=encoded, bucket=number, velocity=velocity, beside=True
            )
        else:
            bucket.handle = begin.all_reduce(bucket.flat, bucket=number, wire=wire)
