"""DeAR: reduce-scatter during backward (BackPipe), all-gather during the next forward (FeedPipe).

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", 2023, section III-B. Unlike the authors' code, all all-gathers are queued at once, so
that connections never idle, and a due update is made before the parameters are read.
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


class Dear:
    """Splits each all-reduce in two, and each optimizer step by bucket.

    One round of all-gathers follows the reduce-scatters of every backward, even if a worker drops
    its gradients or reads them alone. The collectives of all workers therefore match.

    ``at_once`` queues all-gathers as backward ends, so that a worker can read its gradients while
    others wait. Once gradients are changed in parts, between the two halves, the step queues them.
    """

    whole_after_backward: ClassVar[bool] = False

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.at_once = True
        self._gathering = False
        self._forward: tuple[int, ...] = ()
        self._due: set[int] = set()
        self._dropped = False

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        match event:
            case Planned(forward):
                self._forward = forward
            case BackwardBegins():
                yield from self._update(self._forward)
                if self.phase is Phase.REDUCED:
                    yield from self._gather()  # accumulates into them
                elif self._dropped:  # also detects differing steps
                    yield from self._wait()
                self.phase, self._dropped = Phase.IDLE, False
                yield Show()
            case BucketReady(bucket):
                yield Start(Operation.REDUCE_SCATTER, bucket)
            case BackwardEnds(looked_at):
                self.phase, self._gathering = Phase.REDUCED, False
                if self.at_once or looked_at:
                    yield from self._start_gathers()
            case _:
                yield from self._use(event)

    def _use(self, event: Event) -> Commands:
        """Dispose of the gradients of a finished backward."""
        match event:
            case ParametersNeeded(buckets):
                yield from self._update(buckets)
            case GradientsNeeded():
                yield from self._make_whole()
            case PartsNeeded():
                yield from self._hold_gathers()
            case GradientsDropped():
                if self.phase is Phase.REDUCED:
                    yield from self._start_gathers()  # other workers may need them
                    self._dropped = True
                self.phase = Phase.IDLE
            case StepCalled(in_parts):
                if in_parts and self.phase is Phase.REDUCED:
                    self.phase = Phase.IDLE
                    yield from self._defer()
                else:
                    yield from self._step_at_once()

    def _defer(self) -> Iterator[Command]:
        """FeedPipe: defer the update of every bucket until it is needed."""
        yield from self._start_gathers()
        for bucket in self._forward:
            self._due.add(bucket)
            yield Defer(bucket)

    def _step_at_once(self) -> Iterator[Command]:
        yield from self._update(self._forward)
        yield from self._make_whole()
        self.phase = Phase.IDLE
        yield Show()
        yield Step()

    def _update(self, buckets: Iterable[int]) -> Iterator[Command]:
        for bucket in buckets:
            if bucket in self._due:
                yield Wait(bucket)
                self._due.remove(bucket)
                yield Update(bucket)

    def _make_whole(self) -> Iterator[Command]:
        if self.phase is Phase.REDUCED:
            yield from self._gather()
            self.phase = Phase.WHOLE
            yield Show()

    def _gather(self) -> Iterator[Command]:
        yield from self._start_gathers()
        yield from self._wait()

    def _wait(self) -> Iterator[Command]:
        for bucket in self._forward:
            yield Wait(bucket)

    def _start_gathers(self) -> Iterator[Command]:
        """Queue all all-gathers, first needed first, unless they are queued."""
        if not self._gathering:
            for bucket in self._forward:
                yield Start(Operation.ALL_GATHER, bucket, chained=True)
        self._gathering = True

    def _hold_gathers(self) -> Iterator[Command]:
        """Defer all-gathers from now on; if they are in flight, wait for whole gradients."""
        self.at_once = False
        if self.phase is Phase.REDUCED and self._gathering:
            yield from self._make_whole()
        elif self.phase is Phase.REDUCED:
            for bucket in self._forward:
                yield Wait(bucket, whole=False)
