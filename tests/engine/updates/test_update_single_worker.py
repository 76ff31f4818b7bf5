"""A world of one worker: what codecs leave of a gradient counts there too."""

from __future__ import annotations

from typing import Any

import torch

import wingbeat
from helpers.training import assert_same, batch, net, on, weights
from wingbeat.compression import TopK


def test_a_closures_gradients_get_their_momentum() -> None:
    """Each time that the optimizer calls it."""

    def body(world: Any, wire: Any, momentum: float) -> Any:
        model = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        wingbeat.distribute(model, optimizer, wingbeat.AllReduce(compression=wire), world=world)
        losses = []
        for step in range(3):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                loss = model(batch(step, 0)).square().mean()
                loss.backward()
                return float(loss.detach())

            losses.append(optimizer.step(closure))
        return weights(model), torch.tensor(losses)

    corrected = on(1, lambda world: body(world, TopK(momentum=0.9, warmup=0), 0.0))[0]
    assert_same(corrected, on(1, lambda world: body(world, "fp32", 0.9))[0], 1e-6)
