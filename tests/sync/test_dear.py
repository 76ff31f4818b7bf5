"""What optimizers and hooks may do in a step that DeAR takes apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers import late
from helpers.training import net, on, sgd, train, weights
from wingbeat import sync
from wingbeat.transport import loopback


def test_an_optimizer_may_write_to_its_gradients() -> None:
    """SGD with nesterov and foreach does, while the gather may still pass the buffer on."""

    def body(world: Any) -> torch.Tensor:
        model = nn.Linear(300, 300, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(90_000.0).view(300, 300) / 9e4)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True
        )
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = sync.distribute(model, optimizer, strategy, world=world)
        for step in range(6):
            optimizer.zero_grad()
            rng = torch.Generator().manual_seed(10 * step + world.rank)
            model(torch.randn(2, 300, generator=rng)).square().mean().backward()
            optimizer.step()
            if world.rank == 2:
                time.sleep(0.02)  # one that is late, so that others still have to send to it
            model.flush()
        return model.weight.detach().clone()

    with late.open_worlds(4) as (members, _):
        first, *others = loopback.run(members, body)
    for other in others:
        assert torch.equal(first, other)


def _clip_shown(optimizer: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(params, 0.01)


def _clip(optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.01)


def _shrink(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.mul_(0.99)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("when", "act"), [("pre", _clip_shown), ("pre", _clip), ("post", _shrink)])
def test_step_hooks_see_gradients_before_and_parameters_after(
    when: str, act: Callable[[Any], None], sharded: bool
) -> None:
    def trained(strategy: Any) -> dict[str, torch.Tensor]:
        def body(world: Any) -> Any:
            model = net()
            model, optimizer = sync.distribute(
                model, sgd(model.parameters()), strategy, world=world
            )
            register = getattr(optimizer, f"register_step_{when}_hook")
            register(lambda opt, _args, _kwargs: act(opt))
            train(model, optimizer, range(4))
            return weights(model)

        first, second = on(2, body)
        assert all(torch.equal(first[name], second[name]) for name in first)
        return first

    dear = trained(wingbeat.DeAR(plan="fixed", mb=0.001, shard_optimizer=sharded))
    reference = trained(wingbeat.AllReduce(mb=0.001))
    for name, weight in reference.items():
        torch.testing.assert_close(dear[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_the_norm_of_float64_gradients_is_float64(clip: float) -> None:
    def body(world: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = net().double()
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = sync.distribute(model, sgd(model.parameters()), strategy, world=world)
        model(torch.full((2, 6), 0.1 + world.rank).double()).square().sum().backward()
        norm = optimizer.clip_grad_norm_(clip)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return norm, grads

    (norm, grads), _ = on(2, body)
    assert norm.dtype is torch.float64
    after = torch.stack([g.norm() for g in grads.values()]).norm()
    assert float(after) == pytest.approx(min(clip, float(norm)), rel=1e-3)
