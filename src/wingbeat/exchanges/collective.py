"""What an operation on a bucket means: dense, through a codec, or as payloads that all gather."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.collectives import Collectives, Encoded
from wingbeat.schedules.events import Operation
from wingbeat.wires import TopK

if TYPE_CHECKING:
    from wingbeat.gradients.bucket import Bucket
    from wingbeat.gradients.compression import Wiring


class Exchange:
    """Starts collectives on buckets, each as its gradients are to travel this time."""

    def __init__(self, collectives: Collectives, wiring: Wiring) -> None:
        self._collectives = collectives
        self._wiring = wiring

    def start(self, operation: Operation, bucket: Bucket, chained: bool) -> None:
        """Begin ``operation`` on the bucket, and keep its handle there.

        Args:
            operation: what to do with the gradients in ``bucket.flat``.
            bucket: its ``wire`` says what they travel as.
            chained: whether chunks may go on as the bucket's collective before is done with them.
        """
        begin, number, wire = self._collectives, bucket.index, bucket.wire
        if operation is Operation.REDUCE_SCATTER:
            bucket.handle = begin.reduce_scatter(bucket.flat, bucket=number, wire=wire)
        elif operation is Operation.ALL_GATHER:
            after = bucket.handle if chained else None
            bucket.handle = begin.all_gather(bucket.flat, bucket=number, after=after, wire=wire)
        elif isinstance(wire, Encoded) and isinstance(self._wiring.coded, TopK):
            velocity = self._wiring.velocity(bucket)
            bucket.handle = begin.all_gather_sum(
                bucket.flat, wire=wire, bucket=number, velocity=velocity
            )
        else:
            bucket.handle = begin.all_reduce(bucket.flat, bucket=number, wire=wire)
