"""A worker without batches updates its shard as the others would, under ``join()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.training import (
    assert_same,
    backward,
    distributed,
    net,
    on,
    state_of,
    train,
    weights,
)
from wingbeat.errors import UsageError


def _joined(model: Any, optimizer: Any, rank: int, clip: str, scaled: bool) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, enabled=scaled)
    with model.join():
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6) * (1 + rank + step)).square().mean()
            if scaled and step == 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clip == "torch":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif clip == "wingbeat":
                optimizer.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("clip", "scaled"),
    [("", False), ("wingbeat", False), ("torch", False), ("", True), ("torch", True)],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_worker_without_batches_updates_its_shard_as_the_others_would(
    size: int, clip: str, scaled: bool, fused: bool
) -> None:
    """Its own schedule stands still, and only the others scale and clip."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.05, fused=fused)

    def body(world: Any) -> Any:
        model, optimizer = distributed(world, make)
        _joined(model, optimizer, world.rank, clip, scaled)
        assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
        return weights(model), state_of(optimizer)["state"]

    want = _joined_alone(size, clip, scaled)
    for found, state in on(size, body):
        assert_same(found, want[0], 1e-5)
        assert_same(state, want[1], 1e-5)


def _joined_alone(size: int, clip: str, scaled: bool) -> Any:
    """One process; sums of those who have batches, divided by all."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for step in range(2 + 2 * (size - 1)):
        optimizer.zero_grad()
        for rank in range(size):
            if step < 2 + 2 * rank:
                loss = model(torch.ones(2, 6) * (1 + rank + step)).square().mean() / size
                loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not (scaled and step == 4):
            optimizer.step()
        scheduler.step()
    return weights(model), state_of(optimizer)["state"]


def test_join_refuses_gradients_left_over() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, [0])
        optimizer.zero_grad()
        with model.join():
            backward(model, world.rank, 1)
            with pytest.raises(UsageError, match=r"join\(\)"):
                backward(model, world.rank, 2)
            optimizer.zero_grad()
            train(model, optimizer, [3])

    on(2, body)


def test_a_worker_may_run_out_after_an_unused_backward() -> None:
    """The others drop their gradients before the next forward, and it does so at the end."""

    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        before = weights(model)
        with model.join():
            for step in range(1 + 2 * world.rank):
                optimizer.zero_grad()
                backward(model, world.rank, step)
                if step == 1:
                    optimizer.step()
        return before, weights(model)

    (before, after), (_, other) = on(2, body, timeout=5.0)
    assert_same(after, other)
    assert any(bool((after[name] != before[name]).any()) for name in before)
