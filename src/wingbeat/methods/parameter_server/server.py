"""The parameter server: sums the slices that workers push, and sends the sums.

With an optimizer the server keeps the sums, updates its parameters, and sends these instead
(Geryon, section II-A).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from wingbeat import compression
from wingbeat.compression import Coded
from wingbeat.errors import PeerError
from wingbeat.methods.parameter_server.aggregator import (
    SLICE_OVERHEAD,
    Aggregator,
    Array,
    SliceKey,
    SliceSum,
)
from wingbeat.methods.parameter_server.protocol import (
    MAX_REASON,
    MESSAGES,
    UPDATE_KINDS,
    Flow,
    Ids,
    Kind,
    Order,
    Pinger,
    RequestError,
    SendQueue,
    link_of,
    ping_delay,
    position_of,
    room_of,
    sent_by,
    split_document,
    urgency_of,
)
from wingbeat.methods.parameter_server.shard_updates import ParameterReply, ShardUpdates
from wingbeat.schema import MalformedMessage
from wingbeat.transport.actor import Actor
from wingbeat.transport.failures import MAX_WAIT_FACTOR
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Limits, Message, Posted
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.store import Store

_log = logging.getLogger(__name__)

WINDOW = 128 << 20
"""Maximum bytes that wait at a server to be added, over all workers and classes."""

_MIN_MESSAGES = 2
"""Minimum messages in a flow's window: one is added while the next one arrives."""

SILENT = 0.8
"""Fraction of the timeout after which a silent peer is lost. All other waits are longer, so that
the error names the interface.
"""

SOONER = 0.9
"""Fraction of the timeout after which a server reports late workers, before workers time out."""


@dataclass(eq=False, slots=True)
class Reply:
    """A sum, parameters or a residual for one worker; ``result`` is None until it is complete."""

    worker: int
    ids: Ids
    kind: Kind = Kind.SUM
    dtype: str = ""
    result: Array | None = None
    queued: bool = False
    posted: Posted | None = None

    def set_sum(self, total: SliceSum, name: Callable[[int], str]) -> None:
        """Set the payload, and register as a reader of it; ``name`` returns a worker's name."""
        if self.worker in total.requested_by:
            raise _requested_twice(self, name)
        total.requested_by.add(self.worker)
        self.dtype, self.result = total.dtype, total.result
        total.readers.append(self.arrived)

    def arrived(self) -> bool:
        """Whether the worker has received the reply."""
        return self.posted is not None and self.posted.arrived


def _requested_twice(reply: Reply, name: Callable[[int], str]) -> RequestError:
    ids = reply.ids
    return RequestError(
        f"{name(reply.worker)} requested slice {ids.slice} of round {ids.round} twice"
    )


