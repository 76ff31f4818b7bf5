"""Delayed sums: gradients are pushed during backward and needed by the next forward.

Geryon (Wang et al., 2020), section II-A: workers push gradients while backward runs and pull what
forward needs. With ``pull="start"``, as in the paper's Eqs. 1 to 5, a sum is requested when the
next iteration starts; with ``pull="ready"`` it is sent as soon as it is complete, so that
connections carry both directions at the same time. In both cases each bucket is updated just before
the layer that needs it.
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
    """One operation for each bucket during backward, whose result is awaited when it is needed."""

    whole_after_backward: ClassVar[bool] = False
    operation: ClassVar[Operation] = Operation.ALL_REDUCE

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._forward: tuple[int, ...] = ()
        self._due: set[int] = set()
        self._asked = self._dropped = False

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        match event:
            case Planned(forward):
                self._forward = forward
            case BackwardBegins():
                yield from self._update(self._forward)
                # Backward accumulates into them; dropping workers also detect differing steps.
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
        if looked_at:  # a waiting reader needs the sum, not the pushed gradients
            yield from self._ask()

    def _drop(self) -> Iterator[Command]:
        if self.phase is Phase.UNDER_WAY:
            yield from self._ask()  # the next push must follow all workers' pushes of these
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
        """Request the sums that are not sent automatically, first needed first."""
        yield from ()


class ServedAtStart(Served):
    """As `Served`, but servers keep each sum until it is requested."""

    operation: ClassVar[Operation] = Operation.PUSH

    def _ask(self) -> Iterator[Command]:
        if self._asked:
            return
        self._asked = True
        for bucket in self._forward:
            yield Start(Operation.PULL, bucket)
