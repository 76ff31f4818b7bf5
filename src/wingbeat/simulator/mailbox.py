"""A process's end of the message layer in virtual time: real flows over simulated interfaces."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from wingbeat import _native
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.interfaces import Interfaces, Stream
from wingbeat.transport.messages.frames import NEVER, Limits, Message, Posted
from wingbeat.transport.messages.peers import Route

LIMITS = Limits(silence=1e9)
"""Limits of a real run, except that no peer is considered lost, however slow."""


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
        return sum(member.endpoint.repeated for member in self.members.values())

    def connect(self) -> None:
        """Exchange all greetings, in no time."""
        frames = deque(
            (member, *each) for member in self.members.values() for each in member.frames(0.0)
        )
        while frames:
            sender, route, header = frames.popleft()
            receiver = self.members[route.peer]
            receiver.endpoint.accept(*route._replace(peer=sender.number), header, b"", 0.0)
            frames.extend((receiver, *each) for each in receiver.frames(0.0))


class Mailbox:
    """Sends and receives messages as a real mailbox does, but never blocks.

    Payloads have a size and no contents. ``wake`` is called when messages or acknowledgements have
    arrived.
    """

    def __init__(self, mailboxes: Mailboxes, number: int, peers: Iterable[int]) -> None:
        self._mailboxes, self._agenda = mailboxes, mailboxes.agenda
        self.number = number
        self.wake: Callable[[], None] = lambda: None
        self.endpoint = _native.Endpoint(number, number, LIMITS.window, LIMITS.silence)
        self._due = NEVER
        flows = itertools.product(peers, range(mailboxes.links), range(mailboxes.classes))
        for peer, link, urgency in flows:
            self.endpoint.add(peer, link, urgency, peer)
            # As in a run, the lower number connects.
            self.endpoint.connected(peer, link, urgency, number < peer, 0.0)

    @property
    def waiting(self) -> int:
        """Number of received messages."""
        return self.endpoint.waiting

    def room(self, route: Route) -> int:
        """Bytes that can be posted."""
        return self.endpoint.room(*route)

    def post(self, route: Route, kind: int, nbytes: int, ids: Sequence[int]) -> Posted:
        """Send a message with a payload of ``nbytes``; the caller has checked `room`."""
        message = self.endpoint.post(*route, kind, nbytes, ids, 0, self._agenda.now)
        assert message is not None, "the window has no room"
        self._flush()
        return message

    def poll(self) -> Message | None:
        """Return the oldest message of the most urgent class that has one."""
        message = self.endpoint.take(self._agenda.now)
        self._flush()
        return message

    def frames(self, now: float) -> list[tuple[Route, _native.Header]]:
        """Return the frames that are due, with their routes."""
        found = []
        for route in itertools.starmap(Route, self.endpoint.take_busy()):
            while (frame := self.endpoint.next(*route, now)) is not None:
                found.append((route, frame[0]))
        return found

    def _accept(self, route: Route, header: _native.Header) -> None:
        self.endpoint.accept(*route, header, b"", self._agenda.now)
        assert not self.endpoint.refused, self.endpoint.refused
        self._flush()
        self.wake()

    def _flush(self) -> None:
        """Send due frames, and schedule the next poll."""
        now = self._agenda.now
        self.endpoint.tick(now)
        for route, header in self.frames(now):
            receiver = self._mailboxes.members[route.peer]
            self._mailboxes.interfaces.carry(
                Stream(self.number, route.peer, route.urgency, route.interface),
                header.frame_bytes,
                functools.partial(receiver._accept, route._replace(peer=self.number), header),
            )
        due = self.endpoint.due
        if due < self._due:
            self._due = max(due, now)
            self._agenda.at(self._due, functools.partial(self._flush_due, self._due))

    def _flush_due(self, due: float) -> None:
        if due == self._due:
            self._due = NEVER
            self._flush()
