"""Bounded staleness: gradients are sent during backward without waiting for a sum (Canary, 5.3)."""

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
    """Sends each bucket as it completes; a step applies the sums that have arrived.

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
