"""DeAR with a sharded optimizer: the all-gather carries parameters instead of gradients.

After the reduce-scatter of DeAR's BackPipe (section III-B) each worker has the whole gradient of
its own blocks. It updates only these parameters, as ZeRO does, and FeedPipe gathers the new ones:
the same bytes, with 1 / P of the optimizer's state and arithmetic.

The step updates blocks immediately, because a parameter must be updated before it is gathered.
Deferring would not shorten forward, which first needs the bucket that is reduced last.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence

from wingbeat.schedules.dear import Dear
from wingbeat.schedules.events import (
    Announce,
    Await,
    BackwardBegins,
    BackwardEnds,
    Command,
    Commands,
    Defer,
    Event,
    Forget,
    GradientsDropped,
    GradientsNeeded,
    Operation,
    OthersStep,
    PartsNeeded,
    Phase,
    Place,
    Planned,
    Share,
    Start,
    StepCalled,
    Update,
    UpdateOwn,
    Wait,
)
from wingbeat.schedules.intents import Answer, Intent

Agreeing = Generator[Command, Answer | None, Answer]


class ShardedDear(Dear):
    """Gathers gradients or parameters, as the workers agree.

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
            for bucket in self._forward:
                yield Wait(bucket, whole=False)
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
            for bucket in self._forward:
                fresh = self._members[bucket] & answer.used
                if fresh:
                    yield Place(bucket)
                    yield Start(Operation.ALL_GATHER_PARAMETERS, bucket)
                    yield Defer(bucket, fresh)
                    self._due.add(bucket)
            yield Forget(answer.used)
        self.phase = Phase.IDLE

    def _update_own(self, buckets: Sequence[int], used: frozenset[int]) -> Iterator[Command]:
        for bucket in buckets:
            yield Wait(bucket, whole=False, read_only=True)
            yield UpdateOwn(bucket, used)

    def _update(self, buckets: Iterable[int]) -> Iterator[Command]:
        """Adopt gathered parameters."""
        for bucket in buckets:
            if bucket in self._due:
                yield Wait(bucket, whole=False, read_only=True)
                self._due.remove(bucket)
                yield Update(bucket)
