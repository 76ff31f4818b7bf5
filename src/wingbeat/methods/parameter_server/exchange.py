"""Gradient exchange through parameter servers: buckets are pushed in slices, sums are pulled."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.coding import all_of
from wingbeat.codecs.lowrank import Factors
from wingbeat.collectives import Encoded
from wingbeat.collectives.packing import narrower_dtype
from wingbeat.compression import Coded
from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.aggregator import sum_dtype
from wingbeat.methods.parameter_server.client import Client, SliceFormat, Transfer
from wingbeat.methods.parameter_server.coded_aggregator import CODED, bytes_tensor
from wingbeat.methods.parameter_server.launch import ServerGroup
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import MAX_HEADER_BYTES, Kind, Piece, pack_header
from wingbeat.methods.parameter_server.server_update import RemoteOptimizer
from wingbeat.methods.parameter_server.slicing import (
    KIND_OF,
    RequestPlanner,
    Slice,
    SliceRequest,
    layer_positions,
)
from wingbeat.observe.log import log
from wingbeat.observe.meter import Section
from wingbeat.schedules.events import Operation
from wingbeat.transport.world import World
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, Slot

FLOAT32 = 4

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Names of the dtypes that servers sum."""

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

_NOTHING = memoryview(b"")

_ONE_CLASS = (
    'threshold="coarse": of the buckets of this model %s has only fully connected layers, so all '
    'are in one class and none is prioritized; use threshold="tuned" or a number'
)


# -- formats of slices ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class CastFormat:
    """Gradients sent in ``dtype``; a sum received in ``reply_dtype`` and written to ``part``."""

    part: torch.Tensor
    dtype: str
    reply_dtype: str

    @property
    def nbytes(self) -> int:
        """The size of the gradients in bytes."""
        return self.part.numel() * _BY_NAME[self.dtype].itemsize

    def encode(self) -> memoryview:
        """Return the gradients, rounded to the nearest values."""
        return _bytes_of(self.part.to(_BY_NAME[self.dtype]))

    def decode(self, dtype: str, payload: memoryview) -> None:
        """Write the sum to the slice."""
        copy_sum(self.part, self.reply_dtype, dtype, payload)


class SliceCoding:
    """The part of a bucket's coding that belongs to one slice; constant between iterations."""

    def __init__(self, wire: Coded, coding: Coding, span: Span) -> None:
        self.coding = coding.cut(span)
        known, regions = all_of(wire), self.coding.regions
        pieces = [Piece(len(r.span), r.cols, known.index(r.codec)) for r in regions]
        self.header = pack_header(wire, pieces)
        self.nbytes = len(self.header) + self.coding.room(Span(0, len(span)))


