"""Server-side updates: servers keep gradients and return parameters (Geryon, section II-A).

A step uses the sums that the servers hold. If gradients are read before, all workers pull the sums,
and the step sends the content of ``p.grad`` instead. As in `ShardedDear`, each worker first
announces how it will use its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from wingbeat.schedules.events import (
    BackwardBegins,
    BucketReady,
    Command,
    Commands,
    Defer,
    Event,
    Forget,
    GradientsNeeded,
    Hand,
    Operation,
    PartsNeeded,
    Phase,
    Start,
    UpdateServers,
)
from wingbeat.schedules.intents import Intent
from wingbeat.schedules.sharded import ShardedDear


class ServedUpdates(ShardedDear):
    """Pushes during backward; pulls sums if they are read, and parameters after a step.

    After each round of pushes every worker waits for a result of all of it, sums or parameters. A
    worker therefore never pushes for the next round while others still push for this one.
    """

    coming: ClassVar[Operation] = Operation.EXPECT

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        match event:
            case BucketReady(bucket):
                yield Start(Operation.PUSH, bucket)
            case BackwardBegins():
                if self.phase is Phase.LOST:
                    yield from self._gather()
                yield from super().react(event)
            case _:
                yield from super().react(event)

    def _use(self, event: Event) -> Commands:
        # No worker has parts of the sums, so clipping and scaling read whole gradients.
        looks = isinstance(event, PartsNeeded)
        yield from super()._use(GradientsNeeded() if looks else event)

    def _start_gathers(self) -> Iterator[Command]:
        if not self._gathering:
            for bucket in self._forward:
                yield Start(Operation.PULL, bucket)
        self._gathering = True

    def _drop(self) -> Commands:
        if self.phase is not Phase.IDLE:
            yield from self._agree(Intent.DROP)
            yield from self._leave()
        self.phase = Phase.IDLE

    def _leave(self) -> Iterator[Command]:
        """Discard what the servers hold; buffers are free when all workers have pushed."""
        if self.phase in (Phase.REDUCED, Phase.LOST):
            yield from self._start_gathers()
            yield Forget()

    def _step(self, intent: Intent, used: frozenset[int]) -> Commands:
        yield from self._update(self._forward)
        answer = yield from self._agree(intent, used)
        if Intent.STEP in answer.doing:
            yield Hand(answer)
            yield Forget(answer.used)
            for bucket in self._forward:
                yield Start(self.coming, bucket)
                yield Defer(bucket, self._members[bucket] & answer.used)
                self._due.add(bucket)
            yield UpdateServers(answer, unasked=self.coming is Operation.EXPECT)
        else:
            yield from self._leave()
        self.phase = Phase.IDLE


class ServedUpdatesAtStart(ServedUpdates):
    """As `ServedUpdates`, but the parameters of each bucket are requested."""

    coming: ClassVar[Operation] = Operation.FETCH
