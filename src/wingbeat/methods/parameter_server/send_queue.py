"""What waits to be sent, and what goes next. Pure: whoever drives it says what has room.

The baselines that Geryon is compared with differ only here. A flow's queue is first in, first out
(`Order.READY`: Geryon, whose network does the rest), goes by when forward needs it with little
under way (`Order.URGENT`: P3, a priority queue at the sender), or sends in the order of forward and
nothing before its turn (`Order.FORWARD`: TICTAC, an enforced global order).
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

LITTLE = 1 << 20
"""Bytes under way, where what is handed over cannot be overtaken any more and should be little."""


class Order(enum.Enum):
    """In which order a sender sends."""

    READY = "ready"
    URGENT = "urgent"
    FORWARD = "forward"


class Flow(NamedTuple):
    """To whom, in which class, by which link: the paper's local ID in ``channel_table``."""

    peer: int
    urgency: int
    link: int = 0


@dataclass(slots=True)
class _Queue(Generic[Item]):
    """What waits for one flow, and what is on its way there.

    Attributes:
        flow: whose it is.
        rank: by what queues are served: the most urgent class first.
        waiting: bytes and item, as they came; or, by urgency, a heap that begins with the position.
        under_way: bytes, and whether they have arrived.
    """

    flow: Flow
    rank: tuple[int, int, int]
    waiting: Any
    under_way: deque[tuple[int, Callable[[], bool]]] = field(default_factory=deque)
    under_way_bytes: int = 0


class Outbox(Generic[Item]):
    """Queues by flow."""

    def __init__(self, order: Order = Order.READY, little: int = LITTLE) -> None:
        self._urgent = order is Order.URGENT
        self._little = little
        self._queues: dict[Flow, _Queue[Item]] = {}
        self._busy: list[_Queue[Item]] = []  # those where something waits, by rank
        self._count = itertools.count()
        self.waiting = 0

    def add(self, flow: Flow, position: int, nbytes: int, item: Item) -> None:
        """Let something wait; ``position`` is its place in the order of forward."""
        queue = self._queues.get(flow)
        if queue is None:
            waiting: Any = [] if self._urgent else deque()
            queue = _Queue(flow, (flow.urgency, flow.peer, flow.link), waiting)
            self._queues[flow] = queue
        if not queue.waiting:
            bisect.insort(self._busy, queue, key=_RANK)
        if self._urgent:
            heapq.heappush(queue.waiting, (position, next(self._count), nbytes, item))
        else:
            queue.waiting.append((nbytes, item))
        self.waiting += 1

    def flush(
        self,
        room: Callable[[Flow], int],
        send: Callable[[Flow, Item], Callable[[], bool]],
        ready: Callable[[Item], bool] = lambda _: True,
    ) -> None:
        """Send what has room, the most urgent class first.

        Args:
            room: the bytes that a flow takes now.
            send: sends, and returns what tells whether it has arrived.
            ready: whether something is there to be sent; with `Order.FORWARD` what is behind
                something that is not waits too, otherwise all is.
        """
        drain = self._by_urgency if self._urgent else self._in_order
        emptied = False
        for queue in self._busy:
            drain(queue, room, send, ready)
            emptied |= not queue.waiting
        if emptied:
            self._busy = [queue for queue in self._busy if queue.waiting]

    def _in_order(
        self,
        queue: _Queue[Item],
        room: Callable[[Flow], int],
        send: Callable[[Flow, Item], Callable[[], bool]],
        ready: Callable[[Item], bool],
    ) -> None:
        """Send from one queue as it came."""
        waiting, flow = queue.waiting, queue.flow
        while waiting:
            nbytes, item = waiting[0]
            if room(flow) < nbytes or not ready(item):
                break
            waiting.popleft()
            self.waiting -= 1
            send(flow, item)

    def _by_urgency(
        self,
        queue: _Queue[Item],
        room: Callable[[Flow], int],
        send: Callable[[Flow, Item], Callable[[], bool]],
        ready: Callable[[Item], bool],
    ) -> None:
        """Send from one queue by position while little is under way."""
        waiting, flow = queue.waiting, queue.flow
        while waiting and self._may(queue):
            _, _, nbytes, item = waiting[0]
            if room(flow) < nbytes or not ready(item):
                break
            heapq.heappop(waiting)
            self.waiting -= 1
            queue.under_way.append((nbytes, send(flow, item)))
            queue.under_way_bytes += nbytes

    def _may(self, queue: _Queue[Item]) -> bool:
        while queue.under_way and queue.under_way[0][1]():
            queue.under_way_bytes -= queue.under_way.popleft()[0]
        return queue.under_way_bytes < self._little


_RANK = operator.attrgetter("rank")
