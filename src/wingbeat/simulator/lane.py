"""A link's thread in virtual time, with the state machine of the real executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from wingbeat.collectives import program as programs
from wingbeat.collectives.program import Machine, Task
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.network import Carrier, Key

if TYPE_CHECKING:
    from wingbeat.collectives.program import Program, Transfer


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
                    self._network.announce(self._inward(task, transfer))
                case programs.AwaitChunk(task, transfer):
                    if not self._network.take(self._inward(task, transfer), self._go):
                        self._blocked = command
                        return
                    self._spend(self._price_of(task, transfer))
                    return
                case programs.SendChunk(task, transfer):
                    self._hand(task, transfer)
                    self._spend(self._work.chunk_s)
                    return
                case programs.Complete(task):
                    self._complete(task)
                case programs.Idle():
                    self._resting = True
                    return

    def _spend(self, seconds: float) -> None:
        self._agenda.at(self._agenda.now + seconds, self._go)

    def _price_of(self, task: Collective, transfer: Transfer) -> float:
        seconds = self._work.chunk_s
        if transfer.reduce:
            seconds += len(transfer.span) * task.itemsize * self._work.add_s_per_byte
        return seconds

    def _hand(self, task: Collective, transfer: Transfer) -> None:
        to, link = transfer.peer, transfer.link
        source, target = (self._rank, link), (self._rank if self._alike else to, link)
        key = self._key(self._rank, to, task, transfer)
        self._network.hand(key, source, target, int(len(transfer.span) * task.itemsize))

    def _inward(self, task: Collective, transfer: Transfer) -> Key:
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
