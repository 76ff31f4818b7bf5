"""Bounded staleness: gradients leave under backward, and nobody waits for a sum (Canary, 5.3)."""

from __future__ import annotations

from typing import ClassVar

from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Commands,
    Event,
    GradientsDropped,
    Operation,
    Phase,
    Start,
    Step,
    StepCalled,
)


class Stale:
    """Sends each bucket as it completes; a step applies the sums that have come by then.

    How far workers may be apart is decided when a step is made, by
    `wingbeat.methods.bounded_staleness`.

    Attributes:
        phase: where the gradients of the last backward are; between backward and step under way.
    """

    whole_after_backward: ClassVar[bool] = False

    def __init__(self) -> None:
        self.phase = Phase.IDLE

    def react(self, event: Event) -> Commands:
        """Yield what is to be done now that ``event`` has happened."""
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
