"""All flows of one process: frames in, messages out. No I/O; callers pass time and send function.

Every frame is checked before its contents are used. Frames that no member of the job sent are
counted by reason and dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport.messages.frames import (
    DTYPES,
    MAX_CLASSES,
    MAX_HEADER_BYTES,
    NEVER,
    Arrival,
    Buffer,
    ConnectionId,
    Flow,
    Header,
    Malformed,
    Posted,
    Type,
    unpack,
)

MAX_INLINE_BYTES = _native.MOST_INLINE
"""Maximum bytes of a payload in one part with the header, where a copy is faster."""

# Stored as integers: access to an enum member is slow.
_DATA, _HELLO = int(Type.DATA), int(Type.HELLO)

Send: TypeAlias = "Callable[[ConnectionId, list[Buffer]], bool]"
"""Passes a frame to the carrier; False if there is no connection."""


class Route(NamedTuple):
    """The route of a flow: the peer, this process's interface, and the class."""

    peer: int
    interface: int
    urgency: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of messages in flight.

    Raises:
        UsageError: an invalid limit.

    Attributes:
        message: bytes of one payload.
        window: bytes of one flow that its peer has not consumed; headers count.
        silence: seconds without a sign of life from an awaited peer after which it is lost.
    """

    message: int = 4 << 20
    window: int = 32 << 20
    silence: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.message < 2**31:
            raise UsageError(f"Limits(message={self.message!r}); allowed: 1 to 2**31 - 1 bytes")
        if self.window < self.message + MAX_HEADER_BYTES:
            raise UsageError(
                f"Limits(window={self.window!r}); allowed: {MAX_HEADER_BYTES} bytes and more above "
                f"message={self.message}, so that one message fits in"
            )
        if not 0 < self.silence < float("inf"):
            raise UsageError(f"Limits(silence={self.silence!r}); allowed are seconds above 0")


@dataclass(frozen=True, slots=True)
class Membership:
    """This process and its peers.

    ``session`` is a random number drawn at the start of this process, known to members only;
    ``sessions`` are those of the peers, by number.
    """

    number: int
    session: int
    sessions: Mapping[int, int]


class Message:
    """A received message.

    Attributes:
        payload: the memory that the network wrote to, without another copy.
        route: the route of its flow.
        size: bytes that it occupies in the window.
        kept: whether it was taken but still counts against the window.
    """

    __slots__ = ("_header", "kept", "payload", "route", "size")

    def __init__(self, header: Header, payload: memoryview, route: Route) -> None:
        self._header = header
        self.payload = payload
        self.route = route
        self.size = header.frame_bytes
        self.kept = False

    @property
    def peer(self) -> int:
        """The sender."""
        return self.route.peer

    @property
    def kind(self) -> int:
        """The kind, defined by the application."""
        return self._header.kind

    @property
    def ids(self) -> tuple[int, int, int, int]:
        """Four numbers whose meaning depends on the kind."""
        return self._header.ids

    @property
    def dtype(self) -> str:
        """Dtype of the payload, or empty."""
        return DTYPES[self._header.dtype]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, length) pairs, in elements of the dtype."""
        return self._header.spans

    def __repr__(self) -> str:
        return (
            f"Message(peer={self.peer}, kind={self.kind}, ids={self.ids}, "
            f"{len(self.payload)} bytes)"
        )


