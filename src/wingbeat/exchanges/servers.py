"""Exchange by servers: gradients are pushed in slices, and the servers' sums come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.errors import UsageError
from wingbeat.exchanges.client import Client, Part
from wingbeat.exchanges.hosting import Hosting
from wingbeat.exchanges.remote import DTYPES, RemoteOptimizer
from wingbeat.schedules.events import Operation
from wingbeat.servers.protocol import Kind
from wingbeat.servers.requests import KINDS, Requests
from wingbeat.transport import leaving
from wingbeat.transport.world import World
from wingbeat.types import Serving

if TYPE_CHECKING:
    from wingbeat.gradients.bucket import Bucket
    from wingbeat.types import Span


class ServerExchange:
    """Pushes buckets to the servers, and has their sums put in place.

    Args:
        world: the workers.
        serving: how many servers there are, and how gradients go to them.
        nbytes: of all gradients: what the servers make room for.
        optimizer: what the servers apply, see `ServerConfig`; empty where they only sum.
        memory: bytes that parameters and the optimizer's state may take on a server.

    Attributes:
        remote: what the servers have of the optimizer.
    """

    def __init__(
        self, world: World, serving: Serving, nbytes: int, optimizer: str = "", memory: int = 0
    ) -> None:
        self._hosting = Hosting(world, serving, nbytes, optimizer, memory)
        self._client: Client = self._hosting.client
        self._requests = Requests(serving, self._hosting.count, seed=world.rank)
        self._buckets: list[Bucket] = []
        self.remote = RemoteOptimizer(self._hosting, self._requests)
        world.on_close(self._close)

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Cut these buckets, which are used from now on, for the servers."""
        for bucket in buckets:
            if bucket.flat.device.type != "cpu" or bucket.flat.dtype not in DTYPES:
                kind = f"{bucket.flat.dtype} on {bucket.flat.device}"
                raise UsageError(
                    f"parameter {bucket.slots[0].name!r} is {kind}: servers sum float32, float64, "
                    "float16 and bfloat16 on the CPU; use wingbeat.DeAR() or AllReduce()"
                )
        self._buckets = list(buckets)
        largest = self._hosting.message // max(bucket.flat.element_size() for bucket in buckets)
        sizes = [bucket.flat.numel() for bucket in buckets]
        self._requests.planned(sizes, [bucket.index for bucket in forward], largest)
        self.remote.landing = {}

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Begin ``operation`` on the bucket, and keep its handle there.

        Args:
            operation: all-reduce, or push or pull.
            bucket: its ``flat`` must not change until the handle says so.
            chained: means nothing here: servers keep the order by themselves.

        Raises:
            PeerError: a server or a worker has failed before.
        """
        for number in self._requests.begin(operation, bucket.index):
            self._begin(KINDS[operation], self._buckets[number])

    def owned(self, bucket: Bucket) -> Span:
        """Servers leave nothing whole on one worker alone."""
        raise NotImplementedError(f"no worker owns a part of bucket {bucket.index}")

    def _close(self) -> None:
        """Leave the servers, after what is still due has come."""
        if not leaving.failing():
            self.remote.leaving()
        self._hosting.close()

    def _begin(self, kind: Kind, bucket: Bucket) -> None:
        new = kind in (Kind.FETCH, Kind.EXPECT)
        flat = self.remote.landing.get(bucket.index, bucket.flat) if new else bucket.flat
        memory = flat.detach().view(torch.uint8).numpy().data
        size = flat.element_size()
        parts = [
            Part(
                self._hosting.number(each.slice.server),
                each.ids._replace(round=self.remote.updates) if new else each.ids,
                memory[each.slice.start * size : each.slice.stop * size],
                each.urgency,
                each.position,
            )
            for each in self._requests.asked(bucket.index)
        ]
        dtype = DTYPES[bucket.flat.dtype]
        # A request is a handle: it can be asked, waited for, and calls back.
        bucket.handle = self._client.start(kind, dtype, parts, f"bucket {bucket.index}")
