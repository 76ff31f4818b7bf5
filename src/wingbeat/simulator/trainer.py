"""The training thread of a worker under bounded staleness, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.colayers import Bundled, Coding
from wingbeat.simulator.cores import Busy, Cores
from wingbeat.simulator.model import ITEMSIZE
from wingbeat.simulator.staleness import Log
from wingbeat.simulator.worker import Sleeps


class Machine(Protocol):
    """The methods of `wingbeat.methods.bounded_staleness.worker.Worker` that training calls.

    ``iteration`` is the current or requested iteration, ``zeta`` the latest that any worker has
    entered. ``dropped`` has iterations ended by the rule, and the number of their colayers that
    were sent.
    """

    iteration: int
    zeta: int
    dropped: list[tuple[int, int]]

    def can_begin(self) -> bool:
        """Whether the requested iteration may be computed."""

    def begin_iteration(self) -> int:
        """Enter the requested iteration and return it."""

    def send_colayer(self, colayer: int, payloads: Sequence[Any]) -> bool:
        """Send the pieces of a colayer; return whether they were sent."""

    def end_iteration(self) -> None:
        """End the iteration."""

    def take_round(self) -> tuple[PieceSum, ...] | None:
        """Return the next round to apply."""


class Trainer:
    """Runs iterations as the machine permits.

    The backward of a dropped iteration runs to its end, because autograd cannot be stopped.
    ``cores`` run the copying of gradients and the updates; the model itself runs on a device.
    """

    def __init__(
        self,
        rank: int,
        machine: Machine,
        posted: Callable[[], None],
        model: Bundled,
        coding: Coding,
        workers: int,
        work: Work,
        agenda: Agenda,
        cores: Cores,
        log: Log,
        sleeps: Sleeps,
    ) -> None:
        self._cores = cores
        self._rank, self._machine, self._posted = rank, machine, posted
        self._model, self._agenda, self._log, self._sleeps = model, agenda, log, sleeps
        self._payloads = (None,) * workers
        fill_s = work.fill_s_per_byte + coding.encode_s_per_byte
        self._fill_s = tuple(Busy(numel * ITEMSIZE * fill_s) for numel in model.numel)
        step_s = work.update_s_per_byte + coding.decode_s_per_byte
        self._step_s = Busy(sum(model.numel) * ITEMSIZE * step_s)
        self._since: float | None = None
        self._thread = self._train()
        agenda.at(agenda.now, self._go)

    def heard(self) -> None:
        """Check again whether a waiting iteration may begin."""
        if self._since is not None:
            self._log.waited_s[self._rank] += self._agenda.now - self._since
            self._since = None
            self._go()

    def _go(self) -> None:
        for seconds in self._thread:
            if seconds is None:
                self._since = self._agenda.now
                return
            if isinstance(seconds, Busy) and seconds > 0:
                self._cores.work(seconds, self._go)
                return
            if seconds > 0:
                self._agenda.at(self._agenda.now + seconds, self._go)
                return

    def _train(self) -> Iterator[float | None]:
        count = 0
        while True:
            count += 1
            yield from self._between()
            self._log.began(self._rank, self._machine.begin_iteration())
            self._posted()
            yield self._sleeps(self._rank, count)
            yield self._model.forward_s
            yield from self._backward()

    def _between(self) -> Iterator[float | None]:
        """Apply arrived rounds, and wait until the staleness bound permits the next iteration."""
        while True:
            while (parts := self._machine.take_round()) is not None:
                yield self._step_s
                self._log.applied(self._rank, parts)
                self._posted()
            if self._machine.can_begin():
                return
            yield None

    def _backward(self) -> Iterator[float]:
        sends = True
        for colayer, seconds in enumerate(self._model.backward_s):
            yield seconds
            if sends:
                yield self._fill_s[colayer]
            sends = self._machine.send_colayer(colayer, self._payloads)
            self._posted()
        yield self._model.rest_s
        if sends:
            self._log.ended(self._machine.zeta - self._machine.iteration)
        self._machine.end_iteration()
        self._posted()
