"""Exchanges in virtual time, and the one along a topology: programs in the lanes of links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wingbeat import topologies
from wingbeat.collectives import program as programs
from wingbeat.collectives.program import (
    DIRECT_BYTES,
    DIRECT_RANKS,
    NATIVE_CHUNK_BYTES,
    Machine,
    Task,
    compile_collective,
)
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Coding, Links, Traffic, Work
from wingbeat.simulator.model import ITEMSIZE, Buckets
from wingbeat.simulator.network import Carrier, Key
from wingbeat.topologies import Hierarchical, Mesh, Ring
from wingbeat.types import Layout

if TYPE_CHECKING:
    from wingbeat.collectives.program import Program, Transfer
    from wingbeat.simulator.mailbox import Mailboxes
    from wingbeat.topologies import Topology


class Collective(Task):
    """One collective of one worker in one lane; its ``number`` is equal on every worker."""

    def __init__(
        self, program: Program, number: int, itemsize: float, after: Collective | None
    ) -> None:
        super().__init__(program, after)
        self.number = number
        self.itemsize = itemsize
        self.over = False
        self.waiters: list[Callable[[], None]] = []

    def when_over(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when the result can be read."""
        self.waiters.append(resume)


class Alike(NamedTuple):
    """Workers that act identically: each as the one ``period`` ranks before it, modulo ``workers``.

    What a worker sends to the k-th after it then equals what the k-th before it sends to it, so the
    first ``period`` workers represent all.
    """

    workers: int
    period: int

    def represented(self, source: int, target: int) -> tuple[int, int]:
        """Return the sender that represents ``source``, and the receiver of what it sends then."""
        first = source % self.period
        return first, (target - source + first) % self.workers


