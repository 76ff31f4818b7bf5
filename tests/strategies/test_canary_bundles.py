"""Colayers that are bundled anew by what training measures, by the real engine."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import engine, on, weights
from wingbeat import sync
from wingbeat.errors import UsageError
from wingbeat.exchanges.rebundling import FIRST
from wingbeat.paced.model import PacedModel
from wingbeat.paced.profile import load_profile
from wingbeat.simulator.colayers import bundled
from wingbeat.simulator.model import of_profile

TIED: dict[str, Any] = {"s": 2, "p": None, "wire": "fp32", "encrypted": False, "measured": True}


def distributed(world: Any, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    strategy = wingbeat.Canary(**{**TIED, **options})
    return sync.distribute(model, optimizer, strategy, world=world)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(n, m) for n, m in ((4, 8), (8, 32), (32, 8), (8, 4), (4, 1))))


def iterate(model: Any, optimizer: Any, rank: int, step: int) -> None:
    rng = torch.Generator().manual_seed(100 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(16, 4, generator=rng)).square().mean().backward()
    optimizer.step()


def buckets_of(model: Any) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in engine(model).buckets]


@pytest.mark.parametrize("wire", ["fp32", "sketch"])
def test_all_workers_change_to_the_same_colayers_and_end_with_the_same_weights(wire: str) -> None:
    def worker(world: Any) -> Any:
        model, optimizer = distributed(world, net(), colayers=3, wire=wire)
        before = buckets_of(model)
        for step in range(FIRST + 6):
            iterate(model, optimizer, world.rank, step)
        model.flush()
        exchange = engine(model).runtime.exchange
        made = exchange.machine.epoch, exchange.machine.colayers, exchange.applied
        return before, buckets_of(model), made, weights(model)

    found = on(3, worker)
    for before, after, made, weight in found:
        assert (before, after) == found[0][:2]
        assert made[:2] == (1, 4)
        assert made[2] == pytest.approx(FIRST + 6, abs=0.1)
        assert all(torch.equal(weight[name], found[0][3][name]) for name in weight)


def test_vgg19_in_four_is_the_papers_from_what_the_engine_measures() -> None:
    """And the simulator's, which goes by the same rule (section 4.3.2)."""
    profile = load_profile("vgg19").scaled(0.02)

    def worker(world: Any) -> Any:
        model = PacedModel(profile, world.rank, time_scale=1.0)
        model, optimizer = distributed(world, model, colayers=4)
        for _ in range(FIRST + 1):
            optimizer.zero_grad()
            model(None).backward()
            optimizer.step()
        model.flush()
        return buckets_of(model)

    first, second = on(2, worker)
    assert first == second
    assert [[name.rpartition(".")[0] for name in bucket[::2]] for bucket in first] == [
        ["classifier_6", "classifier_3", "classifier_0"],
        ["features_34", "features_32", "features_30", "features_28"],
        ["features_25", "features_23", "features_21", "features_19"],
        [f"features_{n}" for n in (16, 14, 12, 10, 7, 5, 2, 0)],
    ]
    simulated = bundled(of_profile(profile), 4, measured=True)
    assert simulated.tensors == tuple(map(len, first))
