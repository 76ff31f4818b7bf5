"""Parameter servers on GPUs: each worker's GPU serves its block of every bucket.

Geryon (Wang et al., 2020), sections III-A and IV, over NCCL. A flow is a communicator. Each traffic
class has its own, which the network prioritizes on InfiniBand and RoCE. A push is a reduce-scatter,
because the worker that keeps a block is its server, and a pull is an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wingbeat.collectives import Handle
from wingbeat.collectives.nccl import NcclJob
from wingbeat.compression import Coded
from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.slicing import BucketPriorities, layer_positions
from wingbeat.schedules.events import Operation
from wingbeat.transport.messages.carrier import tos_of
from wingbeat.transport.nccl import NcclGroup
from wingbeat.transport.world import World

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section

_COLLECTIVES = {
    Operation.ALL_REDUCE: "all_reduce",
    Operation.PUSH: "reduce_scatter",
    Operation.PULL: "all_gather",
}


class GpuServerExchange:
    """Sums buckets on the GPUs, each bucket with the communicator of its class.

    Operations start in the order of the calls, which is the same on all workers. NCCL requires this
    if several communicators share a GPU.

    Raises:
        UsageError: NCCL does not support an option.
    """

    def __init__(self, world: World, servers: Servers, wire: str | Coded = "") -> None:
        if wire:
            raise UsageError(
                f"compression={wire!r} with parameters on a GPU: as servers, GPUs sum gradients in "
                "their own dtype only; use compression='fp32', or this one with wingbeat.AllReduce "
                "or DeAR"
            )
        if servers.count or servers.whole or servers.order != Servers.order:
            raise UsageError(
                "parameters on a GPU: each GPU serves its block of every bucket, in the order in "
                "which they are ready; use servers=0, placement='sharded' and order='ready', as "
                "wingbeat.Geryon() does, or keep the model on the CPU"
            )
        self._world = world
        self._servers = servers
        self._positions: dict[int, int] = {}
        self._priorities = BucketPriorities(servers)

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Replace the buckets; ``forward`` has them in forward order.

        Raises UsageError if a bucket is not on a GPU.
        """
        for bucket in buckets:
            if bucket.flat.device.type not in self._world.nccl_devices:
                raise UsageError(
                    f"parameter {bucket.slots[0].name!r} is on {bucket.flat.device} and others are "
                    "on a GPU: move all of them to one kind of device, or use wingbeat.AllReduce()"
                )
        self._positions = {bucket.index: position for position, bucket in enumerate(forward)}
        self._priorities.set_buckets(
            [all(slot.fully_connected for slot in bucket.slots) for bucket in forward],
            layer_positions([bucket.names for bucket in forward]),
        )

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds between the classes, see `BucketPriorities.set_thresholds`."""
        self._priorities.set_thresholds(thresholds)

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Start an operation on a bucket, and store its handle in the bucket."""
        priorities, position = self._priorities, self._positions[bucket.index]
        pulls = operation is Operation.PULL
        urgency = priorities.of_reply(position) if pulls else priorities.of_push(position)
        if pulls and bucket.handle is not None:
            bucket.handle.wait()  # NCCL does not order the communicators of two classes
        name = _COLLECTIVES[operation]
        work = getattr(self._group(urgency), name)(bucket.flat)
        bucket.handle = Handle([NcclJob(work, name, self._world.rank)])

    def sections(self) -> Sequence[Section]:
        """Return nothing: NCCL does not report bytes by class."""
        return ()

    def _group(self, urgency: int) -> NcclGroup:
        classes = self._servers.classes
        return self._world.nccl_in(None if classes == 1 else tos_of(urgency, classes))