class Lane:
    """Performs the commands of its machine at their costs.

    With ``alike`` all hosts act identically, and those of the first represent the others; see
    `Alike`.
    """

    def __init__(
        self,
        rank: int,
        lane: int,
        agenda: Agenda,
        network: Carrier,
        work: Work,
        alike: Alike | None = None,
    ) -> None:
        self._rank = rank
        self._lane = lane
        self._alike = alike
        self._agenda = agenda
        self._network = network
        self._work = work
        self._machine: Machine[Collective] = Machine()
        self._commands: Iterator[programs.Command[Collective]] = self._machine.commands()
        self._blocked: programs.AwaitChunk[Collective] | None = None
        self._resting = True
        self._submitted = 0

    def submit(self, program: Program, itemsize: float, after: Collective | None) -> Collective:
        """Queue a program."""
        exchange = Collective(program, self._submitted, itemsize, after)
        self._submitted += 1
        self._machine.submit(exchange)
        if self._resting:
            self._resting = False
            self._agenda.at(self._agenda.now, self._go)
        return exchange

    def _go(self) -> None:
        """Run all commands that take no time, and start one that does."""
        while True:
            command = self._blocked or next(self._commands)
            self._blocked = None
            match command:
                case programs.PostReceive(task, transfer):
                    self._network.announce(self._receive_key(task, transfer))
                case programs.AwaitChunk(task, transfer):
                    if not self._network.receive(self._receive_key(task, transfer), self._go):
                        self._blocked = command
                        return
                    self._wait(self._receive_s(task, transfer))
                    return
                case programs.SendChunk(task, transfer):
                    self._send_chunk(task, transfer)
                    self._wait(self._send_s(task, transfer))
                    return
                case programs.Complete(task):
                    self._complete(task)
                case programs.Idle():
                    self._resting = True
                    return

    def _wait(self, seconds: float) -> None:
        self._agenda.at(self._agenda.now + seconds, self._go)

    def _send_s(self, task: Collective, transfer: Transfer) -> float:
        return self._work.chunk_s + self._far(task, transfer) * self._work.wire_s_per_byte

    def _receive_s(self, task: Collective, transfer: Transfer) -> float:
        added = self._far(task, transfer) if transfer.reduce else 0.0
        return self._send_s(task, transfer) + added * self._work.add_s_per_byte

    def _far(self, task: Collective, transfer: Transfer) -> float:
        """Return the bytes of a transfer between hosts; 0 if it stays on this one."""
        if self._network.near(self._rank, transfer.peer):
            return 0.0
        return len(transfer.span) * task.itemsize

    def _send_chunk(self, task: Collective, transfer: Transfer) -> None:
        to, link = transfer.peer, transfer.link
        source = self._rank, link
        target = (to % self._alike.period if self._alike else to), link
        key = self._key(self._rank, to, task, transfer)
        self._network.send(key, source, target, int(len(transfer.span) * task.itemsize))

    def _receive_key(self, task: Collective, transfer: Transfer) -> Key:
        return self._key(transfer.peer, self._rank, task, transfer)

    def _key(self, source: int, target: int, task: Collective, transfer: Transfer) -> Key:
        if self._alike:
            source, target = self._alike.represented(source, target)
        return source, target, transfer.link, self._lane, task.number, transfer.tag

    def _complete(self, task: Collective) -> None:
        task.over = True
        waiters, task.waiters = task.waiters, []
        for resume in waiters:
            self._agenda.at(self._agenda.now, resume)


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
    """Collectives of one worker along a topology."""

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
        alike: Alike | None = None,
    ) -> None:
        self._rank, self._workers, self._buckets = rank, workers, buckets
        self._topology = topology
        self._speeds = (links.bytes_per_s,) * links.count
        ring = isinstance(topology, Ring | Hierarchical) and not getattr(topology, "direct", False)
        self._direct = ring and workers <= DIRECT_RANKS
        self._lanes = [
            Lane(rank, lane, agenda, network, work, alike) for lane in range(links.count)
        ]
        self._last: dict[int, list[Collective]] = {}

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:
        """Start an operation on a bucket."""
        workers, topology, speeds, what = (
            self._workers, self._topology, self._speeds, operation.value,
        )  # fmt: skip
        numel = -(-self._buckets.numel[bucket] // workers) * workers
        # As `wingbeat.collectives.Collectives` does with small buffers.
        if self._direct and numel * ITEMSIZE <= DIRECT_BYTES:
            topology, speeds = Mesh(), speeds[:1]
            if operation is Operation.ALL_REDUCE and workers * numel * ITEMSIZE <= DIRECT_BYTES:
                what, numel = Operation.ALL_GATHER.value, workers * numel
        least, most = NATIVE_CHUNK_BYTES
        programs = compile_collective(
            what, topology, self._rank, workers, numel, ITEMSIZE, speeds, least, None, most
        )
        before = self._last.get(bucket) if chained else None
        self._last[bucket] = [
            lane.submit(program, ITEMSIZE, before[number] if before else None)
            for number, (lane, program) in enumerate(zip(self._lanes, programs, strict=False))
        ]

    def under_way(self, bucket: int) -> Sequence[Waitable]:
        """Return the operation that was started last on a bucket."""
        return self._last.get(bucket, ())


def period_of(topology: Topology, layout: Layout) -> int:
    """Return the number of workers that represent all if hosts are alike; 0 if none do.

    One worker does if it has no neighbours on its host or no other hosts, else those of a host.
    """
    each = len(layout.hosts[0])
    if not topology.symmetric or layout != Layout.even(len(layout.hosts), each):
        return 0
    return 1 if len(layout.hosts) == 1 else each


class SimulatedExchanges(NamedTuple):
    """The exchange of each simulated worker, and the mailboxes, if there are any."""

    workers: Sequence[Exchange]
    mailboxes: Mailboxes | None = None


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """What an exchange part makes exchanges from (`ExchangePart.build_simulated`).

    ``topology`` is the name of the strategy's. ``alike``: all workers and links are. ``traffic``
    and ``coding`` are those of `wingbeat.simulator.simulate`.
    """

    topology: str
    layout: Layout
    buckets: Buckets
    links: Links
    work: Work
    agenda: Agenda
    network: Carrier
    alike: bool
    traffic: Traffic | None
    coding: Coding

    def collectives(self) -> SimulatedExchanges:
        """Return collectives along the topology."""
        workers = self.layout.workers
        topology = topologies.fitted(self.topology, self.layout, self.links.count)
        period = period_of(topology, self.layout) if self.alike else 0
        alike = Alike(workers, period) if period else None
        return SimulatedExchanges(
            [
                Collectives(
                    rank,
                    workers,
                    self.buckets,
                    topology,
                    self.links,
                    self.work,
                    self.agenda,
                    self.network,
                    alike,
                )
                for rank in range(period or workers)
            ]
        )
