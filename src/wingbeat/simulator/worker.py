"""A worker in virtual time: its training thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.exchange import Exchange, Waitable
from wingbeat.simulator.model import ITEMSIZE, Buckets, Model

Pause = float | Waitable
"""What a training thread waits for: seconds, or an operation."""

Sleeps = Callable[[int, int], float]
"""Maps a worker and an iteration, counted from 1, to the seconds of sleep before it."""

Note = Callable[[float, int, str, int], None]
"""Called with time, rank, action, and bucket (-1: none)."""


class Worker:
    """Runs iterations of forward, backward and step with its schedule.

    ``slow`` is a factor of the layers' times.
    """

    def __init__(
        self,
        rank: int,
        model: Model,
        buckets: Buckets,
        schedule: Schedule,
        exchange: Exchange,
        work: Work,
        agenda: Agenda,
        note: Note,
        slow: float = 1.0,
        sleeps: Sleeps = lambda _rank, _iteration: 0.0,
    ) -> None:
        self._rank, self._model, self._buckets = rank, model, buckets
        self._schedule, self._exchange = schedule, exchange
        self._work, self._agenda, self._note = work, agenda, note
        self._slow, self._sleeps = slow, sleeps
        self.ends: list[float] = []
        self._thread: Iterator[Pause] = iter(())

    def begin(self, iterations: int) -> None:
        """Start training now."""
        self._thread = self._train(iterations)
        self._agenda.at(self._agenda.now, self._go)

    def check_through(self, iterations: int) -> None:
        """Validate that this worker waits for nothing."""
        assert len(self.ends) == iterations, (
            f"rank {self._rank} waits for ever in iteration {len(self.ends)}: the workers' "
            "collectives do not match"
        )

    def _go(self) -> None:
        for pause in self._thread:
            if isinstance(pause, (int, float)):
                if pause > 0:
                    self._agenda.at(self._agenda.now + pause, self._go)
                    return
            elif not pause.over:
                pause.when_over(self._go)
                return

    def _train(self, iterations: int) -> Iterator[Pause]:
        yield from self._tell(Planned(self._buckets.forward))
        for iteration in range(1, iterations + 1):
            yield self._sleeps(self._rank, iteration)
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
        """Perform the commands of the schedule for ``event``."""
        for command in self._schedule.react(event):
            match command:
                case Start():
                    self._start(command)
                case Wait(bucket):
                    yield from self._exchange.under_way(bucket)
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
        self._exchange.start(command.operation, bucket, command.chained)
