"""A process's end of the message layer in virtual time: the real flows, on modelled cards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from wingbeat.methods.parameter_server.send_queue import Flow
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cards import Cards, Stream
from wingbeat.transport.messages.carrier import Arrival, Buffer, Place
from wingbeat.transport.messages.compose import compose
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership, Message, Route
from wingbeat.transport.messages.flow import NEVER, Posted

LIMITS = Limits(silence=1e9)
"""Those of a real run; but nobody is lost here, however long a link takes."""

_NOTHING = memoryview(bytes(LIMITS.message))
"""What every payload is a part of: only sizes matter."""


@dataclass(slots=True)
class Room:
    """All mailboxes of a job.

    Attributes:
        cards: carry what they send.
        classes: how many classes of flows there are.
        links: how many interfaces each process has.
        members: by number.
    """

    agenda: Agenda
    cards: Cards
    classes: int
    links: int = 1
    members: dict[int, Mailbox] = field(default_factory=dict)

    def open(self, number: int, peers: Iterable[int]) -> Mailbox:
        """Make the mailbox of a process that has these peers."""
        self.members[number] = Mailbox(self, number, peers)
        return self.members[number]

    @property
    def repeated(self) -> int:
        """How many messages have come twice, as they were sent again."""
        return sum(f.repeated for m in self.members.values() for f in m.endpoint.flows.values())

    def meet(self) -> None:
        """Let all greet each other, which takes no time."""
        frames: list[tuple[Mailbox, Arrival]] = []

        def hand(sender: int, place: Place, parts: Sequence[Buffer]) -> bool:
            frames.append((self.members[place.name], _arrival(sender, place, parts)))
            return True

        for member in self.members.values():
            member.endpoint.flush(functools.partial(hand, member.number), 0.0)
        while frames:
            receiver, arrival = frames.pop(0)
            receiver.endpoint.accept(arrival, 0.0)
            receiver.endpoint.flush(functools.partial(hand, receiver.number), 0.0)


class Mailbox:
    """Posts and takes messages as a real mailbox does, but never waits.

    Attributes:
        number: of its process.
        endpoint: its flows.
        wake: called when something has arrived: messages, or news of what was sent.
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
            place = Place(link, urgency, peer) if number < peer else None
            self.endpoint.add(Route(peer, link, urgency), place, 0.0)

    @property
    def waiting(self) -> int:
        """How many messages there are to be taken."""
        return self.endpoint.waiting

    def room(self, flow: Flow) -> int:
        """Bytes that can be posted."""
        return self.endpoint.flows[Route(flow.peer, flow.link, flow.urgency)].room

    def post(self, flow: Flow, kind: int, nbytes: int, ids: Sequence[int]) -> Posted:
        """Send a message with a payload of so many bytes; the caller has looked for room."""
        dtype = "float32" if nbytes else ""
        message = compose(kind, _NOTHING[:nbytes], ids, dtype, (), most=LIMITS.message)
        route = Route(flow.peer, flow.link, flow.urgency)
        self.endpoint.post(route, message, self._send, self._agenda.now)
        self._look()
        return message

    def poll(self) -> Message | None:
        """Take the oldest message of the most urgent class that has one."""
        message = self.endpoint.take(self._agenda.now)
        self._look()
        return message

    def _send(self, place: Place, parts: Sequence[Buffer]) -> bool:
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
        """Hand over what is to be sent now, and see when to look again."""
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


def _arrival(sender: int, place: Place, parts: Sequence[Buffer]) -> Arrival:
    """Return what comes over the same interface of the receiver."""
    payload = parts[1] if len(parts) > 1 else None
    return Arrival(place._replace(name=sender), parts[0], payload, sender)
