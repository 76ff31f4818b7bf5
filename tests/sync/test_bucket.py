"""A bucket's memory: taken once, and again only where somebody keeps old gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import batch, engine, net, on, sgd
from wingbeat import sync
from wingbeat.transport.world import World

STRATEGIES = {
    "allreduce": wingbeat.AllReduce(mb=0.0004),
    "dear": wingbeat.DeAR(plan="fixed", mb=0.0004),
    "dear-sharded": wingbeat.DeAR(plan="fixed", mb=0.0004, shard_optimizer=True),
    "dear-bf16": wingbeat.DeAR(plan="fixed", mb=0.0004, wire="bf16"),
}


def _places(model: Any) -> list[int]:
    return [bucket.flat.data_ptr() for bucket in engine(model).buckets]


KEEPING = [(name, True) for name in STRATEGIES if name != "dear-sharded"]
"""A divided step uses gradients up: reading them later is refused."""


@pytest.mark.parametrize(("name", "keep"), [*((n, False) for n in STRATEGIES), *KEEPING])
def test_buffers_are_used_again_unless_gradients_are_kept(name: str, keep: bool) -> None:
    def body(world: World) -> None:
        model = net()
        params = list(model.parameters())
        model, optimizer = sync.distribute(
            model, sgd(model.parameters()), STRATEGIES[name], world=world
        )
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        places: list[list[int]] = []
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().mean().backward()
            if keep:
                kept += [(p.grad, p.grad.clone()) for p in params if p.grad is not None]
            optimizer.step()
            places.append(_places(model))
        # The first backward shows the order of the gradients, and buckets are made by it once.
        assert (places[1] == places[2] == places[3] == places[4]) is not keep
        for grad, then in kept:
            assert torch.equal(grad, then), "a gradient that was kept has changed"
        sync.release(model, optimizer)

    on(2, body)
