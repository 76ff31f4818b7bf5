"""What every schedule has from its engine: contexts that end, channels that are given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import TINY_MB, engine, net, on, sgd
from wingbeat import sync
from wingbeat.observe.events import stream


def _distributed(world: Any, model: Any) -> tuple[Any, Any]:
    strategy = wingbeat.AllReduce(mb=TINY_MB)
    return sync.distribute(model, sgd(model.parameters()), strategy, world=world)


def test_an_exception_ends_no_sync() -> None:
    def body(world: Any) -> torch.Tensor:
        model, _ = _distributed(world, net())
        with pytest.raises(ArithmeticError), model.no_sync():
            raise ArithmeticError
        model(torch.full((2, 6), 1.0 + world.rank)).sum().backward()
        grad: torch.Tensor = model.head.weight.grad
        return grad.clone()

    first, second = on(2, body)
    assert torch.equal(first, second)


def test_release_gives_every_channel_back() -> None:
    """That of the gradients and that of the buffers, whoever still refers to the engine."""

    def body(world: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        model, optimizer = _distributed(world, model)
        kept = engine(model)
        assert world._channels == {kept.world.channel, kept.buffer_sync.channel.channel}
        sync.release(model, optimizer)
        assert world._channels == set()

    on(2, body)


def test_a_wait_that_fails_was_a_wait() -> None:
    def body(world: Any) -> Any:
        return engine(_distributed(world, net())[0])

    found, _ = on(2, body)
    stream.start(worker=0)
    with pytest.raises(ArithmeticError), found.exposed(3):
        raise ArithmeticError
    events = stream.stop()
    assert [(event.what, event.bucket) for event in events] == [("wait", 3)]
