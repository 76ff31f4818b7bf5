"""DeAR: reduce-scatter during backward (BackPipe), all-gather during the next forward (FeedPipe).

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", 2023, section III-B. Unlike the authors' code, all all-gathers are queued at once, so
that connections never idle, and a due update is made before the parameters are read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import ClassVar

from wingbeat.schedules.events import (
    Announce,
    Await,
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Command,
    Commands,
    Defer,
    Event,
    Forget,
    GradientsDropped,
    GradientsNeeded,
    Operation,
    OthersStep,
    ParametersNeeded,
    PartsNeeded,
    Phase,
    Place,
    Planned,
    Share,
    Show,
    Start,
    Step,
    StepCalled,
    Update,
    UpdateOwn,
    Wait,
)
from wingbeat.schedules.intents import Answer, Intent


class Dear:
    """Splits each all-reduce in two, and each optimizer step by bucket.

    One round of all-gathers follows the reduce-scatters of every backward, even if a worker drops
    its gradients or reads them alone. The collectives of all workers therefore match.

    ``at_once`` queues all-gathers as backward ends, so that a worker can read its gradients while
    others wait. Once gradients are changed in parts, between the two halves, the step queues them.
    """

    whole_after_backward: ClassVar[bool] = False
    launched: ClassVar[Phase] = Phase.REDUCED
    operation: ClassVar[Operation] = Operation.REDUCE_SCATTER
    completion: ClassVar[Operation | None] = Operation.ALL_GATHER

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
                if self.phase is self.launched:
                    yield from self._gather()  # accumulates into them
                elif self._dropped:  # also detects differing steps
                    yield from self._wait()
                self.phase, self._dropped = Phase.IDLE, False
                yield Show()
            case BucketReady(bucket):
                yield Start(self.operation, bucket)
            case BackwardEnds(looked_at):
                self.phase, self._gathering = self.launched, False
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
                if self.phase is self.launched:
                    yield from self._start_gathers()  # other workers may need them
                    self._dropped = True
                self.phase = Phase.IDLE
            case StepCalled(in_parts=True) if self.phase is self.launched:
                self.phase = Phase.IDLE
                yield from self._start_gathers()
                for bucket in self._forward:  # FeedPipe
                    self._due.add(bucket)
                    yield Defer(bucket)
            case StepCalled():
                yield from self._update(self._forward)
                yield from self._make_whole()
                self.phase = Phase.IDLE
                yield Show()
                yield Step()

    def _update(self, buckets: Iterable[int]) -> Iterator[Command]:
        for bucket in buckets:
            if bucket in self._due:
                yield self._wait_for_update(bucket)
                self._due.remove(bucket)
                yield Update(bucket)

    def _wait_for_update(self, bucket: int) -> Wait:
        return Wait(bucket)

    def _make_whole(self) -> Iterator[Command]:
        if self.phase is self.launched:
            yield from self._gather()
            self.phase = Phase.WHOLE
            yield Show()

    def _gather(self) -> Iterator[Command]:
        yield from self._start_gathers()
        yield from self._wait()

    def _wait(self, whole: bool = True) -> Iterator[Command]:
        for bucket in self._forward:
            yield Wait(bucket, whole)

    def _start_gathers(self) -> Iterator[Command]:
        """Queue all all-gathers, first needed first, unless they are queued."""
        if self.completion is not None and not self._gathering:
            for bucket in self._forward:
                yield Start(
                    self.completion, bucket, chained=self.completion is Operation.ALL_GATHER
                )
        self._gathering = True

    def _hold_gathers(self) -> Iterator[Command]:
        """Defer all-gathers from now on; if they are in flight, wait for whole gradients."""
        self.at_once = False
        if self.phase is Phase.REDUCED and self._gathering:
            yield from self._make_whole()
        elif self.phase is Phase.REDUCED:
            yield from self._wait(whole=False)


Agreeing = Generator[Command, Answer | None, Answer]


class ShardedDear(Dear):
    """DeAR with a sharded optimizer: gathers gradients or parameters, as the workers agree.

    After the reduce-scatter each worker has the whole gradient of its own blocks. It updates only
    these parameters, as ZeRO does, and FeedPipe gathers the new ones: the same bytes, with 1 / P of
    the optimizer's state and arithmetic. The step updates blocks immediately, because a parameter
    must be updated before it is gathered. Deferring would not shorten forward, which first needs
    the bucket that is reduced last.

    Each worker announces how it will use its gradients before it does so. If any worker only reads
    them, all gather them first; any other difference is an error on all workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_once = False
        self._members: tuple[frozenset[int], ...] = ()

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        match event:
            case Planned(forward, members):
                self._forward, self._members = forward, members
            case BackwardBegins():
                if self.phase is not Phase.IDLE:
                    yield from self._agree(Intent.ADD)
                yield from super().react(event)
            case BackwardEnds(looked_at, lost):
                yield from super().react(BackwardEnds())
                if lost:
                    self.phase = Phase.LOST
                elif looked_at:
                    yield from self._agree(Intent.LOOK)
            case _:
                yield from super().react(event)

    def _use(self, event: Event) -> Commands:
        match event:
            case GradientsNeeded():
                if self.phase is Phase.REDUCED:
                    yield from self._agree(Intent.LOOK)
            case PartsNeeded(intent):
                if self.phase is Phase.REDUCED:
                    yield from self._agree(intent)
                yield from super()._use(event)
            case GradientsDropped():
                yield from self._drop()
            case StepCalled(used=used):
                yield from self._step(Intent.STEP, used)
            case OthersStep():
                yield from self._step(Intent.FOLLOW, frozenset())
            case _:
                yield from super()._use(event)

    def _agree(
        self,
        intent: Intent,
        used: frozenset[int] = frozenset(),
        meanwhile: Iterator[Command] | None = None,
    ) -> Agreeing:
        """Announce this worker's intent; first gather gradients for the workers that read them."""
        while True:
            yield Announce(intent, used)
            if meanwhile is not None:
                yield from meanwhile  # an iterator: empty the second time
            answer = yield Await()
            assert answer is not None, "who performs Await has to answer"
            if not answer.wants_whole:
                answer.check()
                return answer
            yield from self._make_whole()
            if intent in (Intent.LOOK, Intent.CLIP, Intent.SCALE):
                return answer

    def _drop(self) -> Commands:
        if self.phase is not Phase.IDLE:
            yield from self._agree(Intent.DROP)
            yield from self._wait(whole=False)
            if self.phase is Phase.REDUCED:
                yield Forget()
        self.phase = Phase.IDLE

    def _step(self, intent: Intent, used: frozenset[int]) -> Commands:
        """Update this worker's blocks of each bucket, then gather the new parameters.

        If its own gradients require an update, the update overlaps with transfers and the
        announcements of other workers.
        """
        yield from self._update(self._forward)
        buckets = sorted(self._forward)
        reduced = self.phase is Phase.REDUCED
        certain = [b for b in buckets if reduced and self._members[b] <= used]
        answer = yield from self._agree(intent, used, self._update_own(certain, used))
        if Intent.STEP in answer.doing:
            if answer.followed:
                yield Share(answer)
            rest = [b for b in buckets if b not in certain]
            yield from self._update_own(rest, answer.used)
            yield Forget(answer.used)
            for bucket in self._forward:
                fresh = self._members[bucket] & answer.used
                if fresh:
                    yield Place(bucket)
                    yield Start(Operation.ALL_GATHER_PARAMETERS, bucket)
                    yield Defer(bucket, fresh)
                    self._due.add(bucket)
        self.phase = Phase.IDLE

    def _update_own(self, buckets: Sequence[int], used: frozenset[int]) -> Iterator[Command]:
        for bucket in buckets:
            yield Wait(bucket, whole=False, read_only=True)
            yield UpdateOwn(bucket, used)

    def _wait_for_update(self, bucket: int) -> Wait:
        return Wait(bucket, whole=False, read_only=True)  # gathered parameters
