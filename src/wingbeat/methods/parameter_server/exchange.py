"""Gradient exchange through parameter servers: buckets are pushed in slices, sums are pulled."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.collectives import Handle, dtype_of, encoded_of
from wingbeat.collectives.handle import NcclJob
from wingbeat.collectives.packing import narrower_dtype
from wingbeat.compression import Coded, options_of
from wingbeat.errors import UsageError
from wingbeat.exchanges.on_host import BucketsOnHost
from wingbeat.methods.parameter_server.aggregator import sum_dtype
from wingbeat.methods.parameter_server.client import Client, Request, Transfer
from wingbeat.methods.parameter_server.coding import (
    DTYPES,
    FLOAT32,
    MAX_HEADER_BYTES,
    SliceCoding,
    SliceFormat,
    bytes_of,
    cast_format,
    coded_format,
    residual_format,
)
from wingbeat.methods.parameter_server.launch import ServerGroup
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import Kind
from wingbeat.methods.parameter_server.server_update import RemoteOptimizer
from wingbeat.methods.parameter_server.slicing import (
    KIND_OF,
    BucketPriorities,
    RequestPlanner,
    Slice,
    SliceRequest,
    layer_positions,
)
from wingbeat.observe.log import log
from wingbeat.observe.meter import Section
from wingbeat.schedules.events import Operation
from wingbeat.transport.messages.frames import tos_of
from wingbeat.transport.world import World
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, Slot

_ONE_CLASS = (
    'threshold="coarse": of the buckets of this model %s has only fully connected layers, so all '
    'are in one class and none is prioritized; use threshold="tuned" or a number'
)


class ServerExchange:
    """Pushes buckets to the servers, and writes the sums back.

    ``wire`` is the dtype or codec of the gradients, empty for their own dtype. ``nbytes``, the size
    of all gradients, and ``max_update_bytes`` determine the servers' memory limits. ``optimizer``
    is what the servers apply, see `ServerConfig`; empty if they only sum.
    """

    def __init__(
        self,
        world: World,
        servers: Servers,
        nbytes: int,
        wire: str | Coded = "",
        optimizer: str = "",
        max_update_bytes: int = 0,
    ) -> None:
        self._servers = ServerGroup(world, servers, nbytes, wire, optimizer, max_update_bytes)
        self._client: Client = self._servers.client
        self._planner = RequestPlanner(
            servers, self._servers.count, world.rank, self._servers.weights
        )
        self._rank, self._workers = world.rank, world.size
        self._wire, self._dense = wire, bool(servers.dense and wire)
        self._coarse, self._warned = servers.coarse, not world.leads
        self._codings: dict[int, SliceCoding] = {}
        self._residuals: dict[int, torch.Tensor] = {}
        self._uncollected: set[int] = set()
        self.remote = RemoteOptimizer(self._servers, self._planner)
        world.on_close(self._servers.close)

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Replace the buckets; ``forward`` has them in forward order.

        Raises UsageError if servers cannot sum a parameter, or there are too many slices.
        """
        for bucket in buckets:
            if bucket.flat.dtype not in DTYPES:
                raise UsageError(
                    f"parameter {bucket.slots[0].name!r} is {bucket.flat.dtype}: servers sum "
                    "float32, float64, float16 and bfloat16; use wingbeat.DeAR() or AllReduce()"
                )
        self._on_host = BucketsOnHost(buckets)
        self._codings, self._residuals, self._uncollected = {}, {}, set()
        largest = self._servers.message // max(bucket.flat.element_size() for bucket in buckets)
        if self._wire:  # incompressible gradients, and sums sent in float32
            largest = min(largest, (self._servers.message - MAX_HEADER_BYTES) // FLOAT32)
        connected = [_fully_connected(bucket) for bucket in buckets]
        self._planner.set_buckets(
            [bucket.flat.numel() for bucket in buckets],
            [bucket.index for bucket in forward],
            connected,
            layer_positions([bucket.names for bucket in forward]),
            largest,
        )
        self.remote.landing = {}
        slices = self._planner.max_slices()
        if slices > self._servers.max_slices:
            raise UsageError(
                f"a server would have {slices} slices; the limit is {self._servers.max_slices}: "
                "use larger slices (slice), larger buckets (mb) or more servers"
            )
        classes = self._planner.priorities.classes
        if self._coarse and len(set(classes)) < 2 and not self._warned:
            self._warned = True
            log.warning(_ONE_CLASS, "each" if all(connected) else "none")

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds between the classes, see `BucketPriorities.set_thresholds`.

        Messages in flight stay in their class. Sums requested from now on use the new classes, even
        if their gradients were pushed before.
        """
        self._planner.priorities.set_thresholds(thresholds)

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Start an operation on a bucket, and store its handle in the bucket."""
        kind = KIND_OF[operation]
        begin = self._pull_parameters if kind in (Kind.FETCH, Kind.EXPECT) else self._push_or_pull
        for number in self._planner.begin(operation, bucket.index):
            begin(kind, self._on_host.of(number))

    def sections(self) -> Sequence[Section]:
        """Return bytes by class and by server, and the number of refused messages."""
        client = self._client
        classes: Counter[str] = Counter()
        servers: Counter[str] = Counter()
        for way, moved in {"out": client.sent.copy(), "in": client.received.copy()}.items():
            for (server, urgency), nbytes in moved.items():
                classes[f"{urgency} {way}"] += nbytes
                servers[f"{server - self._workers} {way}"] += nbytes
        sections = [
            Section("classes", dict(sorted(classes.items())), "B/s"),
            Section("servers", dict(sorted(servers.items())), "B/s"),
        ]
        refused = client.refused
        return [*sections, Section("refused", dict(refused))] if refused else sections

    def collect(self) -> None:
        """Add the residuals of the servers' sums to this worker's residuals.

        Each slice's residual goes to one worker, so all workers must call this, with nothing in
        flight. It waits until the last sums are complete.
        """
        uncollected, self._uncollected = sorted(self._uncollected), set()
        requests = []
        for number in uncollected:
            residual = self._residuals[number]
            transfers = [
                self._transfer(each, memoryview(b""), residual_format(_part(residual, each.slice)))
                for each in self._planner.requests(number)
                if self._owns_residual(each.slice)
            ]
            requests.append(
                self._client.request(Kind.PULL_RESIDUAL, "", transfers, f"bucket {number}")
            )
        for request in requests:
            request.wait()

    def _owns_residual(self, each: Slice) -> bool:
        return each.number % self._workers == self._rank

    def _push_or_pull(self, kind: Kind, bucket: Bucket) -> None:
        encoded = encoded_of(bucket.wire)
        if encoded is not None and encoded.residual is not None:
            self._residuals[bucket.index] = encoded.residual
            if not self._dense:
                self._uncollected.add(bucket.index)
        requests, flat = self._planner.requests(bucket.index), bucket.flat.detach()
        memory, size = bytes_of(flat), flat.element_size()
        transfers = [
            self._transfer(
                each,
                memory[each.slice.start * size : each.slice.stop * size],
                self._format(bucket, flat, each.slice),
            )
            for each in requests
        ]
        slices = [each.slice for each in requests]
        on_complete = functools.partial(self._keep_unused, bucket, slices)
        self._on_host.start(
            bucket,
            self._request(kind, bucket, flat, transfers, on_complete),
            out=kind is not Kind.PULL,
            back=kind is not Kind.PUSH,
        )

    def _pull_parameters(self, kind: Kind, bucket: Bucket) -> None:
        """Receive the parameters after the next update instead of the bucket's gradients."""
        landing, updates = self.remote.landing.get(bucket.index), self.remote.updates
        on_device = landing is not None and landing.device.type != "cpu"
        flat = bucket.flat if landing is None or on_device else landing
        memory, size = bytes_of(flat), flat.element_size()
        transfers = [
            self._transfer(
                each._replace(ids=each.ids._replace(round=updates)),
                memory[each.slice.start * size : each.slice.stop * size],
            )
            for each in self._planner.requests(bucket.index)
        ]
        residual = self._residuals.get(bucket.index)
        on_complete = functools.partial(_drop_unused, bucket, residual, self.remote.unused)
        self._on_host.start(
            bucket,
            self._request(kind, bucket, flat, transfers, on_complete),
            out=False,
            into=landing,
        )

    def _request(
        self,
        kind: Kind,
        bucket: Bucket,
        flat: torch.Tensor,
        transfers: Sequence[Transfer],
        on_complete: Callable[[], None],
    ) -> Callable[[], Request]:
        """Return the call that sends a request, for when ``flat`` is complete."""
        what = f"bucket {bucket.index}"
        return functools.partial(
            self._client.request, kind, DTYPES[flat.dtype], transfers, what, on_complete
        )

    def _transfer(
        self, each: SliceRequest, memory: memoryview, slice_format: SliceFormat | None = None
    ) -> Transfer:
        server = self._servers.numbers[each.slice.server]
        return Transfer(server, each.ids, memory, each.urgency, each.position, slice_format)

    def _format(self, bucket: Bucket, flat: torch.Tensor, each: Slice) -> SliceFormat | None:
        encoded, part = encoded_of(bucket.wire), _part(flat, each)
        if encoded is not None:
            coding = self._codings.get(each.number)
            if coding is None:  # constant between iterations
                span = Span(each.start, each.stop)
                coding = SliceCoding.of(options_of(self._wire), encoded.coding, span)
                self._codings[each.number] = coding
            residual = None if encoded.residual is None else _part(encoded.residual, each)
            return coded_format(coding, part, residual, "float32" if self._dense else "")
        own, cast = DTYPES[flat.dtype], narrower_dtype(dtype_of(bucket.wire), flat)
        dtype = own if cast is None else DTYPES[cast]
        reply = sum_dtype(dtype).name if self._dense else dtype
        return None if own == dtype == reply else cast_format(part, dtype, reply)

    def _keep_unused(self, bucket: Bucket, slices: Sequence[Slice]) -> None:
        """Return the sums of parameters without a gradient on any worker to the residual.

        No worker would use them; they consist of residuals. One worker keeps each slice's.
        """
        residual = self._residuals.get(bucket.index)
        if residual is None or bucket.dense:
            return
        used = bucket.flags.tolist()
        for (_, start, stop), flag in zip(_bounds(bucket), used, strict=True):
            for each in slices if not flag else ():
                common = slice(max(start, each.start), min(stop, each.stop))
                if self._owns_residual(each) and common.start < common.stop:
                    residual[common].add_(bucket.flat[common])


def _drop_unused(bucket: Bucket, residual: torch.Tensor | None, unused: frozenset[int]) -> None:
    """Drop the residual of parameters whose sums the servers do not use.

    A codec may encode a zero gradient as a nonzero value.
    """
    if residual is None or not unused:
        return
    for slot, start, stop in _bounds(bucket):
        if slot.index in unused:
            residual[start:stop].zero_()


def _bounds(bucket: Bucket) -> Iterator[tuple[Slot, int, int]]:
    """Yield each parameter of a bucket with the start and end of its elements."""
    start = 0
    for slot in bucket.slots:
        stop = start + slot.shape.numel()
        yield slot, start, stop
        start = stop


def _part(flat: torch.Tensor, each: Slice) -> torch.Tensor:
    return flat[each.start : each.stop]


def _fully_connected(bucket: Bucket) -> bool:
    return all(slot.fully_connected for slot in bucket.slots)


# -- GPUs ----------------------------------------------------------------------------------

_COLLECTIVES = {
    Operation.ALL_REDUCE: "all_reduce",
    Operation.PUSH: "reduce_scatter",
    Operation.PULL: "all_gather",
}


class GpuServerExchange:
    """Parameter servers on GPUs: each worker's GPU serves its block of every bucket.

    Geryon (Wang et al., 2020), sections III-A and IV, over NCCL. A flow is a communicator. Each
    traffic class has its own, which the network prioritizes on InfiniBand and RoCE. A push is a
    reduce-scatter, because the worker that keeps a block is its server, and a pull is an
    all-gather. Operations start in the order of the calls, which is the same on all workers. NCCL
    requires this if several communicators share a GPU.
    """

    @staticmethod
    def fits(servers: Servers, wire: str | Coded) -> bool:
        """Whether GPUs can serve: each serves its block of every bucket, when it is ready."""
        return not (wire or servers.count or servers.whole or servers.order != Servers.order)

    def __init__(self, world: World, servers: Servers) -> None:
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
        places = layer_positions([bucket.names for bucket in forward])
        self._priorities.set_buckets([_fully_connected(bucket) for bucket in forward], places)

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds between the classes, see `BucketPriorities.set_thresholds`."""
        self._priorities.set_thresholds(thresholds)

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Start an operation on a bucket, and store its handle in the bucket."""
        priorities, position = self._priorities, self._positions[bucket.index]
        pulls, classes = operation is Operation.PULL, self._servers.classes
        urgency = priorities.of_reply(position) if pulls else priorities.of_push(position)
        if pulls and bucket.handle is not None:
            bucket.handle.wait()  # NCCL does not order the communicators of two classes
        group = self._world.nccl_in(None if classes == 1 else tos_of(urgency, classes))
        name = _COLLECTIVES[operation]
        work = getattr(group, name)(bucket.flat)
        bucket.handle = Handle([NcclJob(work, name, self._world.rank)])

    def sections(self) -> Sequence[Section]:
        """Return nothing: NCCL does not report bytes by class."""
        return ()
