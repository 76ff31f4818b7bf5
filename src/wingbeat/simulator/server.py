"""A server in virtual time: counts pushes, and sends sums when the last has arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from wingbeat.methods.parameter_server.protocol import (
    Flow,
    Ids,
    Kind,
    Order,
    link_of,
    position_of,
    urgency_of,
)
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.coding import Coding
from wingbeat.simulator.mailbox import LIMITS, Mailbox
from wingbeat.simulator.messenger import Messenger
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Posted


@dataclass(eq=False, slots=True)
class Answer:
    """A sum for a worker, with its size in bytes once it is complete; None until then."""

    worker: int
    ids: Ids
    nbytes: int | None = None


@dataclass(slots=True)
class Total:
    """A slice: `wingbeat.methods.parameter_server.aggregator.Accumulator` without data.

    ``round`` is the current or latest sum, to which ``added`` workers were added in rank order;
    ``waiting`` workers arrived before their turn. ``done`` is the last complete sum, which can be
    pulled until the next one is complete.
    """

    round: int = -1
    added: int = 0
    waiting: set[int] = field(default_factory=set)
    done: int = -1
    nbytes: int = 0
    answers: list[Answer] = field(default_factory=list)


class Server(Messenger[Answer]):
    """The loop of a `wingbeat.methods.parameter_server.server.Server`, with the same rules.

    ``sizes`` has for each slice the float32 bytes of its gradients, and the encoded bytes of its
    sum.
    """

    at_once = 32

    def __init__(
        self,
        agenda: Agenda,
        mailbox: Mailbox,
        work: Work,
        order: Order,
        byte_s: float,
        workers: int,
        sizes: Sequence[tuple[int, int]],
        coding: Coding,
    ) -> None:
        super().__init__(agenda, mailbox, work, order, byte_s)
        self._workers, self._sizes = workers, sizes
        self._add_s = work.add_s_per_byte + coding.decode_s_per_byte
        self._encode_s = coding.encode_s_per_byte
        self._forward = order is Order.FORWARD
        self._totals: dict[int, Total] = {}

    def take(self, message: Message) -> Iterator[float]:
        """Add pushed gradients; record or answer a pull."""
        ids, worker = Ids(*message.ids), message.peer
        total = self._totals.setdefault(ids.slice, Total())
        if message.kind == Kind.PULL:
            self._pull(total, worker, ids)
            return
        if message.kind == Kind.PUSH_PULL:
            total.answers.append(Answer(worker, ids))
        dense, back = self._sizes[ids.slice]
        yield self._push(total, worker, ids, len(message.payload)) * dense * self._add_s
        if total.added == self._workers:
            if back < dense:
                yield dense * self._encode_s
            total.done = total.round
            answers, total.answers = total.answers, []
            for answer in answers:
                answer.nbytes = back
                if not self._forward or message.kind == Kind.PUSH_PULL:
                    self._enqueue(answer)

    def _push(self, total: Total, worker: int, ids: Ids, nbytes: int) -> int:
        """Record pushed gradients; return how many workers' gradients can be added now."""
        if ids.round == total.round + 1 and total.done == total.round:
            total.round, total.added, total.nbytes = ids.round, 0, nbytes
        assert (ids.round, nbytes) == (total.round, total.nbytes), (ids, total)
        assert worker >= total.added, f"rank {worker} pushed {ids} twice"
        assert worker not in total.waiting, f"rank {worker} pushed {ids} twice"
        total.waiting.add(worker)
        before = total.added
        while total.added in total.waiting:
            total.waiting.remove(total.added)
            total.added += 1
        return total.added - before

    def _pull(self, total: Total, worker: int, ids: Ids) -> None:
        assert ids.round in (total.done, total.done + 1), (ids, total)
        answer = Answer(worker, ids)
        if ids.round == total.done:
            answer.nbytes = self._sizes[ids.slice][1]
        else:
            total.answers.append(answer)
        if answer.nbytes is not None or self._forward:
            self._enqueue(answer)

    def _enqueue(self, answer: Answer) -> None:
        nbytes = MAX_HEADER_BYTES + (LIMITS.message if answer.nbytes is None else answer.nbytes)
        route = answer.ids.route
        flow = Flow(answer.worker, urgency_of(route), link_of(route))
        self._queue.enqueue(flow, position_of(route), nbytes, answer)

    def ready(self, item: Answer) -> bool:
        """Whether the sum is complete."""
        return item.nbytes is not None

    def nbytes(self, item: Answer) -> int:
        """Return the bytes of the sum."""
        return item.nbytes or 0

    def post(self, flow: Flow, item: Answer) -> Posted:
        """Send a sum."""
        return self._mailbox.post(flow, Kind.SUM, self.nbytes(item), item.ids)
