"""Queues of messages to send, in an order that depends on the baseline; without I/O.

The baselines of Geryon differ only here. With `Order.READY` (Geryon) a flow is first in, first out,
and the network enforces priorities. With `Order.URGENT` (P3) the sender has a priority queue, and
few bytes in flight. With `Order.FORWARD` (TICTAC) messages are sent in a global order.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

MAX_IN_FLIGHT = 1 << 20
"""Maximum bytes in flight per flow with `Order.URGENT`, because no message overtakes one in flight.
"""


class Order(enum.Enum):
    """The order in which a sender sends."""

    READY = "ready"
    URGENT = "urgent"
    FORWARD = "forward"


class Flow(NamedTuple):
    """Destination, traffic class and link: the paper's local ID in ``channel_table``."""

    peer: int
    urgency: int
    link: int = 0


@dataclass(slots=True)
class _FlowQueue(Generic[Item]):
    """The messages of one flow.

    Attributes:
        rank: sort key among the queues; the most urgent class first.
        queued: a deque of (bytes, item), or a heap of (position, counter, bytes, item).
        in_flight: bytes of each message in flight, and a function that returns whether it has
            arrived.
        in_flight_bytes: their sum.
    """

    flow: Flow
    rank: tuple[int, int, int]
    queued: Any
    in_flight: deque[tuple[int, Callable[[], bool]]] = field(default_factory=deque)
    in_flight_bytes: int = 0

    def has_credit(self, limit: int) -> bool:
        """Drop arrived messages; return whether fewer than ``limit`` bytes are in flight."""
        while self.in_flight and self.in_flight[0][1]():
            self.in_flight_bytes -= self.in_flight.popleft()[0]
        return self.in_flight_bytes < limit


class SendQueue(Generic[Item]):
    """A queue for each flow; ``max_in_flight`` bytes per flow apply with `Order.URGENT`."""

    def __init__(self, order: Order = Order.READY, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._urgent = order is Order.URGENT
        self._max_in_flight = max_in_flight
        self._queues: dict[Flow, _FlowQueue[Item]] = {}
        self._busy: list[_FlowQueue[Item]] = []  # queues with messages, by rank
        self._count = itertools.count()
        self.queued = 0

    def enqueue(self, flow: Flow, position: int, nbytes: int, item: Item) -> None:
        """Add a message; ``position`` is its bucket's position in forward order."""
        queue = self._queues.get(flow)
        if queue is None:
            queued: Any = [] if self._urgent else deque()
            queue = _FlowQueue(flow, (flow.urgency, flow.peer, flow.link), queued)
            self._queues[flow] = queue
        if not queue.queued:
            bisect.insort(self._busy, queue, key=_RANK)
        if self._urgent:
            heapq.heappush(queue.queued, (position, next(self._count), nbytes, item))
        else:
            queue.queued.append((nbytes, item))
        self.queued += 1

    def flush(
        self,
        room: Callable[[Flow], int],
        send: Callable[[Flow, Item], Callable[[], bool]],
        ready: Callable[[Item], bool] = lambda _: True,
    ) -> None:
        """Send messages, the most urgent class first.

        ``room`` returns the bytes that a flow accepts now. ``send`` sends a message, and returns a
        function that returns whether it has arrived. A message that is not ``ready`` blocks those
        behind it, which happens only with `Order.FORWARD`.
        """
        drain = self._by_urgency if self._urgent else self._in_order
        emptied = False
        for queue in self._busy:
            drain(queue, room, send, ready)
            emptied |= not queue.queued
        if emptied:
            self._busy = [queue for queue in self._busy if queue.queued]

    def _in_order(
        self,
        queue: _FlowQueue[Item],
        room: Callable[[Flow], int],
        send: Callable[[Flow, Item], Callable[[], bool]],
        ready: Callable[[Item], bool],
    ) -> None:
        queued, flow = queue.queued, queue.flow
        while queued:
            nbytes, item = queued[0]
            if room(flow) < nbytes or not ready(item):
                break
            queued.popleft()
            self.queued -= 1
            send(flow, item)

    def _by_urgency(
        self,
        queue: _FlowQueue[Item],
        room: Callable[[Flow], int],
        send: Callable[[Flow, Item], Callable[[], bool]],
        ready: Callable[[Item], bool],
    ) -> None:
        queued, flow = queue.queued, queue.flow
        while queued and queue.has_credit(self._max_in_flight):
            _, _, nbytes, item = queued[0]
            if room(flow) < nbytes or not ready(item):
                break
            heapq.heappop(queued)
            self.queued -= 1
            queue.in_flight.append((nbytes, send(flow, item)))
            queue.in_flight_bytes += nbytes


_RANK = operator.attrgetter("rank")
