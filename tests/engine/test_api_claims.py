"""A parameter belongs to one engine at a time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import engine as engine_behind
from helpers.training import net, on, sgd, train
from wingbeat.engine.api import claim_parameters, free_parameters, refuse_claimed
from wingbeat.errors import UsageError
from wingbeat.strategies import parse
from wingbeat.transport import loopback


class Engine:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trained = list(model.parameters())


def _claimed(model: nn.Module) -> Engine:
    engine = Engine(model)
    claim_parameters(engine, model.parameters())
    return engine


def test_a_shared_parameter_is_named_with_both_models() -> None:
    part = nn.Linear(2, 2)
    engine = _claimed(part)
    whole = nn.Sequential(nn.Linear(2, 2), part)
    with pytest.raises(
        UsageError, match=r"'1\.weight' of Sequential is distributed already, as a part of Linear"
    ):
        refuse_claimed(whole)
    refuse_claimed(whole[0])
    del engine


def test_a_parameter_is_free_after_release() -> None:
    model = nn.Linear(2, 2)
    engine = _claimed(model)
    free_parameters(engine)
    free_parameters(engine)  # once more is no error
    refuse_claimed(model)


def test_a_parameter_is_free_after_its_engine_is_deleted() -> None:
    model = nn.Linear(2, 2)
    engine = _claimed(model)
    del engine
    gc.collect()
    refuse_claimed(model)


def test_release_frees_parameters_while_the_engine_is_referenced() -> None:
    """A traceback may hold it, say, long after the objects were released."""
    [world] = loopback.worlds(1)
    part = nn.Linear(2, 2)
    sgd = torch.optim.SGD(part.parameters(), lr=0.1)
    part, sgd = wingbeat.distribute(part, sgd, wingbeat.AllReduce(), world=world)
    held = engine_behind(part)
    wingbeat.release(part, sgd)
    whole = nn.Sequential(part, nn.Linear(2, 2))
    adam = torch.optim.AdamW(whole.parameters(), lr=0.1)
    whole, adam = wingbeat.distribute(whole, adam, wingbeat.AllReduce(), world=world)
    assert engine_behind(whole) is not held
    wingbeat.release(whole, adam)


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce", "dear", "dear:shard_optimizer=true", "geryon:encrypted=false",
        "canary:encrypted=false", "localsgd:every=2,encrypted=false",
        "diloco:every=2,encrypted=false", "adpsgd:encrypted=false",
    ],
)  # fmt: skip
def test_release_deletes_the_engine_at_once(strategy: str) -> None:
    """Not when garbage is collected: where models are averaged it has copies of the model."""

    def body(world: Any) -> bool:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        train(model, optimizer, range(4))
        gone = weakref.ref(engine_behind(model))
        wingbeat.release(model, optimizer)
        return gone() is None

    gc.disable()
    try:
        assert on(2, body) == [True, True]
    finally:
        gc.enable()
