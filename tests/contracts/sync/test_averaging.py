"""What strategies that average models promise, whatever each worker does between its steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import net, on, sgd, train, weights
from wingbeat import sync
from wingbeat.groups import config
from wingbeat.groups.patience import Patience
from wingbeat.strategies import parse

PATIENCE = 60.0

AVERAGING = (
    "ripples:encrypted=false",
    "ripples:policy=random,size=2,encrypted=false",
    "ripples:policy=buffered,size=2,encrypted=false",
    "localsgd:every=2,encrypted=false",
    "diloco:every=2,encrypted=false",
    "adpsgd:encrypted=false",
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have groups go on without a worker whose step takes some tenths of a second longer."""
    monkeypatch.setattr(config, "Patience", lambda workers, first_s, factor, least_s: Patience(
        workers, 0.5, 2.0, 0.2
    ))  # fmt: skip


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("counts", [(4, 3), (3, 6)])
@pytest.mark.parametrize("strategy", AVERAGING)
def test_models_are_one_after_uneven_steps_and_a_barrier(
    strategy: str, counts: tuple[int, int]
) -> None:
    together = threading.Barrier(2)

    def body(world: Any) -> list[Any]:
        model = net()
        model, optimizer = sync.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        found = []
        for turn in range(2):  # training goes on after a mean
            more = counts[(world.rank + turn) % 2]
            train(model, optimizer, range(10 * turn, 10 * turn + more))
            together.wait(PATIENCE)
            wingbeat.consensus(model)
            found.append(weights(model))
        train(model, optimizer, range(20, 22))
        wingbeat.consensus(model)
        return [*found, weights(model)]

    one, other = on(2, body, timeout=PATIENCE)
    for mine, theirs in zip(one, other, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("strategy", AVERAGING)
def test_last_worker_may_call_consensus_after_the_others_have_left(strategy: str) -> None:
    gone = threading.Event()

    def body(world: Any) -> None:
        model = net()
        model, optimizer = sync.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        train(model, optimizer, range(2))
        wingbeat.consensus(model)
        if world.rank == 1:
            world.close()
            gone.set()
            return
        assert gone.wait(PATIENCE)
        before = weights(model)
        wingbeat.consensus(model)
        assert all(torch.equal(before[name], value) for name, value in weights(model).items())

    on(2, body, timeout=PATIENCE)
