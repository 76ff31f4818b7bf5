"""A parameter server at work: takes slices from its mailbox, sums them, and sends the sums back."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import numpy as np

from wingbeat.errors import PeerError
from wingbeat.servers.dtypes import Array
from wingbeat.servers.outbox import Flow, Order, Outbox
from wingbeat.servers.probes import Probes, quiet_of
from wingbeat.servers.protocol import (
    TEXT,
    Ids,
    Kind,
    interface_of,
    link_of,
    position_of,
    urgency_of,
)
from wingbeat.servers.sums import EACH, Refused, Sum, Sums
from wingbeat.transport.failures import MAX_WAIT_FACTOR
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Posted
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S, RECONNECT_S, Mailbox

_LOOK_S = 0.25
"""Seconds between two looks at what nobody tells: workers that are gone, sums that are late."""

_NOTHING = np.empty(0, np.float32)

_QUICK_S = 1.0
"""Seconds that the last words may take when the worker that started it will not hear them."""

_AT_ONCE = 32
"""Messages that are taken in before sums are sent."""


class Answer:
    """A sum that a worker is to have, once it is complete.

    Attributes:
        worker: its rank.
        ids: what it has asked for.
        kind: of the message that is to be sent.
        dtype: of the sum.
        result: the sum, which stays as it is while this may read it; None until it is complete.
        queued: whether it waits to be sent already.
    """

    __slots__ = ("_posted", "dtype", "ids", "kind", "queued", "result", "worker")

    def __init__(self, worker: int, ids: Ids, kind: Kind = Kind.SUM) -> None:
        self.worker, self.ids, self.kind = worker, ids, kind
        self.dtype = ""
        self.result: Array | None = None
        self.queued = False
        self._posted: Posted | None = None

    def fill(self, total: Sum) -> None:
        """Take the sum, and have nobody write to it until it has arrived.

        Raises:
            Refused: the worker has had it before.
        """
        if self.worker in total.asked:
            raise _twice(self)
        total.asked.add(self.worker)
        self.dtype, self.result = total.dtype, total.result
        total.readers.append(self.arrived)

    def fill_rest(self, rest: Array | None) -> None:
        """Take what the sum lacks, which is nobody else's any more."""
        self.dtype, self.result = ("float32", rest) if rest is not None else ("", _NOTHING)

    def complete(self) -> bool:
        """Whether it can be sent."""
        return self.result is not None

    def post(self, mailbox: Mailbox, interface: int) -> Callable[[], bool]:
        """Send it; return what tells whether it has arrived."""
        self._posted = mailbox.post(
            self.worker,
            self.kind,
            self.result,
            ids=self.ids,
            dtype=self.dtype,
            interface=interface,
            urgency=urgency_of(self.ids.wish),
        )
        return self.arrived

    def arrived(self) -> bool:
        """Whether the worker has it."""
        return self._posted is not None and self._posted.arrived


def _twice(answer: Answer) -> Refused:
    ids = answer.ids
    return Refused(f"rank {answer.worker} wants slice {ids.slice} of round {ids.round} twice")


