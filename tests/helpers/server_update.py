"""Training with servers that update, against workers that do."""

from __future__ import annotations

from typing import Any

import torch

import wingbeat
from helpers.training import (
    TINY_MB,
    Body,
    Make,
    adamw,
    assert_same,
    engine,
    net,
    on,
    state_of,
    train,
    weights,
)


def strategy(update: str = "server", **options: Any) -> Any:
    chosen = {"mb": TINY_MB, "servers": 2, "encrypted": False, "update": update} | options
    return wingbeat.Geryon(**chosen)


def distributed(
    world: Any, make: Make = adamw, model: Any = None, update: str = "server", **options: Any
) -> tuple[Any, Any]:
    model = net() if model is None else model
    return wingbeat.distribute(
        model, make(model.parameters()), strategy(update, **options), world=world
    )


def outcome(world: Any, make: Make, update: str, body: Body, **options: Any) -> Any:
    model, optimizer = distributed(world, make, update=update, **options)
    body(model, optimizer, world.rank)
    result = weights(model), state_of(optimizer)
    wingbeat.release(model, optimizer)
    return result


def compare(size: int, make: Make, body: Body, tolerance: float = 0.0, **options: Any) -> None:
    """Train both ways; demand the same weights and state."""
    want = on(size, lambda world: outcome(world, make, "worker", body, **options))
    got = on(size, lambda world: outcome(world, make, "server", body, **options))
    for rank in range(size):
        assert_same(got[rank], want[rank], tolerance)


def divided(model: Any) -> bool:
    return bool(engine(model).update.option)


def plain(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, range(6))


def momentum(**more: Any) -> Make:
    return lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, **more)
