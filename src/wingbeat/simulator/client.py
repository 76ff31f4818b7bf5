"""A worker's parameter server client in virtual time: pushes slices and waits for their sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wingbeat.methods.parameter_server.protocol import Flow, Ids, Kind, Order, link_of
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.coding import Coding
from wingbeat.simulator.mailbox import Mailbox
from wingbeat.simulator.messenger import Messenger
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Posted


class Part(NamedTuple):
    """A slice within a request, see `wingbeat.methods.parameter_server.client.Transfer`.

    Pushes have ``nbytes``, sums ``back``, and float32 gradients ``dense`` bytes.
    """

    server: int
    ids: Ids
    nbytes: int
    back: int
    dense: int
    urgency: int
    position: int


@dataclass(eq=False, slots=True)
class Request:
    """Slices that were pushed or pulled together, and the number of their ``missing`` sums."""

    kind: Kind
    parts: Sequence[Part]
    missing: int
    posted: list[Posted] = field(default_factory=list)
    over: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def when_over(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when all sums have arrived."""
        self.waiters.append(resume)


class Client(Messenger[tuple[Request, Part]]):
    """The thread of a `wingbeat.methods.parameter_server.client.Client`, with the same rules."""

    def __init__(
        self,
        agenda: Agenda,
        mailbox: Mailbox,
        work: Work,
        order: Order,
        byte_s: float,
        coding: Coding,
    ) -> None:
        super().__init__(agenda, mailbox, work, order, byte_s)
        self._coding = coding
        self._new: deque[Request] = deque()
        self._wanted: dict[tuple[int, int, int], tuple[Request, Part]] = {}
        self._storing: list[Request] = []

    def start(self, kind: Kind, parts: Sequence[Part]) -> Request:
        """Start to push, store or pull slices."""
        request = Request(kind, parts, len(parts))
        self._new.append(request)
        self.wake()
        return request

    def take(self, message: Message) -> Iterator[float]:
        """Record an arrived sum after the time to decode it."""
        assert message.kind == Kind.SUM, message
        request, part = self._wanted.pop(Ids(*message.ids)[:3])
        assert (message.peer, len(message.payload)) == (part.server, part.back), message
        if part.back < part.dense:
            yield part.dense * self._coding.decode_s_per_byte
        request.missing -= 1
        if not request.missing:
            self._end(request)
        yield from ()

    def making(self, item: tuple[Request, Part]) -> float:
        """Return the seconds to encode a slice."""
        return item[1].dense * self._coding.encode_s_per_byte if self.nbytes(item) else 0.0

    def begin(self) -> None:
        """Move requests of the training thread to the send queue."""
        while self._new:
            request = self._new.popleft()
            pull = request.kind is Kind.PULL
            for part in request.parts:
                if request.kind is not Kind.PUSH:
                    self._wanted[part.ids[:3]] = request, part
                nbytes = MAX_HEADER_BYTES if pull else MAX_HEADER_BYTES + part.nbytes
                link = link_of(part.ids.route)
                flow = Flow(part.server, 0 if pull else part.urgency, link)
                self._queue.enqueue(flow, part.position, nbytes, (request, part))
            if request.kind is Kind.PUSH:
                self._storing.append(request)

    def nbytes(self, item: tuple[Request, Part]) -> int:
        """Return the bytes of a slice that is pushed, 0 if it is pulled."""
        request, part = item
        return 0 if request.kind is Kind.PULL else part.nbytes

    def post(self, flow: Flow, item: tuple[Request, Part]) -> Posted:
        """Push or pull one slice."""
        request, part = item
        posted = self._mailbox.post(flow, request.kind, self.nbytes(item), part.ids)
        if request.kind is Kind.PUSH:
            request.posted.append(posted)
        return posted

    def finish(self) -> None:
        """Complete slices that were stored and have arrived."""
        for request in list(self._storing):
            if len(request.posted) == len(request.parts) and all(p.arrived for p in request.posted):
                self._storing.remove(request)
                self._end(request)

    def _end(self, request: Request) -> None:
        request.over = True
        for resume in request.waiters:
            self._agenda.at(self._agenda.now, resume)
        request.waiters.clear()
