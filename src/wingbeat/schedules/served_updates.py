"""Servers that update: gradients stay there, and parameters come back (Geryon, section II-A).

A step uses the sums that the servers have. Where somebody looks at gradients before, all workers
pull the sums; what is in ``p.grad`` at the step is then sent in place of them. What comes after a
backward is the user's to say: so each worker tells the others, as `ShardedDear` has it.
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
    """Pushes under backward; pulls sums if somebody looks, and parameters after a step.

    Each round of pushes is followed by something that waits for all of it, on every worker: sums
    or parameters. So nobody pushes for the next while others still push for this one.
    """

    coming: ClassVar[Operation] = Operation.EXPECT

    def react(self, event: Event) -> Commands:
        """Yield what is to be done now that ``event`` has happened.

        Raises:
            UsageError: the workers do not do the same with their gradients.
        """
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
        # No worker has parts of the sums: to clip or scale is to look.
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
        """Have nobody use what the servers have; the buffers are free when all have pushed."""
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
    """As `ServedUpdates`, but the parameters of each bucket are asked for."""

    coming: ClassVar[Operation] = Operation.FETCH