@dataclass(frozen=True, slots=True, eq=False)
class CodedFormat:
    """Encoded gradients, and an encoded sum unless the server replies in the dtype ``dense``."""

    part: torch.Tensor
    residual: torch.Tensor | None
    coding: SliceCoding
    dense: str = ""
    dtype: str = CODED

    @property
    def nbytes(self) -> int:
        """The size of the encoded gradients in bytes."""
        return self.coding.nbytes

    def encode(self) -> memoryview:
        """Encode the gradients plus the residual; update the residual."""
        header = self.coding.header
        payload = torch.zeros(self.nbytes, dtype=torch.uint8)  # padding is sent too
        payload[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        span = Span(0, self.part.numel())
        self.coding.coding.encode(self.part, span, payload[len(header) :], self.residual)
        return _bytes_of(payload)

    def decode(self, dtype: str, payload: memoryview) -> None:
        """Write the sum to the slice."""
        if self.dense:
            copy_sum(self.part, self.dense, dtype, payload)
            return
        header = self.coding.header
        if dtype != CODED or len(payload) != self.nbytes or payload[: len(header)] != header:
            raise ValueError("another format")
        coded = bytes_tensor(payload)[len(header) :]
        self.coding.coding.decode(coded, self.part, Span(0, self.part.numel()))


@dataclass(frozen=True, slots=True, eq=False)
class ResidualFormat:
    """A request for the encoding residual of a slice's sums, which is added to ``residual``."""

    residual: torch.Tensor
    dtype: str = ""
    nbytes: int = 0

    def encode(self) -> memoryview:
        """Return no bytes."""
        return _NOTHING

    def decode(self, dtype: str, payload: memoryview) -> None:
        """Add the residual."""
        if not dtype and not payload:
            return
        self.residual.add_(_elements(self.residual.numel(), "float32", dtype, payload))


def copy_sum(part: torch.Tensor, expected: str, dtype: str, payload: memoryview) -> None:
    """Copy a sum that is not encoded to a slice."""
    part.copy_(_elements(part.numel(), expected, dtype, payload))


def _elements(numel: int, expected: str, dtype: str, payload: memoryview) -> torch.Tensor:
    torch_dtype = _BY_NAME[expected]
    if dtype != expected or len(payload) != numel * torch_dtype.itemsize:
        raise ValueError("another format")
    return bytes_tensor(payload).view(torch_dtype)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view


# -- the exchange --------------------------------------------------------------------------


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
        self._buckets: list[Bucket] = []
        self._coarse, self._warned = servers.coarse, world.rank != 0
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
            if bucket.flat.device.type != "cpu" or bucket.flat.dtype not in DTYPES:
                kind = f"{bucket.flat.dtype} on {bucket.flat.device}"
                raise UsageError(
                    f"parameter {bucket.slots[0].name!r} is {kind}: servers sum float32, float64, "
                    "float16 and bfloat16 on the CPU; use wingbeat.DeAR() or AllReduce()"
                )
        self._buckets = list(buckets)
        self._codings, self._residuals, self._uncollected = {}, {}, set()
        largest = self._servers.message // max(bucket.flat.element_size() for bucket in buckets)
        if self._wire:  # incompressible gradients, and sums sent in float32
            largest = min(largest, (self._servers.message - MAX_HEADER_BYTES) // FLOAT32)
        connected = [all(slot.fully_connected for slot in bucket.slots) for bucket in buckets]
        self._planner.set_buckets(
            [bucket.flat.numel() for bucket in buckets],
            [bucket.index for bucket in forward],
            connected,
            layer_positions([bucket.names for bucket in forward]),
            largest,
        )
        self.remote.landing = {}
        self._check_slice_count(self._planner.max_slices())
        classes = self._planner.priorities.classes
        if self._coarse and len(set(classes)) < 2 and not self._warned:
            self._warned = True
            log.warning(_ONE_CLASS, "each" if all(connected) else "none")

    def _check_slice_count(self, slices: int) -> None:
        if slices > self._servers.max_slices:
            raise UsageError(
                f"a server would have {slices} slices; the limit is {self._servers.max_slices}: "
                "use larger slices (slice), larger buckets (mb) or more servers"
            )

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
            begin(kind, self._buckets[number])

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
        requests = [
            self._client.submit(
                Kind.PULL_RESIDUAL, "", self._residual_transfers(number), f"bucket {number}"
            )
            for number in uncollected
        ]
        for request in requests:
            request.wait()

    def _residual_transfers(self, number: int) -> list[Transfer]:
        residual = self._residuals[number]
        return [
            self._transfer(
                each, _NOTHING, ResidualFormat(residual[each.slice.start : each.slice.stop])
            )
            for each in self._planner.requests(number)
            if self._owns_residual(each.slice)
        ]

    def _owns_residual(self, each: Slice) -> bool:
        return each.number % self._workers == self._rank

    def _push_or_pull(self, kind: Kind, bucket: Bucket) -> None:
        wire = bucket.wire
        if isinstance(wire, Encoded) and wire.residual is not None:
            self._residuals[bucket.index] = wire.residual
            if not self._dense:
                self._uncollected.add(bucket.index)
        requests, memory = self._planner.requests(bucket.index), _Memory(bucket.flat)
        transfers = [
            self._transfer(each, memory.of(each.slice), self._format(bucket, each.slice))
            for each in requests
        ]
        slices = [each.slice for each in requests]
        on_complete = functools.partial(self._keep_unused, bucket, slices)
        bucket.handle = self._client.submit(
            kind, DTYPES[bucket.flat.dtype], transfers, f"bucket {bucket.index}", on_complete
        )

    def _pull_parameters(self, kind: Kind, bucket: Bucket) -> None:
        """Receive the parameters after the next update instead of the bucket's gradients."""
        flat, updates = self.remote.landing.get(bucket.index, bucket.flat), self.remote.updates
        memory = _Memory(flat)
        transfers = [
            self._transfer(
                each._replace(ids=each.ids._replace(round=updates)), memory.of(each.slice)
            )
            for each in self._planner.requests(bucket.index)
        ]
        residual = self._residuals.get(bucket.index)
        on_complete = functools.partial(_drop_unused, bucket, residual, self.remote.unused)
        bucket.handle = self._client.submit(
            kind, DTYPES[flat.dtype], transfers, f"bucket {bucket.index}", on_complete
        )

    def _transfer(
        self, each: SliceRequest, memory: memoryview, slice_format: SliceFormat | None = None
    ) -> Transfer:
        server = self._servers.number(each.slice.server)
        return Transfer(server, each.ids, memory, each.urgency, each.position, slice_format)

    def _format(self, bucket: Bucket, each: Slice) -> SliceFormat | None:
        wire, flat = bucket.wire, bucket.flat.detach()
        part = flat[each.start : each.stop]
        if isinstance(wire, Encoded):
            return self._coded_format(wire, part, each)
        assert not isinstance(wire, Factors), "servers sum decoded gradients"
        own, cast = DTYPES[flat.dtype], narrower_dtype(wire, flat)
        dtype = own if cast is None else DTYPES[cast]
        reply = sum_dtype(dtype).name if self._dense else dtype
        return None if own == dtype == reply else CastFormat(part, dtype, reply)

    def _coded_format(self, wire: Encoded, part: torch.Tensor, each: Slice) -> SliceFormat:
        assert not isinstance(self._wire, str)
        coding = self._codings.get(each.number)
        if coding is None:
            coding = SliceCoding(self._wire, wire.coding, Span(each.start, each.stop))
            self._codings[each.number] = coding
        residual = None if wire.residual is None else wire.residual[each.start : each.stop]
        return CodedFormat(part, residual, coding, "float32" if self._dense else "")

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
        stop = start + slot.param.numel()
        yield slot, start, stop
        start = stop


class _Memory:
    """The bytes of a buffer, by slice."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._bytes = _bytes_of(flat.detach())
        self._size = flat.element_size()

    def of(self, each: Slice) -> memoryview:
        return self._bytes[each.start * self._size : each.stop * self._size]
