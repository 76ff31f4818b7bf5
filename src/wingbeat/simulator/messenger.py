"""A thread that serves a mailbox in virtual time: receives messages and sends queued items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from wingbeat.methods.parameter_server.protocol import Flow, Order, SendQueue
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.mailbox import Mailbox
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.frames import Posted

Item = TypeVar("Item")


class Messenger(ABC, Generic[Item]):
    """The common part of a worker's client and a server.

    It receives messages, then sends the items that have room, one after the other. Each takes time,
    during which the thread processes no events.
    """

    at_once: int | None = None
    """Messages that are received before something is sent; None: all."""

    def __init__(
        self, agenda: Agenda, mailbox: Mailbox, work: Work, order: Order, byte_s: float
    ) -> None:
        self._agenda, self._mailbox = agenda, mailbox
        self._message_s, self._byte_s = work.message_s, byte_s
        self._queue: SendQueue[Item] = SendQueue(order)
        self._resting, self._woken = True, False
        self._thread = self._run()
        mailbox.wake = self.wake

    def wake(self) -> None:
        """Wake the thread to process pending work."""
        self._woken = True
        if self._resting:
            self._resting = False
            self._agenda.at(self._agenda.now, self._go)

    @abstractmethod
    def take(self, message: Message) -> Iterator[float]:
        """Process a message; yield the seconds that this takes."""

    @abstractmethod
    def post(self, flow: Flow, item: Item) -> Posted:
        """Post an item to the mailbox."""

    @abstractmethod
    def nbytes(self, item: Item) -> int:
        """Return the bytes of an item's payload."""

    def making(self, item: Item) -> float:  # noqa: ARG002  not everything has to be made
        """Return the seconds to create a payload."""
        return 0.0

    def ready(self, item: Item) -> bool:  # noqa: ARG002  not every messenger has to wait
        """Whether an item can be sent."""
        return True

    def begin(self) -> None:
        """Move new items to the send queue."""

    def finish(self) -> None:
        """Complete what has ended after a send or an arrival."""

    def _go(self) -> None:
        for pause in self._thread:
            if pause is None:
                self._resting = True
                return
            if pause > 0:
                self._agenda.at(self._agenda.now + pause, self._go)
                return

    def _run(self) -> Iterator[float | None]:
        while True:
            while self._woken:
                self._woken = False
                yield from self._take_in()
                self.begin()
                yield from self._send_out()
                self.finish()
                self._woken |= self._mailbox.waiting > 0
            yield None

    def _take_in(self) -> Iterator[float]:
        taken = 0
        while self.at_once is None or taken < self.at_once:
            message = self._mailbox.poll()
            if message is None:
                return
            yield self._price(len(message.payload))
            yield from self.take(message)
            taken += 1

    def _send_out(self) -> Iterator[float]:
        while (chosen := self._choose()) is not None:
            flow, item, posted = chosen
            yield self._price(self.nbytes(item)) + self.making(item)
            posted.append(self.post(flow, item))

    def _choose(self) -> tuple[Flow, Item, list[Posted]] | None:
        """Remove the next item from the send queue."""
        chosen: list[tuple[Flow, Item, list[Posted]]] = []

        def room(flow: Flow) -> int:
            return -1 if chosen else self._mailbox.room(flow)

        def send(flow: Flow, item: Item) -> Callable[[], bool]:
            posted: list[Posted] = []
            chosen.append((flow, item, posted))
            return lambda: bool(posted) and posted[0].arrived

        if self._queue.queued:
            self._queue.flush(room, send, self.ready)
        return chosen[0] if chosen else None

    def _price(self, nbytes: int) -> float:
        return self._message_s + nbytes * self._byte_s
