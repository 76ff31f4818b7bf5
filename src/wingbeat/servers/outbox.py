"""What waits to be sent, and what goes next. Pure: whoever drives it says what has room.

The baselines that Geryon is compared with differ only here. A flow's queue is first in, first out
(`Order.READY`: Geryon, whose network does the rest), goes by when forward needs it with little
under way (`Order.URGENT`: P3, a priority queue at the sender), or sends in the order of forward and
nothing before its turn (`Order.FORWARD`: TICTAC, an enforced global order).
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

LITTLE = 1 << 20
"""Bytes under way, where what is handed over cannot be overtaken any more and should be little."""


class Order(enum.Enum):
    """In which order a sender sends."""

    READY = "ready"
    URGENT = "urgent"
    FORWARD = "forward"


class Flow(NamedTuple):
    """To whom, and in which class: the paper's local ID in ``channel_table``."""

    peer: int
    urgency: int


@dataclass(slots=True)
class _Queue(Generic[Item]):
    """What waits for one flow, and what is on its way there."""

    waiting: list[tuple[int, int, int, Item]] = field(default_factory=list)
    under_way: deque[tuple[int, Callable[[], bool]]] = field(default_factory=deque)
    under_way_bytes: int = 0


class Outbox(Generic[Item]):
    """Queues by flow."""

    def __init__(self, order: Order = Order.READY, little: int = LITTLE) -> None:
        self._order = order
        self._little = little
        self._queues: dict[Flow, _Queue[Item]] = {}
        self._count = itertools.count()
        self.waiting = 0

    def add(self, flow: Flow, position: int, nbytes: int, item: Item) -> None:
        """Let something wait; ``position`` is its place in the order of forward."""
        queue = self._queues.setdefault(flow, _Queue())
        number = next(self._count)
        first = position if self._order is Order.URGENT else number
        heapq.heappush(queue.waiting, (first, number, nbytes, item))
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
        for flow in sorted(self._queues, key=lambda f: (f.urgency, f.peer)):
            queue = self._queues[flow]
            while queue.waiting and self._may(queue) and room(flow) >= queue.waiting[0][2]:
                if not ready(queue.waiting[0][3]):
                    break
                _, _, nbytes, item = heapq.heappop(queue.waiting)
                self.waiting -= 1
                arrived = send(flow, item)
                if self._order is Order.URGENT:
                    queue.under_way.append((nbytes, arrived))
                    queue.under_way_bytes += nbytes

    def _may(self, queue: _Queue[Item]) -> bool:
        if self._order is not Order.URGENT:
            return True
        while queue.under_way and queue.under_way[0][1]():
            queue.under_way_bytes -= queue.under_way.popleft()[0]
        return queue.under_way_bytes < self._little
