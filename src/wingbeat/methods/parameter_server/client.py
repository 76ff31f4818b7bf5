"""The worker's connection to the servers: a thread pushes slices and receives their sums."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wingbeat.errors import PeerError
from wingbeat.methods.parameter_server.protocol import (
    MESSAGES,
    ONE_WAY_KINDS,
    UPDATE_KINDS,
    WITHOUT_PAYLOAD,
    Document,
    Flow,
    Ids,
    Kind,
    Order,
    Pinger,
    RequestError,
    SendQueue,
    link_of,
    ping_delay,
    printable,
    room_of,
    urgency_of,
)
from wingbeat.observe.log import log
from wingbeat.schema import MalformedMessage
from wingbeat.transport.actor import Actor
from wingbeat.transport.detector import Failure
from wingbeat.transport.failures import LOG_INTERVAL_S, MAX_WAIT_FACTOR
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Message, Posted
from wingbeat.transport.messages.mailbox import Mailbox

if TYPE_CHECKING:
    from wingbeat.methods.parameter_server.coding import SliceFormat

_WITHOUT_PAYLOAD = WITHOUT_PAYLOAD | {Kind.STATE}

_REPLY_TO = {
    Kind.PUSH_PULL: Kind.SUM,
    Kind.PULL: Kind.SUM,
    Kind.PULL_RESIDUAL: Kind.RESIDUAL,
    Kind.FETCH: Kind.PARAMETERS,
    Kind.EXPECT: Kind.PARAMETERS,
    Kind.STATE: Kind.STATE,
}

_MAX_STATE_BYTES = 1 << 32
"""Maximum size of the optimizer state of one slice."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One slice of a request.

    Attributes:
        server: number of the server's mailbox.
        memory: the gradients, overwritten by the reply.
        urgency: traffic class of the push, 0 the most urgent.
        position: the bucket's position in forward order.
        format: how the slice is sent; None for its own dtype.
    """

    server: int
    ids: Ids
    memory: memoryview
    urgency: int
    position: int
    format: SliceFormat | None = None

    @property
    def link(self) -> int:
        """The link, used in both directions."""
        return link_of(self.ids.route)

    def write(self, message: Message, dtype: str) -> bool:
        """Write a reply of this dtype to the slice; return False if it is malformed."""
        if self.server != message.peer:
            return False
        if self.format is not None:
            try:
                self.format.decode(message.dtype, message.payload)
            except ValueError:
                return False
            return True
        if message.dtype != dtype or len(message.payload) != len(self.memory):
            return False
        self.memory[:] = message.payload
        return True


class Request(Future[None]):
    """Slices that are pushed or pulled together; usable as a collective's `Handle`.

    ``on_complete`` is called in the client's thread when all replies have arrived, before the
    request is done.

    Attributes:
        description: the name of the request in error messages.
        missing: number of replies that have not arrived.
        posted: messages in flight, of a request without a reply.
        documents: received optimizer state, by plan, slice and round.
    """

    def __init__(
        self,
        kind: Kind,
        dtype: str,
        transfers: Sequence[Transfer],
        description: str,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.kind, self.dtype, self.transfers = kind, dtype, transfers
        self.description, self.on_complete = description, on_complete
        self.missing = len(transfers)
        self.posted: list[Posted] = []
        self.documents: dict[tuple[int, ...], Document] = {}

    def wait(self) -> None:
        """Block until all replies are written, or all messages without a reply have arrived.

        Raises PeerError if a server or a worker has failed; the error names it.
        """
        # No timeout: the client's thread completes or fails every request.
        error = self.exception()
        if error is not None:
            raise PeerError(str(error))

    wait_received = wait


class Client(Actor):
    """Pushes and pulls slices for one worker, in a separate thread after `start`.

    ``order`` applies to slices that are ready at the same time. ``check_servers`` returns how a
    server that this worker started has ended, if one has. ``publish_failure``, ``poll_failure`` and
    ``attribute_failure`` exchange the reasons of failures between workers.

    Attributes:
        sent: bytes of payloads by mailbox and class; any thread may copy it.
        received: likewise, by the requested class.
    """

    check_s = 0.1
    closed = "the connection to the servers is closed"

    def __init__(
        self,
        mailbox: Mailbox,
        servers: Sequence[int],
        *,
        me: str,
        name: Callable[[int], str],
        timeout: float,
        order: Order = Order.READY,
        check_servers: Callable[[], str | None] = lambda: None,
        publish_failure: Callable[[str], None] = lambda _: None,
        poll_failure: Callable[[], str | None] = lambda: None,
        attribute_failure: Callable[[], str | None] = lambda: None,
        on_abandoned: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(mailbox, MESSAGES, me, "wingbeat-client", clock=clock, close_s=timeout)
        self._servers, self._name, self._timeout = tuple(servers), name, timeout
        self._check_servers, self._on_abandoned = check_servers, on_abandoned
        self._publish_failure, self._poll_failure = publish_failure, poll_failure
        self._attribute_failure = attribute_failure
        self._queue: SendQueue[tuple[Request, Transfer]] = SendQueue(order)
        self._awaited: dict[tuple[int, ...], tuple[Request, Transfer]] = {}
        self._one_way: list[Request] = []
        self._pinger, self._ping_delay = Pinger(mailbox), ping_delay(timeout)
        self._pinged_at = 0.0
        self._progress_at = self._logged_at = clock()
        self._abandoned = False
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()

    def request(
        self,
        kind: Kind,
        dtype: str,
        transfers: Iterable[Transfer],
        description: str,
        on_complete: Callable[[], None] = lambda: None,
    ) -> Request:
        """Submit a request without blocking; PeerError if a server or worker has failed before."""
        request = Request(kind, dtype, tuple(transfers), description, on_complete)
        return self.submit(functools.partial(self._begin, request), request)

    @property
    def refused(self) -> Counter[str]:
        """Number of refused frames and connections, by reason; any thread may read it."""
        return self.mailbox.refused + self.mailbox.refused_connections

    def abandon(self) -> None:
        """As `Actor.abandon`; then the thread ends what else belongs to this client."""
        self._abandoned = True
        super().abandon()

    # -- the thread -----------------------------------------------------------------------

    def run(self, parent: Callable[[], bool] = lambda: True) -> None:
        """Serve until `close`; pushed gradients are delivered first, as other workers need them."""
        try:
            super().run(parent)
        finally:
            if self._abandoned:
                self._on_abandoned()

    def describe(self, error: PeerError) -> PeerError:
        """Attribute a failure to the worker that failed first, and publish it."""
        if (cause := self._attribute_failure()) is not None:
            noticed = str(error).removeprefix(f"{self.me}: ")
            error = PeerError(f"{self.me}: {cause} (noticed as: {noticed})")
        self._publish_failure(str(error).removeprefix(f"{self.me}: "))
        return error

    def busy(self) -> bool:
        """Whether a request is not yet in the mailbox."""
        return self._queue.queued > 0

    def work(self) -> None:
        """Send what windows allow, and complete requests without a reply."""
        if self._queue.queued:
            self._queue.flush(functools.partial(room_of, self.mailbox), self._post)
        for request in list(self._one_way):
            sent = len(request.posted) == len(request.transfers)
            if sent and all(posted.arrived for posted in request.posted):
                self._one_way.remove(request)
                request.set_result(None)

    def _begin(self, request: Request) -> None:
        self._progress_at = self.clock()
        if not request.transfers:
            request.set_result(None)
            return
        empty, reply = request.kind in _WITHOUT_PAYLOAD, _REPLY_TO.get(request.kind)
        for transfer in request.transfers:
            if reply is not None:
                key = reply, *transfer.ids[:3]
                self._awaited[key] = request, transfer
            if request.kind is Kind.EXPECT:
                continue
            nbytes = MAX_HEADER_BYTES
            if not empty:
                form = transfer.format
                nbytes += len(transfer.memory) if form is None else form.nbytes
            # Servers with an optimizer depend on the order of requests, so these use one link.
            link = 0 if request.kind in UPDATE_KINDS else transfer.link
            flow = Flow(transfer.server, 0 if empty else transfer.urgency, link)
            self._queue.enqueue(flow, transfer.position, nbytes, (request, transfer))
        if request.kind in ONE_WAY_KINDS:
            self._one_way.append(request)

    def _post(self, flow: Flow, item: tuple[Request, Transfer]) -> Callable[[], bool]:
        request, transfer = item
        payload, dtype = transfer.memory, request.dtype
        if request.kind in _WITHOUT_PAYLOAD:
            payload, dtype = memoryview(b""), ""
        elif transfer.format is not None:
            payload, dtype = transfer.format.encode(), transfer.format.dtype
        posted = self.mailbox.post(
            flow.peer,
            request.kind,
            payload,
            ids=transfer.ids,
            dtype=dtype,
            interface=flow.interface(self.mailbox),
            urgency=flow.urgency,
        )
        self.sent[flow.peer, flow.urgency] += payload.nbytes
        if request.kind in ONE_WAY_KINDS:
            request.posted.append(posted)
        return posted.done

    def refuse(self, message: Message, error: MalformedMessage) -> None:
        """Raise PeerError: the reply of a server will not come."""
        server = self._name(message.peer)
        raise PeerError(f"{self.me}: {server} sent a malformed message: {error}")

    def handle(self, message: Message, record: Ids) -> None:
        """Write a reply to its slice; PeerError if it is unexpected or reports a failure."""
        server = self._name(message.peer)
        if message.kind == Kind.FAILED:
            raise PeerError(f"{self.me}: {server}: {printable(bytes(message.payload))}")
        if message.kind == Kind.PING:
            return
        kind = Kind.STATE if message.kind == Kind.CONTINUATION else message.kind
        key = kind, *record[:3]
        found = self._awaited.get(key)
        if found is None:
            raise PeerError(f"{self.me}: {server} sent an unexpected message: {message!r}")
        request, transfer = found
        self._progress_at = self.clock()
        self.received[message.peer, urgency_of(transfer.ids.route)] += len(message.payload)
        if kind == Kind.STATE:
            if not self._append_state(message, request, transfer):
                return
        elif not transfer.write(message, request.dtype):
            raise PeerError(
                f"{self.me}: {server} sent a malformed reply for slice {record.slice}: "
                f"{len(message.payload)} bytes of {message.dtype or 'nothing'}"
            )
        del self._awaited[key]
        request.missing -= 1
        if not request.missing:
            request.on_complete()
            request.set_result(None)

    def _append_state(self, message: Message, request: Request, transfer: Transfer) -> bool:
        """Append to the received optimizer state; return whether it is complete."""
        key = transfer.ids[:3]
        try:
            if message.peer != transfer.server:
                raise RequestError("another server has this slice")
            if message.kind == Kind.STATE:
                request.documents[key] = Document(message.payload, _MAX_STATE_BYTES)
            else:
                request.documents[key].append(message.payload)
        except (RequestError, KeyError) as error:
            server = self._name(message.peer)
            raise PeerError(f"{self.me}: {server} sent a malformed state: {error}") from None
        return request.documents[key].complete

    def check(self, now: float) -> None:
        """Raise PeerError if a server or a worker has failed; ping servers that send nothing."""
        ended = self._check_servers()
        if ended is not None:
            raise PeerError(f"{self.me}: {ended}")
        busy = bool(self._awaited or self._one_way or self._queue.queued)
        for server, gone in self.gone.items():
            if gone.how is not Failure.LEFT:
                raise PeerError(f"{self.me}: {self._name(server)} {gone.text}")
            if busy:
                raise PeerError(
                    f"{self.me}: {self._name(server)} has ended; start the job again from a "
                    "checkpoint"
                )
        if not busy:
            return
        if now - max(self._progress_at, self._pinged_at) > self._ping_delay:
            self._pinged_at = now
            reason = self._poll_failure()
            if reason is not None:
                raise PeerError(f"{self.me}: {reason}")
            for server, link in {(each.server, each.link) for _, each in self._awaited.values()}:
                self._pinger.ping(server, [link])
        self._check_progress(now)

    def _check_progress(self, now: float) -> None:
        waited = now - self._progress_at
        if now - max(self._progress_at, self._logged_at) >= LOG_INTERVAL_S:
            self._logged_at = now
            text = "%s: waiting for gradients of other workers for %d s; the servers are alive"
            log.warning(text, self.me, waited)
        limit = MAX_WAIT_FACTOR * self._timeout
        if waited > limit:
            awaited = self._awaited.values()
            late = sorted({transfer.server for _, transfer in awaited}) or self._servers
            what = next((request.description for request, _ in awaited), "gradients")
            raise PeerError(
                f"{self.me}: no sum of {what} from {', '.join(map(self._name, late))} within "
                f"{limit:g} s: check that it and all workers run, or "
                "increase the timeout: wingbeat.init(timeout=...)"
            )
