"""What a worker without batches needs of the others to go on updating its shard as they would.

Without shards its steps do not matter, because it takes over everybody's parameters in the end.
With shards nobody else updates its blocks; so it needs the others' settings (its own schedulers
stand still), and their gradients where those may have changed them.
"""

from __future__ import annotations

from typing import Any

import torch

from wingbeat.engine.updates.stepper import GroupSnapshot
from wingbeat.engine.updates.update import Training
from wingbeat.errors import PeerError, UsageError
from wingbeat.schedules.intents import Answer
from wingbeat.servers.values import decode, encode

SCALER = ("grad_scale", "found_inf")
"""Where a GradScaler leaves word for an optimizer that unscales in its own step."""


def share_settings(training: Training, answer: Answer) -> Any:
    """Give the workers without batches the settings of this step; return what came.

    Raises:
        UsageError: a setting cannot travel.
    """
    world = training.collectives.world
    mine = _settings(training) if world.rank == answer.leader else None
    return world.exchange("optimizer settings", mine)[answer.leader]


def taken_over(training: Training, answer: Answer, shared: Any) -> GroupSnapshot:
    """Return the settings that `share_settings` has brought, with a scaler's words put in place.

    Raises:
        PeerError: the worker that leads sent something that is no optimizer's settings.
    """
    world = training.collectives.world
    own = training.stepper.snapshot()
    device = training.bucketing.buckets[0].flat.device
    try:
        groups, words = shared
        snapshot = [{k: decode(v, device) for k, v in group.items()} for group in groups]
        inside = training.optimizer.__dict__
        inside.update({key: decode(words[key], device) for key in SCALER if key in words})
        if [list(group) for group in snapshot] != [list(group) for group in own]:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise PeerError(
            f"rank {world.rank}: rank {answer.leader} sent malformed optimizer settings: "
            f"{str(shared)[:80]}"
        ) from None
    return snapshot


def _settings(training: Training) -> list[Any]:
    inside = training.optimizer.__dict__
    try:
        return [
            [{k: encode(v) for k, v in group.items()} for group in training.stepper.snapshot()],
            {key: encode(inside[key]) for key in SCALER if key in inside},
        ]
    except TypeError as err:
        raise UsageError(
            f"join() with shard_optimizer: a setting in the optimizer's param groups: {err}"
        ) from None


@torch.no_grad()
def share_gradients(training: Training, answer: Answer) -> None:
    """Have all take the whole gradients of one worker, as anybody may clip or scale those."""
    rank = training.collectives.world.rank
    for bucket in training.bucketing.buckets:
        bucket.settle()
        if rank == answer.leader:
            for slot in bucket.slots:
                if slot.param.grad is not None and slot.param.grad is not slot.view:
                    slot.view.copy_(slot.param.grad)
        training.collectives.broadcast(bucket.flat, answer.leader, label="gradients").wait()
        if answer.follows(rank):
            for slot in bucket.slots:
                slot.param.grad = slot.view if slot.index in answer.used else None