class Service:
    """One server: every worker's pushes and pulls of its slices.

    Args:
        mailbox: joins it to all workers, whose numbers are their ranks.
        workers: how many there are.
        most: bytes that all sums may take; one that is waited for takes some too.
        order: in which order sums are sent.
        timeout: seconds that a sum may wait for a worker.
        classes: how many classes the mailbox has.
        sums: makes the sums; those of gradients as they are if None.
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
        sums: Sums | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox = mailbox
        self._workers = workers
        self._order = order
        self._timeout = timeout
        self._classes = classes
        self._clock = clock
        self._sums = sums or Sums(workers, most)
        self._outbox: Outbox[Answer] = Outbox(order)
        self._pulls: dict[tuple[int, int], list[Answer]] = {}
        self._wants = [0] * workers
        self._most_wants = most // EACH
        self._probes, self._quiet = Probes(mailbox), quiet_of(timeout)
        self._links: set[int] = set()  # that gradients have come by
        self._looked = self._probed = clock()
        self._failed = False

    def run(self, parent: Callable[[], bool] = lambda: True) -> None:
        """Serve until every worker has left, or the one that started it is gone.

        Args:
            parent: whether that one is there.
        """
        everyone = frozenset(range(self._workers))
        while parent() and not self._mailbox.left.union(self._mailbox.lost) >= everyone:
            self.step(self._mailbox.next(0.0 if self.pending else _LOOK_S, keep=True))
        seconds = CLOSE_TIMEOUT_S
        if not parent():
            self._fail("the worker that started it is gone")
            seconds = _QUICK_S
        # Workers that are gone without a word hear no last one: nobody is left to be told.
        with contextlib.suppress(PeerError):
            self._mailbox.close(seconds)

    def step(self, message: Message | None) -> None:
        """Do what is to be done now, with the message that has just come if one has.

        Args:
            message: kept in the mailbox, so that it counts there until it is added or answered.
        """
        try:
            drained = self._take_in(message)
            self._work()
            self._send_out()
        except (PeerError, Refused) as error:
            self._fail(str(error))
            return
        now = self._clock()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._look_after(now, drained)

    def _take_in(self, message: Message | None) -> bool:
        """Take what has come; return whether that was all."""
        for _ in range(_AT_ONCE):
            if message is None:
                return True
            self._take(message)
            message = self._mailbox.poll(keep=True)
        if message is not None:
            self._take(message)
        return False

    def _take(self, message: Message) -> None:
        """Add what a worker pushes; remember or answer what it pulls.

        Raises:
            Refused: it is nothing that a worker may send.
        """
        free = functools.partial(self._mailbox.free, message)
        # Only gradients wait where they have arrived; whoever keeps anything else counts it itself.
        if self._failed or message.kind not in (Kind.PUSH, Kind.STORE):
            free()
        if self._failed:
            return
        ids, worker = Ids(*message.ids), message.peer
        try:
            if urgency_of(ids.wish) >= self._classes:
                raise Refused(f"rank {worker} asks for class {urgency_of(ids.wish)}")
            if message.kind == Kind.ALIVE:
                return
            if message.kind == Kind.PULL:
                self._pull(Answer(worker, ids))
            elif message.kind == Kind.TAKE:
                self._take_rest(Answer(worker, ids, Kind.REST))
            elif message.kind in (Kind.PUSH, Kind.STORE):
                self._push(message, ids, free)
            else:
                self._take_other(message, ids)
        except Refused:
            free()  # a message is freed once, however often this is said
            raise

    def _push(self, message: Message, ids: Ids, free: Callable[[], object]) -> None:
        """Add gradients, and let the message ``free`` when that is done."""
        worker, key = message.peer, (ids.plan, ids.slice)
        self._links.add(link_of(ids.wish))
        if message.kind == Kind.PUSH:
            self._want(Answer(worker, ids))
        # A worker that is ahead may push no more than its window holds until the others follow.
        total = self._sums.push(
            worker, key, ids.round, message.dtype, message.payload, self._clock(), free
        )
        if total is not None:
            for answer in self._pulls.pop(key, ()):
                self._wants[answer.worker] -= 1
                self._fill(answer, total)
                if not answer.queued:
                    self._queue(answer)
            self._summed(key)

    # -- for servers that do more than sums ------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there is work that waits for nothing."""
        return False

    def _work(self) -> None:
        """Do a part of that work."""

    def _take_other(self, message: Message, ids: Ids) -> None:  # noqa: ARG002
        """Take a message that is not about sums; it is free already.

        Raises:
            Refused: it is nothing that a worker may send.
        """
        raise Refused(f"rank {message.peer} sent a message of kind {message.kind}")

    def _summed(self, key: tuple[int, int]) -> None:
        """A slice's sum is complete."""

    # -- sums that are wanted --------------------------------------------------------------

    def _pull(self, answer: Answer) -> None:
        ids = answer.ids
        total = self._sums.finished((ids.plan, ids.slice), ids.round)
        if total is None:
            self._want(answer)
        else:
            self._fill(answer, total)
        if total is not None or self._order is Order.FORWARD:
            self._queue(answer)

    def _take_rest(self, answer: Answer) -> None:
        """Send what sums lack to the one worker that asks for this slice's."""
        ids = answer.ids
        if answer.worker != ids.slice % self._workers:
            raise Refused(f"rank {answer.worker} wants what sums of slice {ids.slice} lack")
        self._pull(answer)

    def _fill(self, answer: Answer, total: Sum) -> None:
        if answer.kind is Kind.REST:
            answer.fill_rest(self._sums.take((answer.ids.plan, answer.ids.slice)))
        else:
            answer.fill(total)

    def _want(self, answer: Answer) -> None:
        """Remember who wants a sum that is not complete."""
        waiting = self._pulls.setdefault(answer.ids[:2], [])
        if any((answer.worker, answer.kind) == (each.worker, each.kind) for each in waiting):
            raise _twice(answer)
        if self._wants[answer.worker] >= self._most_wants:
            raise Refused(f"rank {answer.worker} waits for more than {self._most_wants} sums")
        self._wants[answer.worker] += 1
        waiting.append(answer)

    def _queue(self, answer: Answer) -> None:
        answer.queued = True
        ids, result = answer.ids, answer.result
        nbytes = MAX_HEADER_BYTES + (self._mailbox.largest if result is None else result.nbytes)
        flow = Flow(answer.worker, urgency_of(ids.wish), link_of(ids.wish))
        self._outbox.add(flow, position_of(ids.wish), nbytes, answer)

    def _send_out(self) -> None:
        if self._outbox.waiting and not self._failed:
            self._outbox.flush(self._room, self._send, Answer.complete)

    def _room(self, flow: Flow) -> int:
        if flow.peer in self._mailbox.left or flow.peer in self._mailbox.lost:
            return 0
        interface = self._interface(flow)
        return self._mailbox.room(flow.peer, interface=interface, urgency=flow.urgency)

    def _interface(self, flow: Flow) -> int:
        return interface_of(self._mailbox.interfaces(flow.peer), flow.link)

    def _send(self, flow: Flow, answer: Answer) -> Callable[[], bool]:
        try:
            return answer.post(self._mailbox, self._interface(flow))
        except PeerError:
            if self._room(flow):
                raise
            return answer.arrived  # it has just left: whoever needs it finds that out by itself

    def _look_after(self, now: float, drained: bool) -> None:
        """Tell everybody if a sum waits in vain.

        Args:
            now: seconds.
            drained: whether all that has come was taken: what a worker has pushed before it left
                may still be there.
        """
        if drained:
            self._look_for_gone()
        if now - self._probed > self._quiet and self._waits(now - self._quiet):
            self._probed = now
            self._probe()
        self._look_for_late(now)

    def _look_for_late(self, now: float) -> None:
        """Tell everybody if workers wait for each other, or for one that lives for too long.

        One that has pushed nothing, and is not gone, may evaluate or save.
        """
        sums = self._sums
        for seconds in (MAX_WAIT_FACTOR * self._timeout, self._timeout):
            late = sums.missing(now - seconds)
            if late is not None and (seconds > self._timeout or all(map(sums.awaits, late[1]))):
                ranks = ", ".join(map(str, sorted(late[1])))
                self._fail(
                    f"no gradients of rank {ranks} for slice {late[0][1]} within {seconds:g} s"
                )
                return

    def _waits(self, before: float) -> bool:
        """Whether something has waited for a worker since before that moment."""
        return self._sums.missing(before) is not None

    def _probe(self) -> None:
        """See whether the workers can be reached over every card that gradients come by."""
        gone = self._mailbox.left.union(self._mailbox.lost)
        for worker in range(self._workers):
            if worker not in gone:
                self._probes.send(worker, self._links)

    def _look_for_gone(self) -> None:
        mailbox = self._mailbox
        left = dict.fromkeys(mailbox.left, "has ended")
        killed = {
            worker: "has ended without a word: its connections are closed"
            for worker, seconds in mailbox.unconnected().items()
            if seconds > RECONNECT_S
        }
        for worker, why in {**left, **killed, **mailbox.lost}.items():
            if self._lacking(worker):
                self._fail(f"rank {worker} {why}")

    def _lacking(self, worker: int) -> bool:
        """Whether something waits for that worker."""
        return self._sums.lacking(worker)

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
