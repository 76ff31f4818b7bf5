"""What workers and parameter servers share: messages, the order of sending, and pings.

A message has a `Kind`, four integers (`Ids`), a dtype and a payload. Settings and optimizer state
are sent as a `Document`. `coding` has the payload of an encoded slice.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import heapq
import itertools
import json
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

from wingbeat import schema
from wingbeat.errors import PeerError
from wingbeat.schema import MalformedMessage, Messages, Range, Text, Word, from_json, parse_json
from wingbeat.transport.messages.frames import Reassembly

if TYPE_CHECKING:
    from wingbeat.transport.messages.frames import Posted
    from wingbeat.transport.messages.mailbox import Mailbox

MAX_REASON = 500
"""Maximum size of a failure's reason, in bytes."""


class RequestError(Exception):
    """A server cannot perform a request. The text names the sender and the reason."""


@contextlib.contextmanager
def sent_by(sender: str) -> Iterator[None]:
    """Name the sender in the `RequestError` of a request."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{sender}: {error}") from None


class Kind(schema.Kind):
    """Kinds of messages: from a worker to a server, unless the meaning states otherwise."""

    PUSH_PULL = 1, "gradients of a slice; the server replies with the sum"
    PUSH = 2, "gradients of a slice; the server keeps the sum until it is pulled"
    PULL = 3, "requests the sum of a slice"
    SUM = 4, "server to worker: the sum of a slice over all workers"
    FAILED = 5, "server to worker: it has failed, for this reason (in UTF-8)"
    PULL_RESIDUAL = 6, "requests the encoding residual of a slice's sums, up to this round"
    RESIDUAL = 7, "server to worker: it in float32, or empty; the server drops it"
    # Only for servers that run the optimizer. A worker sends these in one flow, so they stay in
    # order.
    LOAD = 8, "parameters of a slice, and optionally optimizer state, as a document"
    CONTINUATION = 9, "either way: the next fragment of the sender's last document"
    BARRIER = 10, "all documents of this worker are sent; servers wait for all workers"
    GRADIENTS = 11, "gradients of a slice that replace the sum in the next update"
    STEP = 12, "update all slices, with these settings"
    FETCH = 13, "requests the parameters of a slice after the next update"
    PARAMETERS = 14, "server to worker: the parameters of a slice"
    STATE = 15, "requests the optimizer state of a slice; the reply is a document"
    EXPECT = 16, "never sent: a worker expects parameters that a `STEP` has requested"
    PING = 17, "either way: no content; delivery shows that the network interface works"


UPDATE_KINDS = frozenset(
    {Kind.LOAD, Kind.CONTINUATION, Kind.BARRIER, Kind.GRADIENTS, Kind.STEP, Kind.FETCH, Kind.STATE}
)
"""Requests to servers that run the optimizer."""

ONE_WAY_KINDS = UPDATE_KINDS - {Kind.FETCH, Kind.STATE} | {Kind.PUSH}
"""Requests without a reply."""

NO_ROUND = 2**32 - 1
"""Round number of a `Kind.STEP` that uses the gradients of `Kind.GRADIENTS` and no sum."""


class Ids(NamedTuple):
    """The integers of a message about a slice.

    Attributes:
        plan: number of the bucketing.
        slice: number of the slice within the plan. In a `STEP`: the round whose sums are used.
        round: number of earlier sums of the slice; for parameters, number of updates.
        route: class, link and position of the reply, see `pack_route`. In a `STEP`: 1 if the server
            sends the parameters without a request.
    """

    plan: Word
    slice: Word
    round: Word
    route: Word


WITHOUT_PAYLOAD = frozenset(
    {Kind.PULL, Kind.PULL_RESIDUAL, Kind.BARRIER, Kind.FETCH, Kind.EXPECT, Kind.PING}
)

MESSAGES = Messages(dict.fromkeys(set(Kind) - {Kind.EXPECT}, Ids), set(Kind) - WITHOUT_PAYLOAD)
"""A request of `Kind.STATE` has no payload either, but its reply has."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The payload of a `STEP`.

    Attributes:
        digest: of the settings of the sender's param groups; empty if it follows another worker.
        groups: settings of the param groups, see `json_values.encode`; of the leading worker only.
        used: slots of the parameters with a gradient on some worker, see `pack_numbers`.
        scaler: what a gradient scaler has set on the optimizer.
    """

    digest: Annotated[str, Text(64)]
    groups: list[dict[str, Any]] | None = None
    used: str = "0"
    scaler: dict[str, Any] = field(default_factory=dict)


_POSITIONS = 1 << 24
_CLASSES = 1 << 4

MAX_LINKS = 1 << 4
"""Maximum number of links among which slices are divided."""


def pack_route(urgency: int, position: int, link: int = 0) -> int:
    """Pack the traffic class and link of a reply, and the bucket's position in forward order."""
    return link << 28 | urgency << 24 | min(position, _POSITIONS - 1)


