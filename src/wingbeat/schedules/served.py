"""Sums and updates of parameter servers (Geryon, Wang et al., 2020, section II-A).

Workers push gradients while backward runs and pull what forward needs. With ``pull="start"``, as in
the paper's Eqs. 1 to 5, a sum is requested when the next iteration starts; with ``pull="ready"`` it
is sent as soon as it is complete, so that connections carry both directions at the same time. In
both cases each bucket is updated just before the layer that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from wingbeat.schedules.dear import Dear, ShardedDear
from wingbeat.schedules.events import (
    BackwardBegins,
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


class Served(Dear):
    """One operation for each bucket during backward, whose result is awaited when it is needed."""

    launched: ClassVar[Phase] = Phase.UNDER_WAY
    operation: ClassVar[Operation] = Operation.ALL_REDUCE
    completion: ClassVar[Operation | None] = None  # servers send sums as soon as they are complete

    def __init__(self) -> None:
        super().__init__()
        self.at_once = False

    def _use(self, event: Event) -> Commands:
        # No worker has parts of the sums, so clipping and scaling read whole gradients.
        yield from super()._use(GradientsNeeded() if isinstance(event, PartsNeeded) else event)


class ServedAtStart(Served):
    """As `Served`, but servers keep each sum until it is requested."""

    operation: ClassVar[Operation] = Operation.PUSH
    completion: ClassVar[Operation | None] = Operation.PULL


class ServedUpdates(ShardedDear):
    """Server-side updates: pulls sums if they are read, and parameters after a step.

    A step uses the sums that the servers hold. If gradients are read before, all workers pull the
    sums, and the step sends the content of ``p.grad`` instead. As in `ShardedDear`, each worker
    first announces how it will use its gradients. After each round of pushes every worker waits for
    a result of all of it, sums or parameters. A worker therefore never pushes for the next round
    while others still push for this one.
    """

    operation: ClassVar[Operation] = Operation.PUSH
    completion: ClassVar[Operation | None] = Operation.PULL
    coming: ClassVar[Operation] = Operation.EXPECT

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        if isinstance(event, BackwardBegins) and self.phase is Phase.LOST:
            yield from self._gather()
        yield from super().react(event)

    def _use(self, event: Event) -> Commands:
        yield from super()._use(GradientsNeeded() if isinstance(event, PartsNeeded) else event)

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
