"""Sums that arrive later: gradients are pushed under backward, and needed by the next forward.

Geryon (Wang et al., 2020), section II-A: workers push gradients while backward goes on and pull
what forward needs. With ``pull="start"``, as in the paper's Eqs. 1 to 5, a sum is asked for when
the next iteration starts; with ``pull="ready"`` it comes as soon as it is complete, so that links
carry both directions at the same time. Either way each bucket's update is made just before the
layer that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Command,
    Commands,
    Defer,
    Event,
    GradientsDropped,
    GradientsNeeded,
    Operation,
    ParametersNeeded,
    PartsNeeded,
    Phase,
    Planned,
    Show,
    Start,
    Step,
    StepCalled,
    Update,
    Wait,
)


class Served:
    """One operation a bucket, under backward, whose result is waited for when it is needed.

    Attributes:
        phase: where the gradients of the last backward are.
    """

    whole_after_backward: ClassVar[bool] = False
    operation: ClassVar[Operation] = Operation.ALL_REDUCE

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._forward: tuple[int, ...] = ()
        self._due: set[int] = set()
        self._asked = self._dropped = False

    def react(self, event: Event) -> Commands:
        """Yield what is to be done now that ``event`` has happened."""
        match event:
            case Planned(forward):
                self._forward = forward
            case BackwardBegins():
                yield from self._update(self._forward)
                # This backward adds to them; or a worker that uses none is to see if steps differ.
                if self.phase is Phase.UNDER_WAY or self._dropped:
                    yield from self._wait()
                self.phase, self._dropped = Phase.IDLE, False
                yield Show()
            case BucketReady(bucket):
                yield Start(self.operation, bucket)
            case BackwardEnds(looked_at):
                yield from self._end(looked_at)
            case ParametersNeeded(buckets):
                yield from self._update(buckets)
            case GradientsNeeded() | PartsNeeded():
                yield from self._make_whole()
            case GradientsDropped():
                yield from self._drop()
            case StepCalled(in_parts):
                yield from self._step(in_parts)

    def _end(self, looked_at: bool) -> Iterator[Command]:
        self.phase, self._asked = Phase.UNDER_WAY, False
        if looked_at:  # whoever waits for a bucket is to have its sum, and not what was sent
            yield from self._ask()

    def _drop(self) -> Iterator[Command]:
        if self.phase is Phase.UNDER_WAY:
            yield from self._ask()  # the next may only be pushed when everybody has pushed these
            self._dropped = True
        self.phase = Phase.IDLE

    def _step(self, in_parts: bool) -> Iterator[Command]:
        if in_parts and self.phase is Phase.UNDER_WAY:
            self.phase = Phase.IDLE
            yield from self._ask()
            for bucket in self._forward:
                self._due.add(bucket)
                yield Defer(bucket)
            return
        yield from self._update(self._forward)
        yield from self._make_whole()
        self.phase = Phase.IDLE
        yield Show()
        yield Step()

    def _make_whole(self) -> Iterator[Command]:
        if self.phase is Phase.UNDER_WAY:
            yield from self._wait()
            self.phase = Phase.WHOLE
            yield Show()

    def _wait(self) -> Iterator[Command]:
        yield from self._ask()
        for bucket in self._forward:
            yield Wait(bucket)

    def _update(self, buckets: Iterable[int]) -> Iterator[Command]:
        for bucket in buckets:
            if bucket in self._due:
                yield Wait(bucket)
                self._due.remove(bucket)
                yield Update(bucket)

    def _ask(self) -> Iterator[Command]:
        """Ask for the sums that do not come by themselves, first needed first."""
        yield from ()


class ServedAtStart(Served):
    """As `Served`, but each sum stays where it was made until it is asked for."""

    operation: ClassVar[Operation] = Operation.PUSH

    def _ask(self) -> Iterator[Command]:
        if self._asked:
            return
        self._asked = True
        for bucket in self._forward:
            yield Start(Operation.PULL, bucket)
