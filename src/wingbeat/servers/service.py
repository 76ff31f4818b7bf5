"""A parameter server at work: takes slices from its mailbox, sums them, and sends the sums back."""

from __future__ import annotations

import time
from collections.abc import Callable

from wingbeat.errors import PeerError
from wingbeat.servers.dtypes import Array
from wingbeat.servers.outbox import Flow, Order, Outbox
from wingbeat.servers.protocol import TEXT, Ids, Kind, position_of, urgency_of
from wingbeat.servers.sums import Refused, Sum, Sums
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.flow import Posted
from wingbeat.transport.messages.header import LARGEST
from wingbeat.transport.messages.mailbox import Mailbox

_LOOK_S = 0.25
"""Seconds between two looks at what nobody tells: workers that are gone, sums that are late."""

_AT_ONCE = 32
"""Messages that are taken in before sums are sent."""


class Answer:
    """A sum that a worker is to have, once it is complete.

    Attributes:
        worker: its rank.
        ids: what it has asked for.
        dtype: of the sum.
        result: the sum, which stays as it is while this may read it; None until it is complete.
    """

    __slots__ = ("_posted", "dtype", "ids", "result", "worker")

    def __init__(self, worker: int, ids: Ids) -> None:
        self.worker, self.ids = worker, ids
        self.dtype = ""
        self.result: Array | None = None
        self._posted: Posted | None = None

    def fill(self, total: Sum) -> None:
        """Take the sum, and have nobody write to it until it has arrived."""
        self.dtype, self.result = total.dtype, total.result
        total.readers.append(self.arrived)

    def complete(self) -> bool:
        """Whether it can be sent."""
        return self.result is not None

    def post(self, mailbox: Mailbox) -> Callable[[], bool]:
        """Send it; return what tells whether it has arrived."""
        self._posted = mailbox.post(
            self.worker,
            Kind.SUM,
            self.result,
            ids=self.ids,
            dtype=self.dtype,
            urgency=urgency_of(self.ids.wish),
        )
        return self.arrived

    def arrived(self) -> bool:
        """Whether the worker has it."""
        return self._posted is not None and self._posted.arrived


class Service:
    """One server: every worker's pushes and pulls of its slices.

    Args:
        mailbox: joins it to all workers, whose numbers are their ranks.
        workers: how many there are.
        most: bytes that all sums may take.
        order: in which order sums are sent.
        timeout: seconds that a sum may wait for a worker.
        classes: how many classes the mailbox has.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        workers: int,
        *,
        most: int,
        order: Order = Order.READY,
        timeout: float = 300.0,
        classes: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox = mailbox
        self._workers = workers
        self._order = order
        self._timeout = timeout
        self._classes = classes
        self._clock = clock
        self._sums = Sums(workers, most)
        self._outbox: Outbox[Answer] = Outbox(order)
        self._pulls: dict[tuple[int, int], list[Answer]] = {}
        self._failed = False

    def run(self, parent: Callable[[], bool] = lambda: True) -> None:
        """Serve until every worker has left, or the one that started it is gone.

        Args:
            parent: whether that one is there.
        """
        everyone, looked = frozenset(range(self._workers)), 0.0
        while parent() and not self._mailbox.left.union(self._mailbox.lost) >= everyone:
            try:
                self._take_in(self._mailbox.next(_LOOK_S))
                self._send_out()
            except (PeerError, Refused) as error:
                self._fail(str(error))
            if self._clock() - looked > _LOOK_S:
                looked = self._clock()
                self._look_after(looked)
        self._mailbox.close()

    def _take_in(self, message: Message | None) -> None:
        taken = 0
        while message is not None:
            self._take(message)
            taken += 1
            message = self._mailbox.poll() if taken < _AT_ONCE else None

    def _take(self, message: Message) -> None:
        """Add what a worker pushes; remember or answer what it pulls.

        Raises:
            Refused: it is nothing that a worker may send.
        """
        if self._failed:
            return
        ids, worker = Ids(*message.ids), message.peer
        if urgency_of(ids.wish) >= self._classes:
            raise Refused(f"rank {worker} asks for class {urgency_of(ids.wish)}")
        key = ids.plan, ids.slice
        if message.kind == Kind.PULL:
            self._pull(worker, ids)
            return
        if message.kind not in (Kind.PUSH, Kind.STORE):
            raise Refused(f"rank {worker} sent a message of kind {message.kind}")
        if message.kind == Kind.PUSH:
            self._pulls.setdefault(key, []).append(Answer(worker, ids))
        total = self._sums.push(
            worker, key, ids.round, message.dtype, message.payload, self._clock()
        )
        if total is not None:
            for answer in self._pulls.pop(key, ()):
                answer.fill(total)
                if self._order is not Order.FORWARD or message.kind == Kind.PUSH:
                    self._queue(answer)

    def _pull(self, worker: int, ids: Ids) -> None:
        answer = Answer(worker, ids)
        total = self._sums.finished((ids.plan, ids.slice), ids.round)
        if total is None:
            self._pulls.setdefault((ids.plan, ids.slice), []).append(answer)
        else:
            answer.fill(total)
        if total is not None or self._order is Order.FORWARD:
            self._queue(answer)

    def _queue(self, answer: Answer) -> None:
        ids, result = answer.ids, answer.result
        nbytes = LARGEST + (self._mailbox.largest if result is None else result.nbytes)
        flow = Flow(answer.worker, urgency_of(ids.wish))
        self._outbox.add(flow, position_of(ids.wish), nbytes, answer)

    def _send_out(self) -> None:
        if self._outbox.waiting and not self._failed:
            self._outbox.flush(self._room, self._send, Answer.complete)

    def _room(self, flow: Flow) -> int:
        if flow.peer in self._mailbox.left or flow.peer in self._mailbox.lost:
            return 0
        return self._mailbox.room(flow.peer, urgency=flow.urgency)

    def _send(self, _: Flow, answer: Answer) -> Callable[[], bool]:
        return answer.post(self._mailbox)

    def _look_after(self, now: float) -> None:
        """Tell everybody if a sum waits in vain."""
        gone = [
            *((n, why) for n, why in self._mailbox.lost.items()),
            *((n, "has ended") for n in self._mailbox.left),
        ]
        for worker, why in gone:
            if self._sums.lacking(worker):
                self._fail(f"rank {worker} {why}")
        late = self._sums.missing(now - self._timeout)
        if late is not None:
            ranks = ", ".join(map(str, sorted(late[1])))
            self._fail(
                f"no gradients of rank {ranks} for slice {late[0][1]} within {self._timeout:g} s"
            )

    def _fail(self, why: str) -> None:
        """Tell every worker once why there will be no more sums."""
        if self._failed:
            return
        self._failed = True
        text = why.encode()[:TEXT]
        gone = self._mailbox.left.union(self._mailbox.lost)
        for worker in range(self._workers):
            if worker not in gone:
                try:
                    self._mailbox.post(worker, Kind.FAILED, text, urgency=0, seconds=0.1)
                except PeerError:
                    continue  # it will find out by itself
