"""All flows of one process: frames in, messages out. Pure; time and who sends are given.

Every frame is checked before anything of it is used, and whatever no member of the job has sent is
counted under its reason and dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport.messages.carrier import CLASSES, Arrival, Buffer, Place
from wingbeat.transport.messages.frames import (
    DTYPES,
    LARGEST,
    NEVER,
    Flow,
    Header,
    Malformed,
    Posted,
    Type,
    unpack,
)

INLINE = _native.MOST_INLINE
"""Bytes up to which a payload travels in one piece with its header: a copy is cheaper there."""

# Looked up once: an enum's members take longer to find than a number.
_DATA, _HELLO = int(Type.DATA), int(Type.HELLO)

Send: TypeAlias = "Callable[[Place, list[Buffer]], bool]"
"""Hands a frame to the carrier; False if nobody is there."""


class Route(NamedTuple):
    """Where a flow goes: which peer, over which of this process's interfaces, in which class."""

    peer: int
    interface: int
    urgency: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be under way.

    Raises:
        UsageError: a limit that cannot work.

    Attributes:
        message: bytes of one payload.
        window: bytes that one flow may hold which its peer has not taken; headers count.
        silence: seconds without a sign of a peer, while something waits for it, after which it is
            lost.
    """

    message: int = 4 << 20
    window: int = 32 << 20
    silence: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.message < 2**31:
            raise UsageError(f"Limits(message={self.message!r}); allowed: 1 to 2**31 - 1 bytes")
        if self.window < self.message + LARGEST:
            raise UsageError(
                f"Limits(window={self.window!r}); allowed: {LARGEST} bytes and more above "
                f"message={self.message}, so that one message fits in"
            )
        if not 0 < self.silence < float("inf"):
            raise UsageError(f"Limits(silence={self.silence!r}); allowed are seconds above 0")


@dataclass(frozen=True, slots=True)
class Membership:
    """Who this process is, and who its peers are.

    Attributes:
        number: of this process.
        session: drawn when this process started; only members know it.
        sessions: those of the peers, by number.
    """

    number: int
    session: int
    sessions: Mapping[int, int]


class Message:
    """A message as it has arrived.

    Attributes:
        payload: the memory that the network wrote to, without another copy.
        route: over which flow it came.
        size: bytes that it takes of the window.
        kept: whether it was taken, but still counts against the window.
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
        """Who has sent it."""
        return self.route.peer

    @property
    def kind(self) -> int:
        """What it is, as its users number it."""
        return self._header.kind

    @property
    def ids(self) -> tuple[int, int, int, int]:
        """Four numbers that mean what the kind says."""
        return self._header.ids

    @property
    def dtype(self) -> str:
        """What the payload consists of, or empty."""
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
    """The flows of one process, and the messages that wait to be taken.

    Args:
        membership: who takes part.
        limits: of what is under way.
        forgiving: whether a peer is not lost when it falls silent on an interface.
        card: what messages call an own interface of that number.

    Attributes:
        refused: how many frames were dropped, by the reason.
        lost: what to say of peers that have fallen silent; a peer that is heard again is not lost.
        left: the peers that have ended in an orderly way.
        waiting: how many messages there are to be taken.
        down: since when nobody is connected at the end of a flow.
    """

    def __init__(
        self,
        membership: Membership,
        limits: Limits,
        *,
        forgiving: bool = False,
        card: Callable[[int], str] = "interface {}".format,
    ) -> None:
        self.membership = membership
        self.limits, self.card = limits, card
        self._sessions, self._forgiving = dict(membership.sessions), forgiving
        self.flows: dict[Route, Flow] = {}
        self.refused: Counter[str] = Counter()
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.waiting = 0
        self.down: dict[Route, float] = {}
        self._inbox: tuple[deque[Message], ...] = tuple(deque() for _ in range(CLASSES))
        self._place: dict[Route, Place] = {}
        self._former: dict[Route, Place] = {}
        self._route: dict[Place, Route] = {}
        self._busy: dict[Route, None] = {}
        self._next = NEVER

    def add(self, route: Route, place: Place | None, now: float) -> None:
        """Add a flow; ``place`` is None if the peer will connect, and says so with HELLO."""
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
            self._introduce_self(route, now)

    def forget(self, peer: int) -> None:
        """Forget all of a peer whose process has ended."""
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

    def know(self, peer: int, session: int) -> None:
        """Take a new peer for a member; its flows are added next."""
        self._sessions[peer] = session

    def post(self, route: Route, message: Posted, send: Send, now: float) -> None:
        """Send a message as soon as may be; the caller has looked whether there is room."""
        flow = self.flows[route]
        flow.post(message, now)
        self._flush(route, flow, send, now)

    def accept(self, arrival: Arrival, now: float) -> None:
        """Check a frame and do what it says; whatever is wrong with it is counted."""
        try:
            self._accept(arrival, now)
        except Malformed as err:
            self.refused[str(err)] += 1

    def take(
        self, now: float, of: frozenset[int] | None = None, *, keep: bool = False
    ) -> Message | None:
        """Return the oldest message of the most urgent class that has one, or None.

        Args:
            now: seconds.
            of: the peers whose messages count; None for all.
            keep: whether it goes on counting against the window, until it is let `free`.
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
        """Let the sender of a message that was taken post as many bytes more; once."""
        if message.kept:
            message.kept = False
            flow = self.flows[message.route]
            flow.take(message.size, now)
            self._look_again(flow)

    def flush(self, send: Send, now: float) -> None:
        """Hand over what is to be sent now; what ``send`` does not take waits for the peer."""
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
        self._look_again(flow)

    def greet(self, now: float) -> None:
        """Have `flush` send something to everybody: whoever is not there is `down` afterwards."""
        for route, flow in self.flows.items():
            if flow.met and flow.up and route.peer not in self.left:
                self._introduce_self(route, now)

    def look(self, cut: Callable[[Place], bool], now: float) -> None:
        """Note which flows' connections have ended, where sending does not show that: `down`."""
        for route, place in self._place.items():
            if cut(place):
                self.down.setdefault(route, now)
            elif self.flows[route].up:
                self.down.pop(route, None)

    def unconnected(self, now: float) -> dict[int, float]:
        """Return for how many seconds all flows of a peer have been `down`, where they are."""
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
        """When `tick` is to be called at the latest, if nothing arrives before."""
        return self._next

    def resume(self, now: float) -> None:
        """Count no silence of peers from before ``now``: this process was stopped until then."""
        for flow in self.flows.values():
            flow.resume(now)

    def tick(self, now: float) -> None:
        """Let time pass: ask, tell, and find out who is lost."""
        if now < self._next:
            return
        self._next = NEVER
        for route, flow in self.flows.items():
            if route.peer in self.lost:
                continue
            # Whoever has left still wants to hear that its last words have arrived.
            if route.peer not in self.left and flow.tick(now):
                self._lose(route, flow)
                continue
            if flow.up and (flow.pending or flow.tell_at <= now):
                self._busy[route] = None
            # And nothing is due for one that has left when its connections have ended.
            told = flow.tell_at if flow.up else NEVER
            due = told if route.peer in self.left else flow.due
            self._next = min(self._next, max(due, now))

    def tell(self, now: float) -> None:
        """Have `flush` say at once what has arrived: this end will not be here later."""
        for route, flow in self.flows.items():
            if flow.up and flow.tell(now):
                self._busy[route] = None

    @property
    def busy(self) -> bool:
        """Whether `flush` has something to send."""
        return bool(self._busy)

    @property
    def unmet(self) -> list[Route]:
        """The flows whose peer has not been heard of."""
        return [route for route, flow in self.flows.items() if not flow.met]

    def _accept(self, arrival: Arrival, now: float) -> None:
        route = self._route.get(arrival.place)
        if not arrival.whole:
            raise Malformed("parts")
        if not len(arrival.head) and arrival.payload is None:
            if route is not None:  # the peer has accepted a connection and cannot know whose
                self._introduce_self(route, now)
            return
        header = unpack(arrival.head)
        if route is None or not self.flows[route].names(header):
            self._check_sender(header, arrival)
            route = self._introduced(route, header, arrival.place)
        payload = _payload(header, arrival)
        self.lost.pop(route.peer, None)  # it was stopped, or the network was cut, and goes on
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
        self._plan(route, flow)

    def _check_sender(self, header: Header, arrival: Arrival) -> None:
        own = self.membership
        if header.receiver != own.number or header.sender not in self._sessions:
            raise Malformed("address")
        if header.session != self._sessions[header.sender]:
            raise Malformed("session")
        if arrival.peer is not None and arrival.peer != header.sender:
            raise Malformed("key")

    def _introduced(self, known: Route | None, header: Header, place: Place) -> Route:
        """Return the flow that the first frame of a new connection names."""
        if known is not None:
            raise Malformed("key")  # a member that says it is another
        route = Route(header.sender, place.interface, place.urgency)
        if header.type != _HELLO or route not in self.flows:
            raise Malformed("stranger")
        return route

    def _bind(self, route: Route, place: Place) -> None:
        if self._place.get(route) == place:
            return
        # What is read late from the connection before this one is still the peer's.
        self._route.pop(self._former.pop(route, place), None)
        if route in self._place:
            self._former[route] = self._place[route]
        self._place[route], self._route[place] = place, route

    def _introduce_self(self, route: Route, now: float) -> None:
        flow = self.flows[route]
        flow.hello(now)
        self._plan(route, flow)

    def _plan(self, route: Route, flow: Flow) -> None:
        """Remember when the flow wants to be looked at again."""
        if flow.pending and flow.up:
            self._busy[route] = None
        self._look_again(flow)

    def _look_again(self, flow: Flow) -> None:
        due = flow.due
        if due < self._next:
            self._next = due

    def _lose(self, route: Route, flow: Flow) -> None:
        several = len({each.interface for each in self.flows if each.peer == route.peer}) > 1
        where = f" over {self.card(route.interface)}" if several else ""
        self.lost[route.peer] = (
            f"gave no sign{where} for {self.limits.silence:g} s; {flow.unarrived} messages to it "
            f"({flow.waiting_bytes} bytes) may not have arrived"
        )


def _payload(header: Header, arrival: Arrival) -> memoryview:
    """Return the payload, which has to be as long as the header says."""
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
