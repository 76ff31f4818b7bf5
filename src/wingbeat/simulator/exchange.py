"""Exchanges in virtual time, and the one along a topology: programs in the lanes of links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wingbeat import topologies
from wingbeat.collectives import program as programs
from wingbeat.collectives.program import Machine, Task, compile_collective, least_message
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Coding, Links, Traffic, Work
from wingbeat.simulator.model import ITEMSIZE, Buckets
from wingbeat.simulator.network import Carrier, Key

if TYPE_CHECKING:
    from wingbeat.collectives.program import Program, Transfer
    from wingbeat.simulator.mailbox import Mailboxes
    from wingbeat.topologies import Topology
    from wingbeat.types import Layout


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


class Lane:
    """Performs the commands of its machine at their costs.

    ``alike`` is the number of workers that act identically; what this one sends to the k-th worker
    after it then equals what it receives from the k-th before it. 0: workers differ.
    """

    def __init__(
        self, rank: int, lane: int, agenda: Agenda, network: Carrier, work: Work, alike: int = 0
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
                    self._wait(self._work.chunk_s)
                    return
                case programs.Complete(task):
                    self._complete(task)
                case programs.Idle():
                    self._resting = True
                    return

    def _wait(self, seconds: float) -> None:
        self._agenda.at(self._agenda.now + seconds, self._go)

    def _receive_s(self, task: Collective, transfer: Transfer) -> float:
        seconds = self._work.chunk_s
        if transfer.reduce:
            seconds += len(transfer.span) * task.itemsize * self._work.add_s_per_byte
        return seconds

    def _send_chunk(self, task: Collective, transfer: Transfer) -> None:
        to, link = transfer.peer, transfer.link
        source, target = (self._rank, link), (self._rank if self._alike else to, link)
        key = self._key(self._rank, to, task, transfer)
        self._network.send(key, source, target, int(len(transfer.span) * task.itemsize))

    def _receive_key(self, task: Collective, transfer: Transfer) -> Key:
        return self._key(transfer.peer, self._rank, task, transfer)

    def _key(self, source: int, target: int, task: Collective, transfer: Transfer) -> Key:
        if self._alike:
            source, target = 0, (target - source) % self._alike
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
    """Collectives of one worker along a topology.

    With ``alike`` this worker represents all others.
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
    ) -> None:
        self._rank, self._workers, self._buckets = rank, workers, buckets
        self._topology = topology
        self._speeds = (links.bytes_per_s,) * links.count
        self._lanes = [
            Lane(rank, lane, agenda, network, work, workers if alike else 0)
            for lane in range(links.count)
        ]
        self._last: dict[int, list[Collective]] = {}

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:
        """Start an operation on a bucket."""
        programs = compile_collective(
            operation.value,
            self._topology,
            self._rank,
            self._workers,
            -(-self._buckets.numel[bucket] // self._workers) * self._workers,
            ITEMSIZE,
            self._speeds,
            least_message(self._speeds),
        )
        before = self._last.get(bucket) if chained else None
        self._last[bucket] = [
            lane.submit(program, ITEMSIZE, before[number] if before else None)
            for number, (lane, program) in enumerate(zip(self._lanes, programs, strict=True))
        ]

    def under_way(self, bucket: int) -> Sequence[Waitable]:
        """Return the operation that was started last on a bucket."""
        return self._last.get(bucket, ())


class SimulatedExchanges(NamedTuple):
    """The exchange of each simulated worker, and the mailboxes, if there are any."""

    workers: Sequence[Exchange]
    mailboxes: Mailboxes | None = None


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """What an exchange part makes exchanges from (`ExchangePart.build_simulated`).

    ``topology`` is the name of the strategy's. ``alike``: all workers act identically. ``traffic``
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
        # Identical workers act as rank 0 does, so rank 0 represents all.
        alike = topology.symmetric and self.alike
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
                for rank in range(1 if alike else workers)
            ]
        )
