"""Parameter servers on GPUs: each worker's GPU serves its block of every bucket.

Geryon (Wang et al., 2020), sections III-A and IV, over NCCL: a flow is a communicator, and each
class has one of its own, whose traffic class the network honours on InfiniBand and RoCE. A push is
a reduce-scatter, since the server of a block is the worker that keeps it, and a pull an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wingbeat.collectives import Handle
from wingbeat.collectives.native import NativeJob
from wingbeat.errors import UsageError
from wingbeat.schedules.events import Operation
from wingbeat.servers.priorities import Priorities
from wingbeat.servers.tables import places_of
from wingbeat.transport.dscp import tos_of
from wingbeat.transport.native import NativeGroup
from wingbeat.transport.world import World
from wingbeat.types import Serving
from wingbeat.wires import Coded

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section

_DOES = {
    Operation.ALL_REDUCE: "all_reduce",
    Operation.PUSH: "reduce_scatter",
    Operation.PULL: "all_gather",
}


class GpuServers:
    """Sums buckets on the GPUs themselves, each bucket by the communicator of its class.

    Operations begin in the order of the calls, which is the same on all workers, as NCCL asks where
    several communicators share a GPU.

    Args:
        world: the workers.
        serving: the classes; the other options have no meaning here.
        wire: what gradients travel as.

    Raises:
        UsageError: an option that NCCL has no way to follow.
    """

    def __init__(self, world: World, serving: Serving, wire: str | Coded = "") -> None:
        if wire:
            raise UsageError(
                f"compression={wire!r} with parameters on a GPU: as servers, GPUs sum gradients in "
                "their own dtype only; use compression='fp32', or this one with wingbeat.AllReduce "
                "or DeAR"
            )
        usual = Serving()
        if serving.count or serving.whole or serving.order != usual.order or serving.shuffled:
            raise UsageError(
                "parameters on a GPU: each GPU serves its block of every bucket, in the order in "
                "which they are ready; use servers=0, placement='sharded' and order='ready', as "
                "wingbeat.Geryon() does, or keep the model on the CPU"
            )
        self._world = world
        self._serving = serving
        self._places: dict[int, int] = {}
        self._priorities = Priorities(serving)

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Find the class of each bucket.

        Raises:
            UsageError: one of them is not on a GPU.
        """
        for bucket in buckets:
            if bucket.flat.device.type not in self._world.native_on:
                raise UsageError(
                    f"parameter {bucket.slots[0].name!r} is on {bucket.flat.device} and others are "
                    "on a GPU: move all of them to one kind of device, or use wingbeat.AllReduce()"
                )
        self._places = {bucket.index: place for place, bucket in enumerate(forward)}
        self._priorities.planned(
            [all(slot.fully_connected for slot in bucket.slots) for bucket in forward],
            places_of([bucket.names for bucket in forward]),
        )

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Divide the classes by other thresholds from now on; see `Priorities.change`."""
        self._priorities.change(thresholds)

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Begin ``operation`` on the bucket, and keep its handle there.

        Args:
            operation: all-reduce, or push or pull.
            bucket: its buffer is a multiple of the number of workers long.
            chained: means nothing here: NCCL keeps the order within a class.
        """
        priorities, place = self._priorities, self._places[bucket.index]
        pulls = operation is Operation.PULL
        urgency = priorities.of_sum(place) if pulls else priorities.of_push(place)
        if pulls and bucket.handle is not None:
            bucket.handle.wait()  # another class: nothing else keeps it behind the push
        what = _DOES[operation]
        work = getattr(self._group(urgency), what)(bucket.flat)
        bucket.handle = Handle([NativeJob(work, what, self._world.rank)])

    def sections(self) -> Sequence[Section]:
        """NCCL does not say how many bytes each class has sent."""
        return ()

    def _group(self, urgency: int) -> NativeGroup:
        classes = self._serving.classes
        return self._world.native_in(None if classes == 1 else tos_of(urgency, classes))
