"""Exchange by servers in virtual time: what `wingbeat.exchanges.servers` does, without bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from wingbeat.schedules.events import Operation
from wingbeat.servers.outbox import Order
from wingbeat.servers.partition import Slice, partitioned, placed
from wingbeat.servers.protocol import Ids, Kind, wish_of
from wingbeat.servers.tables import PriorityTable
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cards import Cards
from wingbeat.simulator.client import Client, Part, Request
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.mailbox import LIMITS, Room
from wingbeat.simulator.model import ITEMSIZE, Buckets
from wingbeat.simulator.server import Server
from wingbeat.types import Serving

_KINDS = {
    Operation.ALL_REDUCE: Kind.PUSH,
    Operation.PUSH: Kind.STORE,
    Operation.PULL: Kind.PULL,
}


class ServerExchange:
    """One worker's pushes and pulls.

    Args:
        rank: its own; pulls in random order follow from it.
        workers: how many there are; servers are numbered behind them.
        serving: how gradients go to the servers.
        servers: how many there are.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        serving: Serving,
        servers: int,
        buckets: Buckets,
        client: Client,
    ) -> None:
        self._workers, self._serving, self._client = workers, serving, client
        self._random = random.Random(rank)
        self._slices: list[list[Slice]] = [[] for _ in buckets.numel]
        for each in sliced(serving, buckets.numel, servers):
            self._slices[each.bucket].append(each)
        self._places = {bucket: place for place, bucket in enumerate(buckets.forward)}
        self._rounds = [-1] * len(buckets.numel)
        self._classes = PriorityTable(len(buckets.numel), serving.thresholds)
        self._asked: list[int] = []
        self._last: dict[int, Request] = {}

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:  # noqa: ARG002
        """Begin to push or pull a bucket; servers keep the order by themselves."""
        if operation is Operation.PULL and self._serving.shuffled:
            self._asked.append(bucket)
            if len(self._asked) == len(self._slices):
                self._random.shuffle(self._asked)
                for each in self._asked:
                    self._begin(operation, each)
                self._asked = []
            return
        self._begin(operation, bucket)

    def under_way(self, bucket: int) -> Sequence[Request]:
        """Return what was started last on a bucket."""
        return [self._last[bucket]] if bucket in self._last else []

    def _begin(self, operation: Operation, bucket: int) -> None:
        kind = _KINDS[operation]
        if kind is not Kind.PULL:
            self._rounds[bucket] += 1
        place = self._places[bucket]
        back = self._classes[place]
        out = back if self._serving.pushes else len(self._serving.thresholds)
        wish = wish_of(back, place)
        parts = [
            Part(
                self._workers + each.server,
                Ids(0, each.number, self._rounds[bucket], wish),
                len(each) * ITEMSIZE,
                out,
                place,
            )
            for each in self._slices[bucket]
        ]
        self._last[bucket] = self._client.start(kind, parts)


def sliced(serving: Serving, sizes: Sequence[int], servers: int) -> tuple[Slice, ...]:
    """Cut buckets of so many elements for the servers."""
    largest = LIMITS.message // ITEMSIZE
    if serving.whole:
        return placed(sizes, servers, largest)
    return partitioned(sizes, servers, min(serving.slice or largest, largest))


def hire(
    serving: Serving, workers: int, buckets: Buckets, links: Links, work: Work, agenda: Agenda
) -> tuple[list[ServerExchange], Room]:
    """Start the servers, one worker's host after the other, and connect every worker to them.

    Returns:
        Each worker's exchange, by rank, and the mailboxes of all.
    """
    servers = serving.count or workers
    # Each worker has a host of its own; servers sit on them in turn.
    cards = Cards(agenda, links, lambda number: number if number < workers else number % workers)
    room = Room(agenda, cards, len(serving.thresholds) + 1)
    numbers = range(workers, workers + servers)
    order = Order(serving.order)
    byte_s = work.message_s_per_byte + work.encrypt_s_per_byte * serving.encrypted
    exchanges = []
    for rank in range(workers):
        pushes = Order.URGENT if order is Order.URGENT else Order.READY
        client = Client(agenda, room.open(rank, numbers), work, pushes, byte_s)
        exchanges.append(ServerExchange(rank, workers, serving, servers, buckets, client))
    for number in numbers:
        Server(agenda, room.open(number, range(workers)), work, order, byte_s, workers)
    room.meet()
    return exchanges, room