def link_of(route: int) -> int:
    """Return the link that a reply uses, see `interface_of`."""
    return route >> 28


def urgency_of(route: int) -> int:
    """Return the traffic class of a reply; 0 is the most urgent."""
    return route >> 24 & _CLASSES - 1


def position_of(route: int) -> int:
    """Return the bucket's position in forward order."""
    return route & _POSITIONS - 1


def interface_of(reachable: Sequence[int], link: int) -> int:
    """Return the local interface of a link to a peer.

    Both ends number their interfaces in the order of networks, so a link is the same network on
    both. ``reachable`` are the local interfaces that reach the peer, in order. There may be fewer
    than links, to a process of the same host or if not all networks connect all hosts.
    """
    return reachable[link % len(reachable)]


# -- documents -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DocumentSize:
    """A field of every document.

    Attributes:
        nbytes: bytes of the arrays that follow.
    """

    nbytes: Annotated[int, Range(0, 1 << 48, "bytes")]


def split_document(
    fields: dict[str, Any], arrays: Sequence[memoryview], largest: int
) -> Iterator[Any]:
    """Yield the payloads of a document: the fields in JSON, then the arrays in fragments."""
    yield json.dumps({**fields, "nbytes": sum(map(len, arrays))}).encode()
    for array in arrays:
        for start in range(0, len(array), largest):
            yield array[start : start + largest]


class Document(Reassembly):
    """A document, assembled from its messages."""

    def __init__(self, payload: Any, max_nbytes: int) -> None:
        try:
            self.fields: dict[str, Any] = parse_json(dict[str, Any], payload, "document")
            nbytes = from_json(DocumentSize, self.fields, "document").nbytes
        except MalformedMessage as error:
            raise RequestError(f"malformed document: {error}") from None
        if nbytes > max_nbytes:
            raise RequestError(f"a document of {nbytes} bytes; {max_nbytes} bytes are free")
        super().__init__(nbytes)

    def append(self, fragment: Any) -> None:
        """Append the next fragment, see `Reassembly.append`."""
        try:
            super().append(fragment)
        except ValueError as error:
            raise RequestError(str(error)) from None


def pack_numbers(numbers: Iterable[int]) -> str:
    """Encode a set of integers as a bit mask in hexadecimal."""
    return f"{sum(1 << number for number in set(numbers)):x}"


def unpack_numbers(bits: str) -> frozenset[int]:
    """Return the set of integers of a bit mask in hexadecimal."""
    try:
        digits = f"{int(bits, 16):b}"
    except ValueError:
        raise RequestError(f"malformed parameters of a step: {bits[:40]!r}") from None
    return frozenset(place for place, bit in enumerate(reversed(digits)) if bit == "1")


# -- the order of sending ------------------------------------------------------------------

Item = TypeVar("Item")

MAX_IN_FLIGHT = 1 << 20
"""Maximum bytes in flight per flow with `Order.URGENT`, because no message overtakes one in flight.
"""


class Order(enum.Enum):
    """The order in which a sender sends. The baselines of Geryon differ only here."""

    READY = "ready"
    """Geryon: a flow is first in, first out, and the network enforces priorities."""
    URGENT = "urgent"
    """P3: the sender has a priority queue, and few bytes in flight."""
    FORWARD = "forward"
    """TICTAC: messages are sent in a global order."""


class Flow(NamedTuple):
    """Destination, traffic class and link: the paper's local ID in ``channel_table``."""

    peer: int
    urgency: int
    link: int = 0

    def interface(self, mailbox: Mailbox) -> int:
        """Return the local interface of this flow."""
        return interface_of(mailbox.interfaces(self.peer), self.link)


def room_of(mailbox: Mailbox, flow: Flow) -> int:
    """Return the bytes that a flow accepts now."""
    interface = flow.interface(mailbox)
    return mailbox.room(flow.peer, interface=interface, urgency=flow.urgency)


