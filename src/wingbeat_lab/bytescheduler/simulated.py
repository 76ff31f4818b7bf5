"""Partitions in virtual time: the machines of a real run, on simulated all-reduces.

Names take the latency of the links, and the time of a thread that sends or receives a message: rank
0 sends one to each worker. They are a few bytes, so they are not part of the traffic.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.exchange import (
    Exchange,
    Later,
    SimulatedExchanges,
    SimulationContext,
    when_all,
)
from wingbeat.simulator.model import ITEMSIZE, Buckets
from wingbeat.simulator.network import LOCAL
from wingbeat.simulator.processors import Cores
from wingbeat_lab.bytescheduler.order import Follower, Leader, Machine, Partition, divide


@dataclass(eq=False)
class _Sum:
    """The sum of a bucket, of which ``missing`` partitions are not there."""

    missing: int
    over: Later


@dataclass(eq=False)
class PartitionedExchange(Exchange):
    """One worker's partitions.

    ``inner`` all-reduces those of bucket b under the numbers from ``first[b]`` on; there are
    ``counts[b]``. For each partition the thread works for ``begin_s``, then calls ``name``, and the
    all-reduce starts ``delay_s`` later.
    """

    machine: Machine
    inner: Exchange
    agenda: Agenda
    cores: Cores
    first: Sequence[int]
    counts: Sequence[int]
    begin_s: float
    delay_s: float
    name: Callable[[Partition], None]
    _sums: dict[int, _Sum] = field(default_factory=dict)
    _starting: deque[Partition] = field(default_factory=deque)

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:  # noqa: ARG002
        """Accept a bucket that is ready."""
        assert operation is Operation.ALL_REDUCE, operation
        self._sums[bucket] = _Sum(self.counts[bucket], Later(self.agenda))
        self.perform(self.machine.ready(bucket))

    def under_way(self, bucket: int) -> Sequence[Later]:
        """Return the last sum of a bucket."""
        return [self._sums[bucket].over] if bucket in self._sums else []

    def perform(self, partitions: Sequence[Partition]) -> None:
        """Start these partitions one after the other, in this order."""
        for each in partitions:
            self._starting.append(each)
            if len(self._starting) == 1:
                self.cores.work(self.begin_s, self._begin)

    def _begin(self) -> None:
        each = self._starting.popleft()
        if self._starting:
            self.cores.work(self.begin_s, self._begin)
        self.name(each)
        self.agenda.at(self.agenda.now + self.delay_s, partial(self._all_reduce, each))

    def _all_reduce(self, partition: Partition) -> None:
        number = self.first[partition.bucket] + partition.number
        self.inner.start(Operation.ALL_REDUCE, number, False)
        when_all(self.inner.under_way(number), partial(self._complete, partition))

    def _complete(self, partition: Partition) -> None:
        self.perform(self.machine.summed(partition))
        total = self._sums[partition.bucket]
        total.missing -= 1
        if not total.missing:
            total.over.end()


def build_exchanges(context: SimulationContext, most: int, credit: int) -> SimulatedExchanges:
    """Make exchanges with partitions of at most ``most`` bytes, and ``credit`` bytes in flight.

    Where some workers represent all, these start a partition when the last worker has its name.
    """
    layout, buckets, work, agenda = context.layout, context.buckets, context.work, context.agenda
    cuts = [[len(span) for span in divide(n, ITEMSIZE, most)] for n in buckets.numel]
    counts = [len(each) for each in cuts]
    inner = replace(context, buckets=_pieces(buckets, cuts)).collectives().workers
    first = [0, *itertools.accumulate(counts)]
    sizes = [[ITEMSIZE * numel for numel in each] for each in cuts]
    delays = [_delay_s(context, rank) for rank in range(layout.workers)]
    if len(inner) < layout.workers:
        delays = [max(delays)] * len(inner)
    followers: list[tuple[float, Follower, PartitionedExchange]] = []

    def name(partition: Partition) -> None:
        for delay_s, machine, exchange in followers:
            agenda.at(agenda.now + delay_s, partial(_receive, machine, exchange, partition))

    made = []
    for rank, each in enumerate(inner):
        leads = rank == 0
        machine: Machine = Leader(credit) if leads else Follower()
        machine.plan(sizes, buckets.forward)
        # Rank 0 sends a name to each other worker, and these receive it.
        messages = layout.workers - 1 if leads else 1
        exchange = PartitionedExchange(
            machine,
            each,
            agenda,
            context.cores[layout.host_of[rank]],
            first,
            counts,
            begin_s=messages * work.message_s + work.start_s,
            delay_s=delays[0] if leads else 0.0,
            name=name if leads else lambda _: None,
        )
        if isinstance(machine, Follower):
            followers.append((delays[rank], machine, exchange))
        made.append(exchange)
    return SimulatedExchanges(made)


def _pieces(buckets: Buckets, cuts: Sequence[Sequence[int]]) -> Buckets:
    """Return partitions as buckets, for collectives, which know no others."""
    numel = tuple(itertools.chain.from_iterable(cuts))
    parameters = buckets.parameters and tuple(
        own for own, each in zip(buckets.parameters, cuts, strict=True) for _ in each
    )
    return replace(buckets, numel=numel, parameters=parameters)


def _receive(machine: Follower, exchange: PartitionedExchange, partition: Partition) -> None:
    exchange.perform(machine.name(partition))


def _delay_s(context: SimulationContext, rank: int) -> float:
    """Return the seconds on the way of what rank 0 names; 0 to itself."""
    here, there = (context.layout.host_of[worker] for worker in (0, rank))
    if here == there:
        return LOCAL.latency_s if rank else 0.0
    return context.links.latency(here, there)
