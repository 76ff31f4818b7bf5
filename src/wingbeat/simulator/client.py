"""A worker's side of the servers in virtual time: pushes slices, and waits for their sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wingbeat.methods.parameter_server.protocol import Ids, Kind, link_of
from wingbeat.methods.parameter_server.send_queue import Flow, Order
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.colayers import Coding
from wingbeat.simulator.mailbox import Mailbox
from wingbeat.simulator.messenger import Messenger
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.flow import Posted
from wingbeat.transport.messages.header import LARGEST


class Part(NamedTuple):
    """A slice as one request has it, see `wingbeat.methods.parameter_server.client.Transfer`.

    Attributes:
        nbytes: of what is pushed.
        back: of its sum.
        dense: of the gradients in float32.
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
    """Slices that were pushed, or pulled, together.

    Attributes:
        missing: how many sums have not come yet.
        over: whether all have come, or were stored.
    """

    kind: Kind
    parts: Sequence[Part]
    missing: int
    posted: list[Posted] = field(default_factory=list)
    over: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def when_over(self, resume: Callable[[], None]) -> None:
        """Have ``resume`` called when all sums are there."""
        self.waiters.append(resume)


class Client(Messenger[tuple[Request, Part]]):
    """The thread that a `wingbeat.methods.parameter_server.client.Client` has, by the same rules.

    Args:
        order: in which order slices are pushed that are ready at the same time.
        coding: how gradients and sums travel.
    """

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
        """Push, store or pull slices; returns at once."""
        request = Request(kind, parts, len(parts))
        self._new.append(request)
        self.wake()
        return request

    def take(self, message: Message) -> Iterator[float]:
        """Note that a sum has come, when it is decoded."""
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
        """Return the seconds that it takes to encode a slice."""
        return item[1].dense * self._coding.encode_s_per_byte if self.nbytes(item) else 0.0

    def begin(self) -> None:
        """Let what the training thread has started wait in the send queue."""
        while self._new:
            request = self._new.popleft()
            pull = request.kind is Kind.PULL
            for part in request.parts:
                if request.kind is not Kind.PUSH:
                    self._wanted[part.ids[:3]] = request, part
                nbytes = LARGEST if pull else LARGEST + part.nbytes
                link = link_of(part.ids.route)
                flow = Flow(part.server, 0 if pull else part.urgency, link)
                self._queue.enqueue(flow, part.position, nbytes, (request, part))
            if request.kind is Kind.PUSH:
                self._storing.append(request)

    def nbytes(self, item: tuple[Request, Part]) -> int:
        """Return the bytes of a slice that is pushed; none if it is pulled."""
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
        """End what was stored and has arrived."""
        for request in list(self._storing):
            if len(request.posted) == len(request.parts) and all(p.arrived for p in request.posted):
                self._storing.remove(request)
                self._end(request)

    def _end(self, request: Request) -> None:
        request.over = True
        for resume in request.waiters:
            self._agenda.at(self._agenda.now, resume)
        request.waiters.clear()
