"""From a strategy's choices to the parts that make it: which schedule, whose update."""

from __future__ import annotations

from wingbeat.gradients.compression import Compression
from wingbeat.schedules import Dear, ShardedDear, Wfbp
from wingbeat.schedules.events import Schedule
from wingbeat.types import Choices
from wingbeat.updates.alone import AloneUpdate
from wingbeat.updates.deferred import DeferredUpdate
from wingbeat.updates.sharded import ShardedUpdate
from wingbeat.updates.update import Parts, Update
from wingbeat.updates.whole import WholeUpdate

_SCHEDULES: dict[str, type[Schedule]] = {"wfbp": Wfbp, "dear": Dear}


def schedule_of(choices: Choices, workers: int) -> Schedule:
    """Return a new schedule; a worker alone exchanges nothing."""
    if workers == 1:
        return Wfbp()
    return ShardedDear() if choices.shard_optimizer else _SCHEDULES[choices.schedule]()


def update_of(choices: Choices, parts: Parts, compression: Compression) -> Update:
    """Return a new update, which goes with the schedule in ``parts``.

    Raises:
        UsageError: it is not possible with this optimizer.
    """
    if parts.collectives.world.size == 1:
        return AloneUpdate(parts, compression)
    if choices.shard_optimizer:
        return ShardedUpdate(parts)
    return WholeUpdate(parts) if parts.schedule.whole_after_backward else DeferredUpdate(parts)
