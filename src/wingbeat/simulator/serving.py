"""Exchange with parameter servers in virtual time, without payloads.

The counterpart of `wingbeat.methods.parameter_server.exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from wingbeat.methods.parameter_server.coding import MAX_HEADER_BYTES
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import Kind, Order
from wingbeat.methods.parameter_server.slicing import KIND_OF, RequestPlanner, Slice
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cards import Cards
from wingbeat.simulator.client import Client, Part, Request
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.coding import Coding
from wingbeat.simulator.mailbox import LIMITS, Room
from wingbeat.simulator.model import ITEMSIZE, Buckets
from wingbeat.simulator.server import Server
from wingbeat.simulator.traffic import Traffic
from wingbeat.types import Layout


class ServerExchange:
    """One worker's pushes and pulls.

    ``rank`` seeds the random order of pulls. Servers are numbered after the ``workers``.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        options: Servers,
        servers: int,
        buckets: Buckets,
        client: Client,
        links: int,
        coding: Coding,
    ) -> None:
        self._workers, self._client = workers, client
        self._coding, self._dense = coding, options.dense
        self._planner = RequestPlanner(options, servers, rank, (1 / links,) * links)
        largest = LIMITS.message // ITEMSIZE
        if coding.ratio < 1:  # a header is added, and sums may be dense
            largest = (LIMITS.message - MAX_HEADER_BYTES) // ITEMSIZE
        self._planner.set_buckets(
            buckets.numel, buckets.forward, buckets.fully_connected, buckets.places, largest
        )
        self._last: dict[int, Request] = {}

    def sizes(self) -> list[tuple[int, int]]:
        """Return for each slice the bytes of its gradients, and the encoded bytes of its sum."""
        return [(len(each) * ITEMSIZE, self._back(each)) for each in self._planner.slices()]

    def _out(self, each: Slice) -> int:
        return math.ceil(len(each) * self._coding.ratio) * ITEMSIZE

    def _back(self, each: Slice) -> int:
        return len(each) * ITEMSIZE if self._dense else self._out(each)

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:  # noqa: ARG002
        """Start to push or pull a bucket; servers maintain the order themselves."""
        for number in self._planner.begin(operation, bucket):
            self._begin(KIND_OF[operation], number)

    def under_way(self, bucket: int) -> Sequence[Request]:
        """Return the operation that was started last on a bucket."""
        return [self._last[bucket]] if bucket in self._last else []

    def _begin(self, kind: Kind, bucket: int) -> None:
        parts = [
            Part(
                self._workers + each.slice.server,
                each.ids,
                self._out(each.slice),
                self._back(each.slice),
                len(each.slice) * ITEMSIZE,
                each.urgency,
                each.position,
            )
            for each in self._planner.requests(bucket)
        ]
        self._last[bucket] = self._client.start(kind, parts)


def hire(
    options: Servers,
    layout: Layout,
    buckets: Buckets,
    links: Links,
    work: Work,
    agenda: Agenda,
    traffic: Traffic | None = None,
    coding: Coding | None = None,
) -> tuple[list[ServerExchange], Room]:
    """Start the servers in host order, and connect every worker to them."""
    workers = layout.workers
    servers = options.count or workers
    # Servers share the workers' hosts in turn.
    cards = Cards(agenda, links, lambda number: layout.host_of[number % workers], traffic=traffic)
    room = Room(agenda, cards, options.classes, links.count)
    coding = coding or Coding()
    numbers = range(workers, workers + servers)
    order = Order(options.sending)
    byte_s = work.message_s_per_byte + work.encrypt_s_per_byte * options.encrypted
    exchanges = []
    for rank in range(workers):
        pushes = Order.URGENT if order is Order.URGENT else Order.READY
        client = Client(agenda, room.open(rank, numbers), work, pushes, byte_s, coding)
        exchanges.append(
            ServerExchange(rank, workers, options, servers, buckets, client, links.count, coding)
        )
    sizes = exchanges[0].sizes()
    for number in numbers:
        mailbox = room.open(number, range(workers))
        Server(agenda, mailbox, work, order, byte_s, workers, sizes, coding)
    room.meet()
    return exchanges, room
