"""Wait-free backpropagation: whole all-reduces under backward, as DDP and Horovod do."""

from __future__ import annotations

from collections.abc import Iterator

from wingbeat.schedules.events import (
    BackwardEnds,
    BucketReady,
    Command,
    Event,
    Operation,
    Planned,
    Show,
    Start,
    Step,
    StepCalled,
    Wait,
)


class Wfbp:
    """All-reduces each bucket as it completes; gradients are whole when backward returns."""

    def __init__(self) -> None:
        self._buckets: tuple[int, ...] = ()

    def react(self, event: Event) -> Iterator[Command]:
        """Yield what is to be done now that ``event`` has happened."""
        match event:
            case Planned(forward):
                self._buckets = tuple(sorted(forward))
            case BucketReady(bucket):
                yield Start(Operation.ALL_REDUCE, bucket)
            case BackwardEnds():
                for bucket in self._buckets:
                    yield Wait(bucket)
                yield Show()
            case StepCalled():
                yield Step()
