"""A worker in virtual time: its training thread and the lanes of its links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from wingbeat.collectives.program import compile_collective
from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Event,
    ParametersNeeded,
    Planned,
    Schedule,
    Start,
    Step,
    StepCalled,
    Update,
    Wait,
)
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.lane import Collective, Lane
from wingbeat.simulator.model import Buckets, Model
from wingbeat.simulator.network import Network

if TYPE_CHECKING:
    from wingbeat.topologies import Topology

ITEMSIZE = 4
Pause = float | Collective
"""What a training thread waits for: so many seconds, or a collective."""

Note = Callable[[float, int, str, int], None]
"""Called with a moment, a rank, what happens there, and to which bucket (-1: to none)."""


class Worker:
    """Runs iterations of forward, backward and step, as the schedule has it.

    Args:
        rank: this worker's number.
        slow: what its layers' times are multiplied by.
        alike: whether this worker stands for all others too.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        model: Model,
        buckets: Buckets,
        schedule: Schedule,
        topology: Topology,
        links: Links,
        work: Work,
        agenda: Agenda,
        network: Network,
        note: Note,
        slow: float = 1.0,
        alike: bool = False,
    ) -> None:
        self._rank, self._workers = rank, workers
        self._model, self._buckets, self._schedule = model, buckets, schedule
        self._topology, self._work, self._agenda, self._note = topology, work, agenda, note
        self._slow = slow
        self._weights = (1.0,) * links.count
        self._lanes = [
            Lane(rank, lane, agenda, network, work, workers if alike else 0)
            for lane in range(links.count)
        ]
        self._last: dict[int, list[Collective]] = {}
        self.ends: list[float] = []
        self._thread: Iterator[Pause] = iter(())

    def begin(self, iterations: int) -> None:
        """Start training at this moment."""
        self._thread = self._train(iterations)
        self._agenda.at(self._agenda.now, self._go)

    def check_through(self, iterations: int) -> None:
        """Make sure that nothing is left that this worker waits for."""
        assert len(self.ends) == iterations, (
            f"rank {self._rank} waits for ever in iteration {len(self.ends)}: the workers' "
            "collectives do not match"
        )

    def _go(self) -> None:
        for pause in self._thread:
            if isinstance(pause, Collective):
                if not pause.over:
                    pause.when_over(self._go)
                    return
            elif pause > 0:
                self._agenda.at(self._agenda.now + pause, self._go)
                return

    def _train(self, iterations: int) -> Iterator[Pause]:
        yield from self._tell(Planned(self._buckets.forward))
        for _ in range(iterations):
            yield from self._forward()
            yield from self._backward()
            yield from self._tell(StepCalled())
            self.ends.append(self._agenda.now)
        yield from self._tell(ParametersNeeded(self._buckets.forward))

    def _forward(self) -> Iterator[Pause]:
        for layer in self._model.layers:
            if layer.tensors:
                needed = dict.fromkeys(self._buckets.of[t] for t in layer.tensors)
                yield from self._tell(ParametersNeeded(tuple(needed)))
            yield layer.forward_s * self._slow

    def _backward(self) -> Iterator[Pause]:
        missing = list(self._buckets.members)
        ready, begun = 0, False
        for layer in reversed(self._model.layers):
            sizes = {t: self._model.tensors[t].numel for t in reversed(layer.tensors)}
            seconds = layer.backward_s * self._slow
            if not sizes:
                yield seconds
            for tensor, numel in sizes.items():
                yield seconds * numel / sum(sizes.values())
                if not begun:
                    begun = True
                    yield from self._tell(BackwardBegins())
                yield numel * ITEMSIZE * self._work.fill_s_per_byte
                missing[self._buckets.of[tensor]] -= 1
                while ready < len(missing) and missing[ready] == 0:
                    yield from self._tell(BucketReady(ready))
                    ready += 1
        yield from self._tell(BackwardEnds())

    def _tell(self, event: Event) -> Iterator[Pause]:
        """Do what the schedule has to say to ``event``."""
        for command in self._schedule.react(event):
            match command:
                case Start():
                    self._start(command)
                case Wait(bucket):
                    yield from self._last.get(bucket, ())
                case Update(bucket):
                    self._note(self._agenda.now, self._rank, "update", bucket)
                    yield self._update_s(self._buckets.numel[bucket])
                case Step():
                    self._note(self._agenda.now, self._rank, "step", -1)
                    yield self._update_s(sum(self._buckets.numel))

    def _update_s(self, numel: int) -> float:
        return numel * ITEMSIZE * self._work.update_s_per_byte

    def _start(self, command: Start) -> None:
        bucket = command.bucket
        self._note(self._agenda.now, self._rank, command.operation.value, bucket)
        numel = -(-self._buckets.numel[bucket] // self._workers) * self._workers
        programs = compile_collective(
            command.operation.value,
            self._topology,
            self._rank,
            self._workers,
            numel,
            ITEMSIZE,
            self._weights,
        )
        before = self._last.get(bucket) if command.chained else None
        self._last[bucket] = [
            lane.submit(program, ITEMSIZE, before[number] if before else None)
            for number, (lane, program) in enumerate(zip(self._lanes, programs, strict=True))
        ]
