"""Wait-free backpropagation: whole all-reduces under backward, as DDP and Horovod do."""

from __future__ import annotations

from wingbeat.collectives import Encoded
from wingbeat.sync.bucket import Bucket, Slot
from wingbeat.sync.engine import Engine
from wingbeat.wires import TopK


class WfbpEngine(Engine):
    """All-reduces each bucket as it completes; gradients are whole when backward returns."""

    def launch(self, bucket: Bucket) -> None:
        """Start the bucket's all-reduce, or the all-gather of its largest values."""
        wire = self.wiring.launching(bucket)
        if isinstance(wire, Encoded) and isinstance(self.choices.wire, TopK):
            bucket.handle = self.collectives.all_gather_sum(
                bucket.flat, wire=wire, bucket=bucket.index, velocity=self.wiring.velocity(bucket)
            )
        else:
            bucket.handle = self.collectives.all_reduce(bucket.flat, bucket=bucket.index, wire=wire)

    def store(self, slot: Slot) -> None:
        """Show the bucket's view as the gradient."""
        if slot.used:
            slot.show()

    def finish_backward(self) -> None:
        """Wait for all buckets, so that the user sees averaged gradients."""
        with self.exposed():
            for bucket in self.buckets:
                bucket.settle()
        for bucket in self.buckets:
            if bucket.dense:
                continue
            for slot in bucket.contributed():
                slot.show()
        self.check_in_step(self.buckets[0])
