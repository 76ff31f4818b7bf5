"""Schedules without deferred updates: exchanges during backward, and steps made at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Command,
    Commands,
    Event,
    GradientsDropped,
    Operation,
    Phase,
    Planned,
    Show,
    Start,
    Step,
    StepCalled,
    Wait,
)


class Wfbp:
    """Wait-free backpropagation, as in DDP and Horovod: gradients are whole after backward."""

    whole_after_backward: ClassVar[bool] = True

    def __init__(self, operation: Operation = Operation.ALL_REDUCE) -> None:
        self.phase = Phase.IDLE
        self._operation = operation
        self._buckets: tuple[int, ...] = ()
        self._open = False

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        match event:
            case Planned(forward):
                self._buckets = tuple(sorted(forward))
            case BackwardBegins():
                self.phase = Phase.IDLE
            case BucketReady(bucket):
                self._open = True
                yield Start(self._operation, bucket)
            case BackwardEnds():
                yield from self._wait()
                self.phase, self._open = Phase.WHOLE, False
                yield Show()
            case GradientsDropped():
                self.phase = Phase.IDLE
                if self._open:  # during backward collectives write to the buffers
                    yield from self._wait(whole=False)
            case StepCalled():
                self.phase = Phase.IDLE
                yield Step()

    def _wait(self, whole: bool = True) -> Iterator[Command]:
        for bucket in self._buckets:
            yield Wait(bucket, whole)


class Stale:
    """Bounded staleness (Canary, 5.3): a step applies the sums that have arrived.

    `wingbeat.methods.bounded_staleness` enforces the staleness bound when a step is made.
    """

    whole_after_backward: ClassVar[bool] = False

    def __init__(self) -> None:
        self.phase = Phase.IDLE

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        match event:
            case BackwardBegins() | GradientsDropped():
                self.phase = Phase.IDLE
            case BucketReady(bucket):
                yield Start(Operation.CONTRIBUTE, bucket)
            case BackwardEnds():
                self.phase = Phase.UNDER_WAY
            case StepCalled():
                self.phase = Phase.IDLE
                yield Step()
