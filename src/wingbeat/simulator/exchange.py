"""Exchanges in virtual time, and the one along a topology: programs in the lanes of links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from wingbeat.collectives.program import compile_collective, least_message
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.lane import Collective, Lane
from wingbeat.simulator.model import ITEMSIZE, Buckets
from wingbeat.simulator.network import Carrier

if TYPE_CHECKING:
    from wingbeat.topologies import Topology


class Waitable(Protocol):
    """An operation in flight; ``over`` once its result can be read."""

    over: bool

    def when_over(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when the operation is complete."""


class Exchange(Protocol):
    """The interface on which a worker's schedule starts operations."""

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:
        """Start an operation on a bucket."""

    def under_way(self, bucket: int) -> Sequence[Waitable]:
        """Return the operation that was started last on a bucket."""


class Collectives:
    """Collectives of one worker along a topology.

    With ``alike`` this worker represents all others. ``partitions`` is the number of partitions of
    a bucket, of which each iteration gathers one (`exchanges.partial`): 0 for the number of
    workers, None if buckets are summed.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        buckets: Buckets,
        topology: Topology,
        links: Links,
        work: Work,
        agenda: Agenda,
        network: Carrier,
        alike: bool = False,
        partitions: int | None = None,
    ) -> None:
        self._rank, self._workers, self._buckets = rank, workers, buckets
        self._topology = topology
        self._partitions = workers if partitions == 0 else partitions
        self._speeds = (links.bytes_per_s,) * links.count
        self._lanes = [
            Lane(rank, lane, agenda, network, work, workers if alike else 0)
            for lane in range(links.count)
        ]
        self._last: dict[int, list[Collective]] = {}

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:
        """Start an operation on a bucket."""
        what, numel = operation.value, self._buckets.numel[bucket]
        numel = -(-numel // self._workers) * self._workers
        if self._partitions is not None:
            what = Operation.ALL_GATHER.value
            numel = self._workers * self._row(bucket, self._partitions)
        programs = compile_collective(
            what,
            self._topology,
            self._rank,
            self._workers,
            numel,
            ITEMSIZE,
            self._speeds,
            least_message(self._speeds),
        )
        before = self._last.get(bucket) if chained else None
        self._last[bucket] = [
            lane.submit(program, ITEMSIZE, before[number] if before else None)
            for number, (lane, program) in enumerate(zip(self._lanes, programs, strict=True))
        ]

    def _row(self, bucket: int, partitions: int) -> int:
        """Return the elements that a worker sends: a part, flags, and counts."""
        buckets = self._buckets
        return -(-buckets.numel[bucket] // partitions) + buckets.members[bucket] + self._workers

    def under_way(self, bucket: int) -> Sequence[Waitable]:
        """Return the operation that was started last on a bucket."""
        return self._last.get(bucket, ())
