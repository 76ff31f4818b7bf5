"""Exchange by servers: gradients are pushed in slices, and the servers' sums come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.errors import UsageError
from wingbeat.exchanges.client import Client, Part
from wingbeat.exchanges.hosting import Hosting
from wingbeat.schedules.events import Operation
from wingbeat.servers.partition import Slice, partitioned, placed
from wingbeat.servers.protocol import Ids, Kind, wish_of
from wingbeat.servers.tables import PriorityTable
from wingbeat.transport.world import World
from wingbeat.types import Serving

if TYPE_CHECKING:
    from wingbeat.gradients.bucket import Bucket
    from wingbeat.types import Span

_KINDS = {
    Operation.ALL_REDUCE: Kind.PUSH,
    Operation.PUSH: Kind.STORE,
    Operation.PULL: Kind.PULL,
}
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class ServerExchange:
    """Pushes buckets to the servers, and has their sums put in place.

    Args:
        world: the workers.
        serving: how many servers there are, and how gradients go to them.
        nbytes: of all gradients: what the servers make room for.
    """

    def __init__(self, world: World, serving: Serving, nbytes: int) -> None:
        self._world = world
        self._serving = serving
        self._random = random.Random(world.rank)
        self._hosting = Hosting(world, serving, nbytes)
        self._client: Client = self._hosting.client
        self._plans = 0
        self._slices: dict[int, list[Slice]] = {}
        self._places: dict[int, int] = {}
        self._rounds: dict[int, int] = {}
        self._asked: list[Bucket] = []
        self.priorities = PriorityTable(1, serving.thresholds)
        world.on_close(self._hosting.close)

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Cut these buckets, which are used from now on, for the servers."""
        for bucket in buckets:
            if bucket.flat.device.type != "cpu" or bucket.flat.dtype not in DTYPES:
                kind = f"{bucket.flat.dtype} on {bucket.flat.device}"
                raise UsageError(
                    f"parameter {bucket.slots[0].name!r} is {kind}: servers sum float32, float64, "
                    "float16 and bfloat16 on the CPU; use wingbeat.DeAR() or AllReduce()"
                )
        self._plans += 1
        sizes = [bucket.flat.numel() for bucket in buckets]
        largest = self._hosting.message // max(bucket.flat.element_size() for bucket in buckets)
        servers = self._hosting.count
        if self._serving.whole:
            slices = placed(sizes, servers, largest)
        else:
            limit = min(self._serving.slice or largest, largest)
            slices = partitioned(sizes, servers, limit)
        self._slices = {bucket.index: [] for bucket in buckets}
        for each in slices:
            self._slices[each.bucket].append(each)
        self._places = {bucket.index: place for place, bucket in enumerate(forward)}
        self._rounds = {bucket.index: -1 for bucket in buckets}
        self.priorities = PriorityTable(len(buckets), self.priorities.thresholds)

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Begin ``operation`` on the bucket, and keep its handle there.

        Args:
            operation: all-reduce, or push or pull.
            bucket: its ``flat`` must not change until the handle says so.
            chained: means nothing here: servers keep the order by themselves.

        Raises:
            PeerError: a server or a worker has failed before.
        """
        if operation is Operation.PULL and self._serving.shuffled:
            self._asked.append(bucket)
            if len(self._asked) == len(self._slices):
                self._random.shuffle(self._asked)
                for each in self._asked:
                    self._begin(operation, each)
                self._asked = []
            return
        self._begin(operation, bucket)

    def owned(self, bucket: Bucket) -> Span:
        """Servers leave nothing whole on one worker alone."""
        raise NotImplementedError(f"no worker owns a part of bucket {bucket.index}")

    def _begin(self, operation: Operation, bucket: Bucket) -> None:
        kind, number = _KINDS[operation], bucket.index
        if kind is not Kind.PULL:
            self._rounds[number] += 1
        place = self._places[number]
        back = self.priorities[place]
        out = back if self._serving.pushes else self._hosting.classes - 1
        memory = bucket.flat.detach().view(torch.uint8).numpy().data
        size = bucket.flat.element_size()
        wish = wish_of(back, place)
        parts = [
            Part(
                self._hosting.number(each.server),
                Ids(self._plans, each.number, self._rounds[number], wish),
                memory[each.start * size : each.stop * size],
                out,
                place,
            )
            for each in self._slices[number]
        ]
        dtype = DTYPES[bucket.flat.dtype]
        # A request is a handle: it can be asked, waited for, and calls back.
        bucket.handle = self._client.start(kind, dtype, parts, f"bucket {number}")
