"""Wait-free backpropagation: gradients are whole when backward returns."""

from __future__ import annotations

from wingbeat.gradients.bucket import Slot
from wingbeat.schedules import Wfbp
from wingbeat.schedules.events import BackwardEnds
from wingbeat.sync.engine import Engine


class WfbpEngine(Engine):
    """Shows the buckets' views as gradients, and has the optimizer step on all of them."""

    make_schedule = Wfbp

    def store(self, slot: Slot) -> None:
        """Show the bucket's view as the gradient."""
        if slot.used:
            slot.show()

    def finish_backward(self) -> None:
        """Wait for all buckets, so that the user sees averaged gradients."""
        self.tell(BackwardEnds())

    def show_gradients(self) -> None:
        """Show what others had a gradient for, where this worker has none."""
        for bucket in self.buckets:
            if not bucket.dense:
                for slot in bucket.contributed():
                    slot.show()
