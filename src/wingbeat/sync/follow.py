"""A worker that has run out of batches goes on updating its shard, exactly as the others would.

Without shards its steps do not matter, because it takes over everybody's parameters in the end.
With shards nobody else updates its blocks; so it needs the others' settings (its own schedulers
stand still), and their gradients where those may have changed them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.schedules.dear import Phase
from wingbeat.updates.agreement import Answer
from wingbeat.updates.values import decode, encode

if TYPE_CHECKING:
    from wingbeat.sync.sharded import ShardedEngine

_SCALER = ("grad_scale", "found_inf")
"""Where a GradScaler leaves word for an optimizer that unscales in its own step."""


def lead(engine: ShardedEngine, answer: Answer) -> None:
    """Give the workers without batches what they need for this step."""
    _share_settings(engine, answer)
    _share_gradients(engine, answer)


def step_along(engine: ShardedEngine, answer: Answer) -> None:
    """Make the step of the others on this worker's shard.

    Raises:
        PeerError: the worker that leads sent something that is no optimizer's settings.
    """
    shared = _share_settings(engine, answer)
    _share_gradients(engine, answer)
    own = engine.partial.snapshot()
    device = engine.buckets[0].flat.device
    inside = engine.optimizer.__dict__
    try:
        groups, words = shared
        snapshot = [{k: decode(v, device) for k, v in group.items()} for group in groups]
        inside.update({key: decode(words[key], device) for key in _SCALER if key in words})
        if [list(group) for group in snapshot] != [list(group) for group in own]:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise PeerError(
            f"rank {engine.world.rank}: rank {answer.leader} sent malformed optimizer settings: "
            f"{str(shared)[:80]}"
        ) from None
    try:
        engine.finish_step(answer, snapshot, set())
    finally:
        for key in _SCALER:
            inside.pop(key, None)


def _share_settings(engine: ShardedEngine, answer: Answer) -> Any:
    mine = None
    if engine.world.rank == answer.leader:
        inside = engine.optimizer.__dict__
        try:
            mine = [
                [{k: encode(v) for k, v in group.items()} for group in engine.partial.snapshot()],
                {key: encode(inside[key]) for key in _SCALER if key in inside},
            ]
        except TypeError as err:
            raise UsageError(
                f"join() with shard_optimizer: a setting in the optimizer's param groups: {err}"
            ) from None
    return engine.world.exchange("optimizer settings", mine)[answer.leader]


@torch.no_grad()
def _share_gradients(engine: ShardedEngine, answer: Answer) -> None:
    """Once gradients are whole anybody may clip or scale them; so all take those of one worker."""
    if engine.phase is not Phase.WHOLE:
        return
    for bucket in engine.buckets:
        bucket.settle()
        if engine.world.rank == answer.leader:
            for slot in bucket.slots:
                if slot.param.grad is not None and slot.param.grad is not slot.view:
                    slot.view.copy_(slot.param.grad)
        engine.collectives.broadcast(bucket.flat, answer.leader, label="gradients").wait()
        if answer.follows(engine.world.rank):
            for slot in bucket.slots:
                slot.param.grad = slot.view if slot.index in answer.used else None