class Server(Actor):
    """One server: handles the requests of all workers for its slices.

    Mailbox numbers are workers, and ``name`` returns the name of one in errors. The limit of
    ``aggregator`` also limits the number of pending pulls.
    ``updates`` are the server's parameters; None if it only sums.
    """

    keep = True
    batch = 32

    def __init__(
        self,
        mailbox: Mailbox,
        workers: int,
        aggregator: Aggregator,
        updates: ShardUpdates | None = None,
        *,
        order: Order = Order.READY,
        timeout: float = 300.0,
        classes: int = 2,
        name: Callable[[int], str] = "rank {}".format,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(mailbox, MESSAGES, "a server", clock=clock)
        self._name = name
        self._workers, self._aggregator, self._updates = workers, aggregator, updates
        self._order, self._timeout, self._classes = order, timeout, classes
        self._queue: SendQueue[Reply] = SendQueue(order)
        self._pulls: dict[SliceKey, list[Reply]] = {}
        self._pending = [0] * workers
        self._max_pending = aggregator.max_nbytes // SLICE_OVERHEAD
        self._reserved: dict[tuple[int, SliceKey], Reply] = {}
        self._pinger, self._ping_delay = Pinger(mailbox), ping_delay(timeout)
        self._links: set[int] = set()  # links of received gradients
        self._pinged_at = clock()
        self._reported = False

    def step(self, message: Message | None) -> None:
        """Handle received messages, update one slice, and send what windows allow."""
        try:
            super().step(message)
        except (PeerError, RequestError) as error:
            self._report(str(error))

    def work(self) -> None:
        """Update one slice, and send what windows allow; end once all workers have departed."""
        if not self._present():
            self.closing = True
        if self._reported:
            return
        if self._updates is not None:
            self._send_parameters(self._updates.update_next())
        if self._queue.queued:
            self._queue.flush(self._room, self._send, lambda reply: reply.result is not None)

    def idle_s(self) -> float:
        """Return 0 if there is work."""
        return 0.0 if self.has_work else self.check_s

    def leave(self) -> None:
        """Report that the worker that started this server has ended."""
        if self.quick:
            self._report("the worker that started this server has ended")

    @property
    def has_work(self) -> bool:
        """Whether a slice can be updated without another message."""
        return self._updates is not None and self._updates.has_work and not self._reported

    # -- requests --------------------------------------------------------------------------

    def handle(self, message: Message, record: Ids) -> None:
        """Perform a worker's request."""
        free = functools.partial(self.mailbox.free, message)
        # Only gradients stay in the sender's window. The size of other requests has its own limit.
        if self._reported or message.kind not in (Kind.PUSH_PULL, Kind.PUSH):
            free()
        if self._reported or message.kind == Kind.PING:
            return
        try:
            if urgency_of(record.route) >= self._classes:
                raise RequestError(
                    f"{self._name(message.peer)} requested class {urgency_of(record.route)}; "
                    f"there are {self._classes}"
                )
            self._perform(message, record, free)
        except RequestError:
            free()  # no effect if the message is already freed
            raise

    def refuse(self, message: Message, error: MalformedMessage) -> None:
        """Fail: the sender would wait for ever."""
        self.mailbox.free(message)
        raise RequestError(f"{self._name(message.peer)} sent a malformed message: {error}")

    def _perform(self, message: Message, ids: Ids, free: Callable[[], object]) -> None:
        worker, updates = message.peer, self._updates
        if message.kind == Kind.PULL:
            self._pull(Reply(worker, ids))
        elif message.kind == Kind.PULL_RESIDUAL:
            if worker != ids.slice % self._workers:
                raise RequestError(
                    f"{self._name(worker)} does not own the residual of slice {ids.slice}"
                )
            self._pull(Reply(worker, ids, Kind.RESIDUAL))
        elif message.kind in (Kind.PUSH_PULL, Kind.PUSH):
            self._push(message, ids, free)
        elif updates is not None and message.kind in UPDATE_KINDS:
            now = self.clock()
            self._send_parameters(updates.handle(worker, message.kind, ids, message.payload, now))
        else:
            raise RequestError(f"{self._name(worker)} sent a message of kind {message.kind}")

    def _push(self, message: Message, ids: Ids, free: Callable[[], object]) -> None:
        """Add gradients; call ``free`` once they are added."""
        worker, key = message.peer, (ids.plan, ids.slice)
        if self._updates is not None:
            self._updates.set_route(key, ids.route)
        self._links.add(link_of(ids.route))
        if message.kind == Kind.PUSH_PULL:
            self._add_pending(Reply(worker, ids))
        # A worker that is ahead fills its window until the others catch up.
        total = self._aggregator.push(
            worker, key, ids.round, message.dtype, message.payload, self.clock(), free
        )
        if total is None:
            return
        for reply in self._pulls.pop(key, ()):
            self._pending[reply.worker] -= 1
            self._complete(reply, total)
            if not reply.queued:
                self._enqueue(reply)
        if self._updates is not None:
            self._updates.sum_completed(key)

    def _pull(self, reply: Reply) -> None:
        with sent_by(self._name(reply.worker)):
            total = self._aggregator.completed_sum(reply.ids[:2], reply.ids.round)
        if total is None:
            self._add_pending(reply)
        else:
            self._complete(reply, total)
        if total is not None or self._order is Order.FORWARD:
            self._enqueue(reply)

    def _complete(self, reply: Reply, total: SliceSum) -> None:
        if reply.kind is not Kind.RESIDUAL:
            reply.set_sum(total, self._name)
            return
        residual = self._aggregator.take_residual(reply.ids[:2])
        if residual is None:
            reply.result = np.empty(0, np.float32)
        else:
            reply.dtype, reply.result = "float32", residual

    def _add_pending(self, reply: Reply) -> None:
        waiting = self._pulls.setdefault(reply.ids[:2], [])
        if any((reply.worker, reply.kind) == (each.worker, each.kind) for each in waiting):
            raise _requested_twice(reply, self._name)
        if self._pending[reply.worker] >= self._max_pending:
            raise RequestError(
                f"{self._name(reply.worker)} has more than {self._max_pending} pending pulls"
            )
        self._pending[reply.worker] += 1
        waiting.append(reply)

    def _send_parameters(self, replies: Iterable[ParameterReply]) -> None:
        for each in replies:
            worker, ids, key = each.worker, each.ids, (each.worker, each.ids[:2])
            if each.state is not None:
                document = split_document(*each.state, self.mailbox.largest)
                for count, payload in enumerate(document):
                    kind = Kind.CONTINUATION if count else Kind.STATE
                    result = np.frombuffer(payload, np.uint8)
                    self._enqueue(Reply(worker, ids, kind, result=result))
            elif each.params is not None:
                reply = self._reserved.pop(key, None) or Reply(worker, ids, Kind.PARAMETERS)
                reply.set_sum(each.params, self._name)
                if not reply.queued:
                    self._enqueue(reply)
            elif self._order is Order.FORWARD:  # reserves its place in the queue
                self._reserved[key] = reply = Reply(worker, ids, Kind.PARAMETERS)
                self._enqueue(reply)

    # -- sending ---------------------------------------------------------------------------

    def _enqueue(self, reply: Reply) -> None:
        reply.queued = True
        route, result = reply.ids.route, reply.result
        nbytes = MAX_HEADER_BYTES + (self.mailbox.largest if result is None else result.nbytes)
        flow = Flow(reply.worker, urgency_of(route), link_of(route))
        self._queue.enqueue(flow, position_of(route), nbytes, reply)

    def _room(self, flow: Flow) -> int:
        if flow.peer in self.mailbox.left or flow.peer in self.mailbox.lost:
            return 0
        return room_of(self.mailbox, flow)

    def _send(self, flow: Flow, reply: Reply) -> Callable[[], bool]:
        try:
            reply.posted = self.mailbox.post(
                reply.worker,
                reply.kind,
                reply.result,
                ids=reply.ids,
                dtype=reply.dtype,
                interface=flow.interface(self.mailbox),
                urgency=flow.urgency,
            )
        except PeerError:
            if self._room(flow):
                raise  # otherwise the worker has just left; its peers detect that if it matters
        return reply.arrived

    # -- failures --------------------------------------------------------------------------

    def _present(self) -> list[int]:
        """Return the workers that have neither left nor been lost."""
        left, lost = self.mailbox.left, self.mailbox.lost
        return [rank for rank in range(self._workers) if rank not in left and rank not in lost]

    def check(self, now: float) -> None:
        """Check for lost and late workers; ping them if a sum is incomplete."""
        waits: list[Aggregator | ShardUpdates] = [self._aggregator]
        waits += [self._updates] if self._updates else []
        for worker, gone in self.gone.items():
            if any(each.is_waiting_for(worker) for each in waits):
                self._report(f"{self._name(worker)} {gone.text}")
        before = now - self._ping_delay
        if self._pinged_at < before and any(each.find_incomplete(before) for each in waits):
            self._pinged_at = now
            for worker in self._present():
                self._pinger.ping(worker, self._links)
        self._check_late(now)

    def _check_late(self, now: float) -> None:
        """Fail if workers wait for each other, or too long for a live worker.

        A live worker that has pushed nothing may be evaluating or saving.
        """
        aggregator = self._aggregator
        for seconds in (MAX_WAIT_FACTOR * self._timeout, self._timeout):
            late = aggregator.find_incomplete(now - seconds)
            if late is not None and (
                seconds > self._timeout or all(map(aggregator.is_waiting, late[1]))
            ):
                key, workers = late
                self._report(
                    f"no gradients from {self._names(workers)} for slice {key[1]} within "
                    f"{seconds:g} s"
                )
                break
        if self._updates is not None:
            incomplete = self._updates.find_incomplete(now - self._timeout)
            if incomplete is not None:
                what, workers = incomplete
                self._report(f"no {what} from {self._names(workers)} within {self._timeout:g} s")

    def _report(self, why: str) -> None:
        """Send the reason to all workers, once."""
        if self._reported:
            return
        self._reported = True
        for worker in self._present():
            with contextlib.suppress(PeerError):  # the worker is lost
                reason = why.encode()[:MAX_REASON]
                self.mailbox.post(worker, Kind.FAILED, reason, urgency=0, seconds=0.1)

    def _names(self, workers: Iterable[int]) -> str:
        return ", ".join(map(self._name, sorted(workers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of one server process.

    Attributes:
        room: name of the rendezvous of servers and workers.
        hosts: for each server, the worker that starts it.
        ranks: the rank of each worker in the job.
        timeout: seconds that any wait may take.
        max_sum_bytes: maximum size of all sums.
        order: the order in which sums are sent, see `Order`.
        wire: codec of the gradients, optional.
        dense: whether sums are sent in the dtype of the sum instead of that of the gradients.
        optimizer: the optimizer as JSON, see `shard_optimizer.rebuild_optimizer`; empty if the
            server only sums.
        max_update_bytes: maximum size of parameters and optimizer state.
    """

    module: ClassVar[str] = "wingbeat.methods.parameter_server"
    uses_store_later: ClassVar[bool] = False

    room: str
    index: int
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    interfaces: tuple[str, ...]
    classes: int
    encrypted: bool
    timeout: float
    max_sum_bytes: int
    order: str
    wire: Coded | None = None
    dense: bool = False
    optimizer: str = ""
    max_update_bytes: int = 0

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.ranks)

    def name(self, number: int) -> str:
        """Return the name of the process with a mailbox number."""
        if number < self.workers:
            return f"rank {self.ranks[number]}"
        index = number - self.workers
        return f"server {index} (started by {self.name(self.hosts[index])})"

    @property
    def me(self) -> str:
        """The name of this server."""
        return self.name(self.workers + self.index)

    @property
    def limits(self) -> Limits:
        """Limits of the message layer between the server and the workers."""
        links = max(1, len(self.interfaces))
        return limits_of(self.workers, self.classes, self.timeout, links)

    def to_json(self) -> str:
        """Return the configuration as JSON."""
        wire = None if self.wire is None else compression.to_json(self.wire)
        return json.dumps({**asdict(self), "wire": wire})

    @staticmethod
    def from_json(text: str) -> ServerConfig:
        """Parse the result of `to_json`."""
        fields = json.loads(text)
        for key in ("ranks", "hosts", "interfaces"):
            fields[key] = tuple(fields[key])
        if fields["wire"] is not None:
            fields["wire"] = compression.from_json(fields["wire"])
        return ServerConfig(**fields)

    def open(self, store: Store, number: int, peers: Iterable[int]) -> Mailbox:
        """Open the mailbox of a server or a worker, and connect it to its peers."""
        return open_mailbox(
            store,
            number,
            peers,
            namespace=self.room,
            interfaces=self.interfaces,
            classes=self.classes,
            encrypted=self.encrypted,
            limits=self.limits,
            seconds=self.timeout,
            name=self.name,
        )

    def make_aggregator(self) -> Aggregator:
        """Return the aggregator. With a codec this imports torch, which takes a second."""
        codec = None
        if self.wire is not None:
            from wingbeat.methods.parameter_server.coding import SliceCodec

            codec = SliceCodec(self.wire, Limits().message)
        return Aggregator(
            self.workers, self.max_sum_bytes, dense=self.dense, codec=codec, name=self.name
        )

    def connect(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        """Connect to all workers; return a function that serves while its argument returns true."""
        # Modules are loaded before workers connect, because on a busy host this takes longer than
        # the timeout of a sum.
        aggregator = self.make_aggregator()
        if self.optimizer:
            importlib.import_module("wingbeat.methods.parameter_server.shard_optimizer")
        mailbox = self.open(store, self.workers + self.index, range(self.workers))
        return functools.partial(self.serve, mailbox, aggregator)

    def serve(
        self, mailbox: Mailbox, aggregator: Aggregator, is_parent_alive: Callable[[], bool]
    ) -> None:
        """Serve until all workers have left, or the worker that started this server has ended."""
        updates = None
        if self.optimizer:
            from wingbeat.methods.parameter_server.shard_optimizer import ShardOptimizer

            updates = ShardUpdates(
                self.workers,
                lambda: ShardOptimizer(json.loads(self.optimizer)),
                aggregator.completed_sum,
                self.max_update_bytes,
                name=self.name,
            )
        server = Server(
            mailbox,
            self.workers,
            aggregator,
            updates,
            order=Order(self.order),
            timeout=SOONER * self.timeout,
            classes=self.classes,
            name=self.name,
        )
        server.run(is_parent_alive)
        refused = mailbox.refused_connections + mailbox.refused
        if refused:
            _log.warning(
                "%s refused %d connections or frames of unknown senders: %s",
                self.me,
                refused.total(),
                ", ".join(f"{why} {n}" for why, n in sorted(refused.items())),
            )


def limits_of(workers: int, classes: int, timeout: float, interfaces: int = 1) -> Limits:
    """Return the limits of the message layer between a job's workers and servers.

    There is a flow for each worker, class and interface. The windows of all flows to a server add
    up to at most `WINDOW` bytes, unless a window would hold less than two messages.

    >>> [limits_of(n, 2, 60.0).window >> 20 for n in (1, 2, 4, 8, 64)]
    [32, 32, 16, 8, 8]
    """
    usual = Limits()
    least = _MIN_MESSAGES * (usual.message + MAX_HEADER_BYTES)
    window = min(usual.window, max(least, WINDOW // (workers * classes * interfaces)))
    return Limits(message=usual.message, window=window, silence=SILENT * timeout)
