"""Exchange by servers: gradients are pushed in slices, and the servers' sums come back."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.codecs.factors import Factors
from wingbeat.collectives import Encoded
from wingbeat.collectives.cast import narrower
from wingbeat.errors import UsageError
from wingbeat.exchanges import forms
from wingbeat.exchanges.client import Client
from wingbeat.exchanges.forms import DTYPES
from wingbeat.exchanges.hosting import Hosting
from wingbeat.exchanges.part import Form, Part
from wingbeat.exchanges.remote import RemoteOptimizer
from wingbeat.observe.log import log
from wingbeat.observe.meter import Section
from wingbeat.schedules.events import Operation
from wingbeat.servers import head
from wingbeat.servers.dtypes import sum_dtype
from wingbeat.servers.partition import Slice
from wingbeat.servers.protocol import Kind
from wingbeat.servers.requests import KINDS, Asked, Requests
from wingbeat.servers.tables import CoarseTable, places_of
from wingbeat.transport.world import World
from wingbeat.types import Serving, Span
from wingbeat.wires import Coded

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket

FLOAT32 = 4

_NOTHING = memoryview(b"")

_UNDIVIDED = (
    'threshold="coarse": of the buckets of this model %s is of fully connected layers alone, so '
    'all are in one class and nothing goes first; use threshold="tuned" or a number'
)


class ServerExchange:
    """Pushes buckets to the servers, and has their sums put in place.

    Args:
        world: the workers.
        serving: how many servers there are, and how gradients go to them.
        nbytes: of all gradients: what the servers make room for.
        wire: what gradients travel as: empty for their own dtype, the name of one, or a codec.
        optimizer: what the servers apply, see `ServerConfig`; empty where they only sum.
        memory: bytes that parameters and the optimizer's state may take on a server.

    Attributes:
        remote: what the servers have of the optimizer.
    """

    def __init__(
        self,
        world: World,
        serving: Serving,
        nbytes: int,
        wire: str | Coded = "",
        optimizer: str = "",
        memory: int = 0,
    ) -> None:
        self._hosting = Hosting(world, serving, nbytes, wire, optimizer, memory)
        self._client: Client = self._hosting.client
        self._requests = Requests(serving, self._hosting.count, world.rank, self._hosting.weights)
        self._rank, self._workers = world.rank, world.size
        self._wire, self._dense = wire, bool(serving.dense and wire)
        self._buckets: list[Bucket] = []
        self._told = world.rank != 0
        self._plans: dict[int, forms.Plan] = {}
        self._residuals: dict[int, torch.Tensor] = {}
        self._due: set[int] = set()
        self.remote = RemoteOptimizer(self._hosting, self._requests)
        world.on_close(self._hosting.close)

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Cut these buckets, which are used from now on, for the servers.

        Raises:
            UsageError: parameters that servers cannot sum, or more slices than there is room for.
        """
        for bucket in buckets:
            if bucket.flat.device.type != "cpu" or bucket.flat.dtype not in DTYPES:
                kind = f"{bucket.flat.dtype} on {bucket.flat.device}"
                raise UsageError(
                    f"parameter {bucket.slots[0].name!r} is {kind}: servers sum float32, float64, "
                    "float16 and bfloat16 on the CPU; use wingbeat.DeAR() or AllReduce()"
                )
        self._buckets = list(buckets)
        self._plans, self._residuals, self._due = {}, {}, set()
        largest = self._hosting.message // max(bucket.flat.element_size() for bucket in buckets)
        if self._wire:  # what a codec cannot make smaller, and sums that are sent as they are
            room = self._hosting.message - head.ROOM
            largest = min(largest, room // FLOAT32)
        sizes = [bucket.flat.numel() for bucket in buckets]
        kinds = [all(slot.fully_connected for slot in bucket.slots) for bucket in buckets]
        order = [bucket.index for bucket in forward]
        places = places_of([bucket.names for bucket in forward])
        self._requests.planned(sizes, order, kinds, places, largest)
        self.remote.landing = {}
        self._refuse_too_many(self._requests.most_slices())
        table = self._requests.priorities.table
        if isinstance(table, CoarseTable) and not table.divides and not self._told:
            self._told = True
            log.warning(_UNDIVIDED, "each" if all(kinds) else "none")

    def _refuse_too_many(self, slices: int) -> None:
        if slices > self._hosting.slices:
            raise UsageError(
                f"a server would have {slices} slices, and has room for {self._hosting.slices}: "
                "use larger ones (slice), larger buckets (mb) or more servers"
            )

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Divide the classes by other thresholds from now on; see `Requests.prioritise`."""
        self._requests.prioritise(thresholds)

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Begin ``operation`` on the bucket, and keep its handle there.

        Args:
            operation: all-reduce, push or pull; or of parameters, fetch or expect.
            bucket: its ``flat`` must not change until the handle says so; its ``wire`` says what
                gradients travel as.
            chained: means nothing here: servers keep the order by themselves.

        Raises:
            PeerError: a server or a worker has failed before.
        """
        for number in self._requests.begin(operation, bucket.index):
            self._begin(KINDS[operation], self._buckets[number])

    def sections(self) -> Sequence[Section]:
        """Return bytes by class and by server, and what was refused of what has come."""
        client = self._client
        ways = {"out": client.sent.copy(), "in": client.received.copy()}
        classes: Counter[str] = Counter()
        servers: Counter[str] = Counter()
        for way, moved in ways.items():
            for (server, urgency), nbytes in moved.items():
                classes[f"{urgency} {way}"] += nbytes
                servers[f"{server - self._workers} {way}"] += nbytes
        shown = [
            Section("classes", dict(sorted(classes.items())), "B/s"),
            Section("servers", dict(sorted(servers.items())), "B/s"),
        ]
        refused = client.refused
        return [*shown, Section("refused", dict(refused))] if refused else shown

    def collect(self) -> None:
        """Add what the servers' sums still lack to this worker's residuals.

        Each slice's is one worker's, so that all of it is taken over if all workers do so; nothing
        may be under way here. Until the last sum is complete it is waited for.

        Raises:
            PeerError: a server or a worker has failed.
        """
        due, self._due = sorted(self._due), set()
        requests = [
            self._client.start(Kind.TAKE, "", self._lacking(number), f"bucket {number}")
            for number in due
        ]
        for request in requests:
            request.wait()

    def _lacking(self, number: int) -> list[Part]:
        residual = self._residuals[number]
        return [
            self._part(each, _NOTHING, forms.Rest(residual[each.slice.start : each.slice.stop]))
            for each in self._requests.asked(number)
            if self._mine(each.slice)
        ]

    def _mine(self, each: Slice) -> bool:
        return each.number % self._workers == self._rank

    def _begin(self, kind: Kind, bucket: Bucket) -> None:
        if kind in (Kind.FETCH, Kind.EXPECT):
            self._ask_for_parameters(kind, bucket)
            return
        wire = bucket.wire
        if isinstance(wire, Encoded) and wire.residual is not None:
            self._residuals[bucket.index] = wire.residual
            if not self._dense:
                self._due.add(bucket.index)
        asked, memory = self._requests.asked(bucket.index), _Memory(bucket.flat)
        parts = [
            self._part(each, memory.of(each.slice), self._form(bucket, each.slice))
            for each in asked
        ]
        dtype = DTYPES[bucket.flat.dtype]
        finish = functools.partial(self._keep_unused, bucket, [each.slice for each in asked])
        # A request is a handle: it can be asked, waited for, and calls back.
        bucket.handle = self._client.start(kind, dtype, parts, f"bucket {bucket.index}", finish)

    def _ask_for_parameters(self, kind: Kind, bucket: Bucket) -> None:
        """Have those that the next update makes put in place of the bucket's gradients."""
        flat, updates = self.remote.landing.get(bucket.index, bucket.flat), self.remote.updates
        memory = _Memory(flat)
        parts = [
            self._part(each._replace(ids=each.ids._replace(round=updates)), memory.of(each.slice))
            for each in self._requests.asked(bucket.index)
        ]
        dtype, residual = DTYPES[flat.dtype], self._residuals.get(bucket.index)
        finish = functools.partial(_forget_unused, bucket, residual, self.remote.unused)
        bucket.handle = self._client.start(kind, dtype, parts, f"bucket {bucket.index}", finish)

    def _part(self, each: Asked, memory: memoryview, form: Form | None = None) -> Part:
        server = self._hosting.number(each.slice.server)
        return Part(server, each.ids, memory, each.urgency, each.position, form)

    def _form(self, bucket: Bucket, each: Slice) -> Form | None:
        """Return how a slice travels; None for as it is."""
        wire, flat = bucket.wire, bucket.flat.detach()
        part = flat[each.start : each.stop]
        if isinstance(wire, Encoded):
            return self._encoded(wire, part, each)
        assert not isinstance(wire, Factors), "servers sum what they decode"
        own, cast = DTYPES[flat.dtype], narrower(wire, flat)
        dtype = own if cast is None else DTYPES[cast]
        back = sum_dtype(dtype).name if self._dense else dtype
        return None if own == dtype == back else forms.Cast(part, dtype, back)

    def _encoded(self, wire: Encoded, part: torch.Tensor, each: Slice) -> Form:
        assert not isinstance(self._wire, str)
        plan = self._plans.get(each.number)
        if plan is None:
            plan = forms.Plan(self._wire, wire.coding, Span(each.start, each.stop))
            self._plans[each.number] = plan
        residual = None if wire.residual is None else wire.residual[each.start : each.stop]
        return forms.Encoded(part, residual, plan, "float32" if self._dense else "")

    def _keep_unused(self, bucket: Bucket, slices: Sequence[Slice]) -> None:
        """Take back what came of parameters that no worker had a gradient for: nobody will use it.

        It is what was left of earlier gradients, and one worker keeps it for all.
        """
        residual = self._residuals.get(bucket.index)
        if residual is None or bucket.dense:
            return
        start = 0
        for slot, flag in zip(bucket.slots, bucket.flags.tolist(), strict=True):
            stop = start + slot.param.numel()
            for each in slices if not flag else ():
                common = slice(max(start, each.start), min(stop, each.stop))
                if self._mine(each) and common.start < common.stop:
                    residual[common].add_(bucket.flat[common])
            start = stop


def _forget_unused(bucket: Bucket, residual: torch.Tensor | None, unused: frozenset[int]) -> None:
    """Forget what encoding has lost of parameters whose sums servers do not use.

    What a codec makes of no gradient need not be nothing. What earlier gradients have left is held
    back meanwhile (`Compression.launching`).
    """
    if residual is None or not unused:
        return
    start = 0
    for slot in bucket.slots:
        stop = start + slot.param.numel()
        if slot.index in unused:
            residual[start:stop].zero_()
        start = stop


class _Memory:
    """The bytes of a buffer, for its slices."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._bytes: memoryview = flat.detach().view(torch.uint8).numpy().data
        self._size = flat.element_size()

    def of(self, each: Slice) -> memoryview:
        return self._bytes[each.start * self._size : each.stop * self._size]
