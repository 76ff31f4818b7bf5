"""The order of partitions: its messages, and the machines that decide and follow it. No I/O.

ByteScheduler (Peng et al., SOSP 2019): each bucket is divided into partitions. Those of ready
buckets wait in a queue by priority, which is the place of the bucket in forward. A partition starts
when it is the first and the credit, a limit of the bytes in flight, allows it. All-reduces must
start in the same order on all workers, but buckets become ready at different times. So rank 0 alone
has the queue, and the others start what it names once their own gradients are ready.

A machine is given events, and returns the partitions to start, in order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from wingbeat import schema
from wingbeat.schema import MalformedMessage, Messages, Payload, Word
from wingbeat.types import Span, blocks_of

MAX_EARLY = 1 << 16
"""Maximum names for the next plan that are kept until this worker has it."""


class Kind(schema.Kind):
    """Kinds of messages, which rank 0 sends to all others."""

    NEXT = 1, "the partition to all-reduce next"
    FAILED = 2, "rank 0 has failed, for this reason (in UTF-8)"


class Partition(NamedTuple):
    """A part of a bucket in an iteration.

    Attributes:
        plan: number of the plan of buckets, from 1.
        round: number of earlier sums of the bucket under this plan.
        bucket: number of the bucket.
        number: number of the partition in the bucket.
    """

    plan: Word
    round: Word
    bucket: Word
    number: Word

    def __str__(self) -> str:
        return f"partition {self.number} of bucket {self.bucket}"


class Reason(NamedTuple):
    """A failure.

    Attributes:
        text: the reason.
    """

    text: Payload


MESSAGES = Messages({Kind.NEXT: Partition, Kind.FAILED: Reason})


def divide(numel: int, itemsize: int, most: int) -> list[Span]:
    """Divide a bucket of ``numel`` elements evenly into partitions of at most ``most`` bytes.

    >>> [len(each) for each in divide(10, itemsize=4, most=16)]
    [3, 3, 4]
    """
    each = max(1, most // itemsize)
    return blocks_of(numel, max(1, -(-numel // each)))


class Machine(Protocol):
    """One worker's decisions about the order.

    Attributes:
        leads: whether it decides the order for all.
    """

    leads: bool

    def plan(self, sizes: Sequence[Sequence[int]], forward: Sequence[int]) -> None:
        """Use other buckets. No bucket is ready, and no partition in flight.

        ``sizes`` has the bytes of each partition, by bucket; ``forward`` the buckets, first needed
        first.
        """

    def ready(self, bucket: int) -> list[Partition]:
        """Accept a bucket's gradients. All partitions of its previous round are summed."""

    def summed(self, partition: Partition) -> list[Partition]:
        """Accept that the all-reduce of a partition has ended."""


class Leader:
    """Rank 0: the queue by priority, and the ``credit`` in bytes."""

    leads = True

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._in_flight = self._plan = 0
        self._queue: list[tuple[int, int, Partition]] = []
        self._sizes: Sequence[Sequence[int]] = ()
        self._place: dict[int, int] = {}
        self._rounds: list[int] = []

    def plan(self, sizes: Sequence[Sequence[int]], forward: Sequence[int]) -> None:
        """As `Machine.plan`."""
        assert not self._queue, f"{self._queue[0][2]} is in the queue"
        assert not self._in_flight, f"{self._in_flight} bytes are in flight"
        self._plan += 1
        self._sizes, self._rounds = sizes, [0] * len(sizes)
        self._place = {bucket: place for place, bucket in enumerate(forward)}

    def ready(self, bucket: int) -> list[Partition]:
        """As `Machine.ready`."""
        for number in range(len(self._sizes[bucket])):
            each = Partition(self._plan, self._rounds[bucket], bucket, number)
            heapq.heappush(self._queue, (self._place[bucket], number, each))
        self._rounds[bucket] += 1
        return self._start()

    def summed(self, partition: Partition) -> list[Partition]:
        """As `Machine.summed`."""
        self._in_flight -= self._size(partition)
        return self._start()

    def _start(self) -> list[Partition]:
        started = []
        while self._queue:
            size = self._size(self._queue[0][2])
            # Alone it always starts: flags may make a partition larger than the whole credit.
            if self._in_flight and self._in_flight + size > self._credit:
                break
            self._in_flight += size
            started.append(heapq.heappop(self._queue)[2])
        return started

    def _size(self, partition: Partition) -> int:
        return self._sizes[partition.bucket][partition.number]


class Follower:
    """Another rank: starts the partitions that rank 0 names, in this order.

    A named partition whose bucket is not ready delays those behind it. Rank 0 may have the next
    plan earlier; what it names of that is kept until `plan`.
    """

    leads = False

    def __init__(self) -> None:
        self._plan = 0
        self._counts: list[int] = []
        self._ready: list[int] = []  # by bucket: rounds of which gradients were ready
        self._rounds: list[int] = []  # by bucket: rounds that were named completely
        self._named: list[set[int]] = []  # by bucket: partitions of the next round
        self._waiting: deque[Partition] = deque()
        self._early: list[Partition] = []

    def plan(self, sizes: Sequence[Sequence[int]], forward: Sequence[int]) -> None:  # noqa: ARG002
        """As `Machine.plan`; a `MalformedMessage` for an earlier name that is not allowed."""
        assert not self._waiting, f"{self._waiting[0]} is named and not started"
        self._plan += 1
        self._counts = [len(each) for each in sizes]
        self._ready, self._rounds = [0] * len(sizes), [0] * len(sizes)
        self._named = [set() for _ in sizes]
        early, self._early = self._early, []
        for each in early:
            self.name(each)  # which starts nothing, as no bucket is ready

    def ready(self, bucket: int) -> list[Partition]:
        """As `Machine.ready`."""
        self._ready[bucket] += 1
        return self._start()

    def summed(self, partition: Partition) -> list[Partition]:  # noqa: ARG002
        """As `Machine.summed`; rank 0 counts the credit."""
        return []

    def name(self, partition: Partition) -> list[Partition]:
        """Accept the partition that rank 0 names; a `MalformedMessage` if it is not allowed."""
        if partition.plan == self._plan + 1 and len(self._early) < MAX_EARLY:
            self._early.append(partition)
            return []
        self._check(partition)
        bucket = partition.bucket
        self._named[bucket].add(partition.number)
        if len(self._named[bucket]) == self._counts[bucket]:
            self._named[bucket] = set()
            self._rounds[bucket] += 1
        self._waiting.append(partition)
        return self._start()

    def _check(self, partition: Partition) -> None:
        plan, number, bucket, place = partition
        if plan != self._plan:
            raise MalformedMessage(f"{partition} of plan {plan}; this worker has plan {self._plan}")
        if bucket >= len(self._counts):
            raise MalformedMessage(f"{partition}: there are {len(self._counts)} buckets")
        if place >= self._counts[bucket]:
            raise MalformedMessage(f"{partition}, which has {self._counts[bucket]} partitions")
        due = self._rounds[bucket]
        if number != due:
            raise MalformedMessage(f"{partition} in round {number}; round {due} is due")
        if place in self._named[bucket]:
            raise MalformedMessage(f"{partition} is named twice")

    def _start(self) -> list[Partition]:
        started = []
        while self._waiting and self._waiting[0].round < self._ready[self._waiting[0].bucket]:
            started.append(self._waiting.popleft())
        return started
