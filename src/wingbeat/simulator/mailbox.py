"""A process's end of the message layer in virtual time: real flows over simulated interfaces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.interfaces import Interfaces, Stream
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership, Message, Route
from wingbeat.transport.messages.frames import NEVER, Arrival, Buffer, ConnectionId, Posted, compose

LIMITS = Limits(silence=1e9)
"""Limits of a real run, except that no peer is considered lost, however slow."""

_NOTHING = memoryview(bytes(LIMITS.message))
"""The content of all payloads; only sizes matter."""


@dataclass(slots=True)
class Mailboxes:
    """All mailboxes of a job."""

    agenda: Agenda
    interfaces: Interfaces
    classes: int
    links: int = 1
    members: dict[int, Mailbox] = field(default_factory=dict)

    def create(self, number: int, peers: Iterable[int]) -> Mailbox:
        """Create the mailbox of a process that has these peers."""
        self.members[number] = Mailbox(self, number, peers)
        return self.members[number]

    @property
    def repeated(self) -> int:
        """Number of messages that arrived twice because they were sent again."""
        return sum(f.repeated for m in self.members.values() for f in m.endpoint.flows.values())

    def connect(self) -> None:
        """Exchange all greetings, in no time."""
        frames: list[tuple[Mailbox, Arrival]] = []

        def deliver(sender: int, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
            frames.append((self.members[place.name], _arrival(sender, place, parts)))
            return True

        for member in self.members.values():
            member.endpoint.flush(functools.partial(deliver, member.number), 0.0)
        while frames:
            receiver, arrival = frames.pop(0)
            receiver.endpoint.accept(arrival, 0.0)
            receiver.endpoint.flush(functools.partial(deliver, receiver.number), 0.0)


class Mailbox:
    """Sends and receives messages as a real mailbox does, but never blocks.

    ``wake`` is called when messages or acknowledgements have arrived.
    """

    def __init__(self, mailboxes: Mailboxes, number: int, peers: Iterable[int]) -> None:
        self._mailboxes, self._agenda = mailboxes, mailboxes.agenda
        self.number = number
        self.wake: Callable[[], None] = lambda: None
        peers = tuple(peers)
        sessions = {n: n for n in (number, *peers)}
        self.endpoint = Endpoint(Membership(number, number, sessions), LIMITS)
        self._due = NEVER
        flows = itertools.product(peers, range(mailboxes.links), range(mailboxes.classes))
        for peer, link, urgency in flows:
            # As with ZeroMQ, the lower number connects.
            place = ConnectionId(link, urgency, peer) if number < peer else None
            self.endpoint.add(Route(peer, link, urgency), place, 0.0)

    @property
    def waiting(self) -> int:
        """Number of received messages."""
        return self.endpoint.waiting

    def room(self, route: Route) -> int:
        """Bytes that can be posted."""
        return self.endpoint.flows[route].room

    def post(self, route: Route, kind: int, nbytes: int, ids: Sequence[int]) -> Posted:
        """Send a message with a payload of ``nbytes``; the caller has checked `room`."""
        dtype = "float32" if nbytes else ""
        message = compose(kind, _NOTHING[:nbytes], ids, dtype, (), most=LIMITS.message)
        self.endpoint.post(route, message, self._send, self._agenda.now)
        self._flush()
        return message

    def poll(self) -> Message | None:
        """Return the oldest message of the most urgent class that has one."""
        message = self.endpoint.take(self._agenda.now)
        self._flush()
        return message

    def _send(self, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
        peer = self._mailboxes.members[place.name]
        arrival = _arrival(self.number, place, parts)
        self._mailboxes.interfaces.carry(
            Stream(self.number, peer.number, place.urgency, place.interface),
            sum(map(len, parts)),
            lambda: peer._accept(arrival),
        )
        return True

    def _accept(self, arrival: Arrival) -> None:
        self.endpoint.accept(arrival, self._agenda.now)
        assert not self.endpoint.refused, self.endpoint.refused
        self._flush()
        self.wake()

    def _flush(self) -> None:
        """Send due frames, and schedule the next poll."""
        now = self._agenda.now
        self.endpoint.tick(now)
        self.endpoint.flush(self._send, now)
        due = self.endpoint.due()
        if due < self._due:
            self._due = max(due, now)
            self._agenda.at(self._due, functools.partial(self._flush_due, self._due))

    def _flush_due(self, due: float) -> None:
        if due == self._due:
            self._due = NEVER
            self._flush()


def _arrival(sender: int, place: ConnectionId, parts: Sequence[Buffer]) -> Arrival:
    """Return the callback for arrival over the receiver's same interface."""
    payload = parts[1] if len(parts) > 1 else None
    return Arrival(place._replace(name=sender), parts[0], payload, sender)