@dataclass(slots=True)
class _FlowQueue:
    flow: Flow
    rank: tuple[int, int, int]  # sort key among the queues; the most urgent class first
    queued: Any  # a deque of (bytes, item), or a heap of (position, counter, bytes, item)
    in_flight: deque[tuple[int, Callable[[], bool]]] = field(default_factory=deque)
    in_flight_bytes: int = 0


_RANK = operator.attrgetter("rank")


class SendQueue(Generic[Item]):
    """A queue for each flow; ``max_in_flight`` bytes per flow apply with `Order.URGENT`."""

    def __init__(self, order: Order = Order.READY, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._urgent = order is Order.URGENT
        self._max_in_flight = max_in_flight
        self._queues: dict[Flow, _FlowQueue] = {}
        self._busy: list[_FlowQueue] = []  # queues with messages, by rank
        self._count = itertools.count()
        self.queued = 0

    def enqueue(self, flow: Flow, position: int, nbytes: int, item: Item) -> None:
        """Add a message; ``position`` is its bucket's position in forward order."""
        queue = self._queues.get(flow)
        if queue is None:
            queued: Any = [] if self._urgent else deque()
            queue = _FlowQueue(flow, (flow.urgency, flow.peer, flow.link), queued)
            self._queues[flow] = queue
        if not queue.queued:
            bisect.insort(self._busy, queue, key=_RANK)
        if self._urgent:
            heapq.heappush(queue.queued, (position, next(self._count), nbytes, item))
        else:
            queue.queued.append((nbytes, item))
        self.queued += 1

    def flush(
        self,
        room: Callable[[Flow], int],
        send: Callable[[Flow, Item], Callable[[], bool]],
        ready: Callable[[Item], bool] = lambda _: True,
    ) -> None:
        """Send messages, the most urgent class first.

        ``room`` returns the bytes that a flow accepts now. ``send`` sends a message, and returns a
        function that returns whether it has arrived. A message that is not ``ready`` blocks those
        behind it, which happens only with `Order.FORWARD`.
        """
        emptied = False
        for queue in self._busy:
            queued, flow = queue.queued, queue.flow
            while queued and (not self._urgent or self._has_credit(queue)):
                nbytes, item = queued[0][-2:]
                if room(flow) < nbytes or not ready(item):
                    break
                self.queued -= 1
                if self._urgent:
                    heapq.heappop(queued)
                    queue.in_flight.append((nbytes, send(flow, item)))
                    queue.in_flight_bytes += nbytes
                else:
                    queued.popleft()
                    send(flow, item)
            emptied |= not queued
        if emptied:
            self._busy = [queue for queue in self._busy if queue.queued]

    def _has_credit(self, queue: _FlowQueue) -> bool:
        """Drop messages that have arrived; return whether more may be in flight."""
        while queue.in_flight and queue.in_flight[0][1]():
            queue.in_flight_bytes -= queue.in_flight.popleft()[0]
        return queue.in_flight_bytes < self._max_in_flight


# -- lost peers ----------------------------------------------------------------------------

_PING_AFTER_S, _PING_AFTER_PART = 0.5, 0.05


def ping_delay(timeout: float) -> float:
    """Return the seconds of silence after which peers are pinged.

    An undelivered ping is then detected before any wait times out, see `server.SILENT`.

    >>> ping_delay(300.0), ping_delay(4.0)
    (0.5, 0.2)
    """
    return min(_PING_AFTER_S, _PING_AFTER_PART * timeout)


class Pinger:
    """Pings peers, with at most one ping in flight per peer and interface.

    Only the sender sees packet loss on a network interface, so a process that waits for a message
    pings its peers: an undelivered ping reports the interface.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._in_flight: dict[tuple[int, int], Posted] = {}

    def ping(self, peer: int, links: Iterable[int]) -> None:
        """Ping a peer over each of these links, unless the previous ping is still in flight."""
        reachable = self._mailbox.interfaces(peer)
        for interface in sorted({interface_of(reachable, link) for link in links}):
            last = self._in_flight.get((peer, interface))
            if last is not None and not last.arrived:
                continue
            # The mailbox itself reports a lost peer or a full window.
            with contextlib.suppress(PeerError):
                self._in_flight[peer, interface] = self._mailbox.post(
                    peer, Kind.PING, interface=interface, urgency=0, seconds=0.0
                )


def printable(text: bytes) -> str:
    """Return a received reason as one printable line."""
    return schema.printable(text[:MAX_REASON].decode(errors="replace"))
