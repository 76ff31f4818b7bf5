"""A parameter server that updates: sums stay, and parameters go out (Geryon, section II-A)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from wingbeat.methods.parameter_server.aggregator import Sum
from wingbeat.methods.parameter_server.documents import messages
from wingbeat.methods.parameter_server.notes import Applies, Reply
from wingbeat.methods.parameter_server.protocol import UPDATES, Ids, Kind
from wingbeat.methods.parameter_server.send_queue import Order
from wingbeat.methods.parameter_server.server import Answer, Service
from wingbeat.methods.parameter_server.shard_updates import Updates
from wingbeat.transport.messages.endpoint import Message


class UpdatingService(Service):
    """As `Service`, with an optimizer.

    Args:
        mailbox: joins it to all workers.
        workers: how many there are.
        make: makes what applies the optimizer.
        room: bytes that parameters and the optimizer's state may take.
        options: as of `Service`.
    """

    def __init__(
        self,
        mailbox: Any,
        workers: int,
        *,
        make: Callable[[], Applies],
        room: int,
        **options: Any,
    ) -> None:
        super().__init__(mailbox, workers, **options)
        self._updates = Updates(workers, make, self._sums.finished, room)
        self._turns: dict[tuple[int, tuple[int, int]], Answer] = {}

    @property
    def pending(self) -> bool:
        """Whether a slice can be updated now."""
        return self._updates.due and not self._failed

    def _work(self) -> None:
        if not self._failed:
            self._reply(self._updates.work())

    def _take_other(self, message: Message, ids: Ids) -> None:
        if message.kind not in UPDATES:
            super()._take_other(message, ids)
        worker, kind = message.peer, message.kind
        self._reply(self._updates.take(worker, kind, ids, message.payload, self._clock()))

    def _reply(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            answer = Answer(reply.worker, reply.ids, Kind.PARAMETERS)
            if reply.state is not None:
                self._tell_state(reply.worker, reply.ids, *reply.state)
            elif reply.made is not None:
                self._answer(answer, reply.made)
            elif self._order is Order.FORWARD:  # what comes behind it waits for it
                self._turns[answer.worker, answer.ids[:2]] = answer
                self._queue(answer)

    def _push(self, message: Message, ids: Ids, free: Callable[[], object]) -> None:
        self._updates.wish(ids[:2], ids.wish)
        super()._push(message, ids, free)

    def _summed(self, key: tuple[int, int]) -> None:
        self._updates.summed(key)

    def _answer(self, answer: Answer, made: Sum) -> None:
        waiting = self._turns.pop((answer.worker, answer.ids[:2]), None)
        if waiting is not None:
            waiting.fill(made)
            return
        answer.fill(made)
        self._queue(answer)

    def _tell_state(
        self, worker: int, ids: Ids, words: dict[str, Any], arrays: list[memoryview]
    ) -> None:
        """Send what is remembered of a slice, in as many messages as it takes."""
        for count, payload in enumerate(messages(words, arrays, self._mailbox.largest)):
            answer = Answer(worker, ids, Kind.MORE if count else Kind.STATE)
            answer.result = np.frombuffer(payload, np.uint8)
            self._queue(answer)

    def _look_after(self, now: float, drained: bool) -> None:
        super()._look_after(now, drained)
        late = self._updates.missing(now - self._timeout)
        if late is not None:
            ranks = ", ".join(map(str, sorted(late[1])))
            self._fail(f"no {late[0]} of rank {ranks} within {self._timeout:g} s")

    def _waits(self, before: float) -> bool:
        return super()._waits(before) or self._updates.missing(before) is not None

    def _lacking(self, worker: int) -> bool:
        return super()._lacking(worker) or self._updates.lacking(worker)
