"""A process's end of the message layer in virtual time: real flows over simulated interfaces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from wingbeat.methods.parameter_server.protocol import Flow
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cards import Cards, Stream
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership, Message, Route
from wingbeat.transport.messages.frames import NEVER, Arrival, Buffer, ConnectionId, Posted, compose

LIMITS = Limits(silence=1e9)
"""Limits of a real run, except that no peer is considered lost, however slow."""

_NOTHING = memoryview(bytes(LIMITS.message))
"""The content of all payloads; only sizes matter."""


@dataclass(slots=True)
class Room:
    """All mailboxes of a job."""

    agenda: Agenda
    cards: Cards
    classes: int
    links: int = 1
    members: dict[int, Mailbox] = field(default_factory=dict)

    def open(self, number: int, peers: Iterable[int]) -> Mailbox:
        """Create the mailbox of a process that has these peers."""
        self.members[number] = Mailbox(self, number, peers)
        return self.members[number]

    @property
    def repeated(self) -> int:
        """Number of messages that arrived twice because they were sent again."""
        return sum(f.repeated for m in self.members.values() for f in m.endpoint.flows.values())

    def meet(self) -> None:
        """Exchange all greetings, in no time."""
        frames: list[tuple[Mailbox, Arrival]] = []

        def hand(sender: int, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
            frames.append((self.members[place.name], _arrival(sender, place, parts)))
            return True

        for member in self.members.values():
            member.endpoint.flush(functools.partial(hand, member.number), 0.0)
        while frames:
            receiver, arrival = frames.pop(0)
            receiver.endpoint.accept(arrival, 0.0)
            receiver.endpoint.flush(functools.partial(hand, receiver.number), 0.0)


class Mailbox:
    """Sends and receives messages as a real mailbox does, but never blocks.

    ``wake`` is called when messages or acknowledgements have arrived.
    """

    def __init__(self, room: Room, number: int, peers: Iterable[int]) -> None:
        self._room, self._agenda = room, room.agenda
        self.number = number
        self.wake: Callable[[], None] = lambda: None
        peers = tuple(peers)
        sessions = {n: n for n in (number, *peers)}
        self.endpoint = Endpoint(Membership(number, number, sessions), LIMITS)
        self._due = NEVER
        flows = itertools.product(peers, range(room.links), range(room.classes))
        for peer, link, urgency in flows:
            # As with ZeroMQ, the lower number connects.
            place = ConnectionId(link, urgency, peer) if number < peer else None
            self.endpoint.add(Route(peer, link, urgency), place, 0.0)

    @property
    def waiting(self) -> int:
        """Number of received messages."""
        return self.endpoint.waiting

    def room(self, flow: Flow) -> int:
        """Bytes that can be posted."""
        return self.endpoint.flows[Route(flow.peer, flow.link, flow.urgency)].room

    def post(self, flow: Flow, kind: int, nbytes: int, ids: Sequence[int]) -> Posted:
        """Send a message with a payload of ``nbytes``; the caller has checked `room`."""
        dtype = "float32" if nbytes else ""
        message = compose(kind, _NOTHING[:nbytes], ids, dtype, (), most=LIMITS.message)
        route = Route(flow.peer, flow.link, flow.urgency)
        self.endpoint.post(route, message, self._send, self._agenda.now)
        self._look()
        return message

    def poll(self) -> Message | None:
        """Return the oldest message of the most urgent class that has one."""
        message = self.endpoint.take(self._agenda.now)
        self._look()
        return message

    def _send(self, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
        peer = self._room.members[place.name]
        arrival = _arrival(self.number, place, parts)
        self._room.cards.carry(
            Stream(self.number, peer.number, place.urgency, place.interface),
            sum(map(len, parts)),
            lambda: peer._accept(arrival),
        )
        return True

    def _accept(self, arrival: Arrival) -> None:
        self.endpoint.accept(arrival, self._agenda.now)
        assert not self.endpoint.refused, self.endpoint.refused
        self._look()
        self.wake()

    def _look(self) -> None:
        """Hand over due frames, and schedule the next poll."""
        now = self._agenda.now
        self.endpoint.tick(now)
        self.endpoint.flush(self._send, now)
        due = self.endpoint.due()
        if due < self._due:
            self._due = max(due, now)
            self._agenda.at(self._due, functools.partial(self._ring, self._due))

    def _ring(self, due: float) -> None:
        if due == self._due:
            self._due = NEVER
            self._look()


def _arrival(sender: int, place: ConnectionId, parts: Sequence[Buffer]) -> Arrival:
    """Return the callback for arrival over the receiver's same interface."""
    payload = parts[1] if len(parts) > 1 else None
    return Arrival(place._replace(name=sender), parts[0], payload, sender)