class Endpoint:
    """The flows of one process, and its received messages.

    With ``tolerate_silence``, a silent peer does not count as lost. ``refused`` counts dropped
    frames by reason. ``lost`` explains each silent peer; a frame of the peer removes it. ``left``
    are peers that have shut down gracefully. ``waiting`` is the number of messages ready to be
    taken. ``down`` is the time at which the connection of a flow was lost.
    """

    def __init__(
        self,
        membership: Membership,
        limits: Limits,
        *,
        tolerate_silence: bool = False,
        describe_interface: Callable[[int], str] = "interface {}".format,
    ) -> None:
        self.membership = membership
        self.limits, self.describe_interface = limits, describe_interface
        self._sessions, self._forgiving = dict(membership.sessions), tolerate_silence
        self.flows: dict[Route, Flow] = {}
        self.refused: Counter[str] = Counter()
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.waiting = 0
        self.down: dict[Route, float] = {}
        self._inbox: tuple[deque[Message], ...] = tuple(deque() for _ in range(MAX_CLASSES))
        self._place: dict[Route, ConnectionId] = {}
        self._former: dict[Route, ConnectionId] = {}
        self._route: dict[ConnectionId, Route] = {}
        self._busy: dict[Route, None] = {}
        self._next = NEVER

    def add(self, route: Route, place: ConnectionId | None, now: float) -> None:
        """Add a flow; ``place`` is None if the peer will connect and send HELLO."""
        own = self.membership
        self.flows[route] = Flow(
            own.session,
            own.number,
            self._sessions[route.peer],
            route.peer,
            self.limits.window,
            NEVER if self._forgiving else self.limits.silence,
        )
        if place is not None:
            self._bind(route, place)
            self._send_hello(route, now)

    def remove_peer(self, peer: int) -> None:
        """Remove all state of a peer whose process has exited."""
        for route in [route for route in self.flows if route.peer == peer]:
            for places in (self._place, self._former):
                if route in places:
                    self._route.pop(places.pop(route), None)
            self._busy.pop(route, None)
            self.down.pop(route, None)
            del self.flows[route]
        for waiting in self._inbox:
            for message in [message for message in waiting if message.peer == peer]:
                waiting.remove(message)
                self.waiting -= 1
        self.lost.pop(peer, None)
        self.left.discard(peer)
        self._sessions.pop(peer, None)

    def add_peer(self, peer: int, session: int) -> None:
        """Register a new peer, before its flows are added."""
        self._sessions[peer] = session

    def post(self, route: Route, message: Posted, send: Send, now: float) -> None:
        """Send a message as soon as possible; the caller has checked the window."""
        flow = self.flows[route]
        flow.post(message, now)
        self._flush(route, flow, send, now)

    def accept(self, arrival: Arrival, now: float) -> None:
        """Check and process a frame; count it if it is malformed."""
        try:
            self._accept(arrival, now)
        except Malformed as err:
            self.refused[str(err)] += 1

    def take(
        self, now: float, of: frozenset[int] | None = None, *, keep: bool = False
    ) -> Message | None:
        """Return the oldest message of the most urgent class that has one, or None.

        Only messages of the peers ``of`` count, if given. With ``keep``, the message counts against
        the window until `free`.
        """
        for waiting in self._inbox:
            if not waiting:
                continue
            if of is None:
                message = waiting.popleft()
            else:
                found = next((m for m in waiting if m.peer in of), None)
                if found is None:
                    continue
                message = found
                waiting.remove(message)
            self.waiting -= 1
            message.kept = True
            if not keep:
                self.free(message, now)
            return message
        return None

    def free(self, message: Message, now: float) -> None:
        """Return a taken message's bytes to the sender's window, once."""
        if message.kept:
            message.kept = False
            flow = self.flows[message.route]
            flow.take(message.size, now)
            self._schedule(flow)

    def flush(self, send: Send, now: float) -> None:
        """Send pending frames; frames that ``send`` refuses wait for the peer."""
        for route in list(self._busy):
            del self._busy[route]
            self._flush(route, self.flows[route], send, now)

    def _flush(self, route: Route, flow: Flow, send: Send, now: float) -> None:
        place = self._place.get(route)
        if place is None:
            return
        flow.flush(send, place, now)
        if not flow.up:
            self.down.setdefault(route, now)
        self._schedule(flow)

    def probe_connections(self, now: float) -> None:
        """Queue a frame to every peer, so that `flush` detects lost connections: `down`."""
        for route, flow in self.flows.items():
            if flow.met and flow.up and route.peer not in self.left:
                self._send_hello(route, now)

    def check_connections(self, cut: Callable[[ConnectionId], bool], now: float) -> None:
        """Record flows whose connection has ended without an error of `send`: `down`."""
        for route, place in self._place.items():
            if cut(place):
                self.down.setdefault(route, now)
            elif self.flows[route].up:
                self.down.pop(route, None)

    def unconnected(self, now: float) -> dict[int, float]:
        """Return, for each peer whose flows are all `down`, the seconds since then."""
        since: dict[int, float] = {}
        for route in self.flows.keys() if self.down else ():
            down = self.down.get(route, NEVER)
            since[route.peer] = max(down, since.get(route.peer, down))
        return {
            peer: now - down
            for peer, down in since.items()
            if down < NEVER and peer not in self.left
        }

    def due(self) -> float:
        """Time by which to call `tick` if nothing arrives before."""
        return self._next

    def resume(self, now: float) -> None:
        """Ignore silence of peers before ``now``: this process was suspended until then."""
        for flow in self.flows.values():
            flow.resume(now)

    def tick(self, now: float) -> None:
        """Run timers: requests, acknowledgements, and detection of lost peers."""
        if now < self._next:
            return
        self._next = NEVER
        for route, flow in self.flows.items():
            if route.peer in self.lost:
                continue
            # A peer that has left still needs the acknowledgement of its last message.
            if route.peer not in self.left and flow.tick(now):
                self._lose(route, flow)
                continue
            if flow.up and (flow.pending or flow.tell_at <= now):
                self._busy[route] = None
            # Nothing is due for a peer that has left and disconnected.
            ack_at = flow.tell_at if flow.up else NEVER
            due = ack_at if route.peer in self.left else flow.due
            self._next = min(self._next, max(due, now))

    def acknowledge(self, now: float) -> None:
        """Queue acknowledgements at once, because this process shuts down."""
        for route, flow in self.flows.items():
            if flow.up and flow.tell(now):
                self._busy[route] = None

    @property
    def busy(self) -> bool:
        """Whether `flush` has something to send."""
        return bool(self._busy)

    @property
    def unheard(self) -> list[Route]:
        """Flows from whose peer no frame has arrived."""
        return [route for route, flow in self.flows.items() if not flow.met]

    def _accept(self, arrival: Arrival, now: float) -> None:
        route = self._route.get(arrival.place)
        if not arrival.whole:
            raise Malformed("parts")
        if not len(arrival.head) and arrival.payload is None:
            if route is not None:  # the peer accepted a connection and cannot identify it yet
                self._send_hello(route, now)
            return
        header = unpack(arrival.head)
        if route is None or not self.flows[route].names(header):
            self._check_sender(header, arrival)
            route = self._route_of_new(route, header, arrival.place)
        payload = _payload(header, arrival)
        self.lost.pop(route.peer, None)  # it was stopped or cut off, and has recovered
        flow, kind = self.flows[route], header.type
        renewed = kind == _HELLO and self._place.get(route) != arrival.place
        if flow.accept(header, now, renewed):
            if kind == _DATA:
                self._inbox[route.urgency].append(Message(header, payload, route))
                self.waiting += 1
            else:
                flow.take(header.frame_bytes, now)
                if all(f.ended for r, f in self.flows.items() if r.peer == route.peer):
                    self.left.add(route.peer)
        if kind == _HELLO:
            self._bind(route, arrival.place)
        if self.down and flow.up:
            self.down.pop(route, None)
        self._update_timer(route, flow)

    def _check_sender(self, header: Header, arrival: Arrival) -> None:
        own = self.membership
        if header.receiver != own.number or header.sender not in self._sessions:
            raise Malformed("address")
        if header.session != self._sessions[header.sender]:
            raise Malformed("session")
        if arrival.peer is not None and arrival.peer != header.sender:
            raise Malformed("key")

    def _route_of_new(self, known: Route | None, header: Header, place: ConnectionId) -> Route:
        """Return the flow named by the first frame of a new connection."""
        if known is not None:
            raise Malformed("key")  # a member that claims to be another one
        route = Route(header.sender, place.interface, place.urgency)
        if header.type != _HELLO or route not in self.flows:
            raise Malformed("stranger")
        return route

    def _bind(self, route: Route, place: ConnectionId) -> None:
        if self._place.get(route) == place:
            return
        # Late frames of the former connection are still the peer's.
        self._route.pop(self._former.pop(route, place), None)
        if route in self._place:
            self._former[route] = self._place[route]
        self._place[route], self._route[place] = place, route

    def _send_hello(self, route: Route, now: float) -> None:
        flow = self.flows[route]
        flow.hello(now)
        self._update_timer(route, flow)

    def _update_timer(self, route: Route, flow: Flow) -> None:
        if flow.pending and flow.up:
            self._busy[route] = None
        self._schedule(flow)

    def _schedule(self, flow: Flow) -> None:
        due = flow.due
        if due < self._next:
            self._next = due

    def _lose(self, route: Route, flow: Flow) -> None:
        several = len({each.interface for each in self.flows if each.peer == route.peer}) > 1
        where = f" over {self.describe_interface(route.interface)}" if several else ""
        self.lost[route.peer] = (
            f"has been silent{where} for {self.limits.silence:g} s; {flow.unarrived} messages to "
            f"it ({flow.waiting_bytes} bytes) may not have arrived"
        )


def _payload(header: Header, arrival: Arrival) -> memoryview:
    size = header.size
    if arrival.payload is None:
        payload = memoryview(arrival.head)[size:]
    else:
        payload = memoryview(arrival.payload)
        if len(arrival.head) != size:
            raise Malformed("length")
    if len(payload) != header.length:
        raise Malformed("length")
    return payload
