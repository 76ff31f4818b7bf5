"""What each worker holds of the optimizer, and how it moves when the buckets change."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from helpers.training import (
    adamw,
    assert_same,
    backward,
    batch,
    compare,
    distributed,
    engine,
    net,
    on,
    outcome,
    sgd,
    state_of,
    train,
    weights,
)
from wingbeat.types import Fusion


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rebucketing_loses_nothing(size: int) -> None:
    """At every few iterations another bucket size, as tuning does; also between accumulations."""

    def body(model: Any, optimizer: Any, rank: int) -> None:
        rng = random.Random(7)
        for step in range(24):
            if rng.random() < 0.5:
                nbytes = rng.choice((40, 100, 200, 500, 1000, 10_000))
                engine(model).bucketing.use(Fusion(bucket_bytes=nbytes))
            model.use_spare = rng.random() < 0.3
            optimizer.zero_grad()
            backward(model, rank, step)
            if rng.random() < 0.3:
                engine(model).bucketing.use(Fusion(kind="layers", layers=rng.randint(1, 4)))
                backward(model, rank, 100 + step)
            optimizer.step()

    plain = [_trained_alone(size, rng_seed=7)]
    results = on(size, lambda world: outcome(world, adamw, True, body))
    for result in results:
        assert_same(result[0], plain[0][0], 1e-5)
        assert_same(result, results[0])
        assert_same(result[1]["state"], plain[0][1]["state"], 1e-5)


def _trained_alone(size: int, rng_seed: int) -> Any:
    """The same training by one process that sees every rank's batches."""
    model = net()
    optimizer = adamw(model.parameters())
    rng = random.Random(rng_seed)
    for step in range(24):
        if rng.random() < 0.5:
            rng.choice((40, 100, 200, 500, 1000, 10_000))
        model.use_spare = rng.random() < 0.3
        optimizer.zero_grad()
        for rank in range(size):
            backward(model, rank, step)
        if rng.random() < 0.3:
            rng.randint(1, 4)
            for rank in range(size):
                backward(model, rank, 100 + step)
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= size
        optimizer.step()
    return weights(model), state_of(optimizer)


def test_momentum_moves_with_its_parameters() -> None:
    """Without the moved state the next update would be another one."""

    def body(world: Any) -> Any:
        model, optimizer = distributed(world, sgd, mb=25.0)
        train(model, optimizer, range(3))
        before = state_of(optimizer)
        held = {p.slot.name: p.span for p in engine(model).update.shards.pieces}
        engine(model).bucketing.use(Fusion(kind="none"))
        optimizer.zero_grad()
        backward(model, world.rank, 3)
        assert {p.slot.name: p.span for p in engine(model).update.shards.pieces} != held
        after = state_of(optimizer)
        optimizer.step()
        return before, after

    for before, after in on(3, body):
        assert before["state"][0]["momentum_buffer"].abs().sum() > 0
        assert_same(after, before)


# -- what is divided ------------------------------------------------------------------------


def _state_bytes(optimizer: Any) -> int:
    return sum(
        value.numel() * value.element_size()
        for shard in optimizer.shard_state_dict()["shards"].values()
        for value in shard["each"].values()
    )


def _live_bytes(model: Any) -> int:
    """All memory that the state keeps alive, also beyond its own elements."""
    live = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for entry in engine(model).update.shards.state.values()
        for value in entry.values()
        if value.dim()
    }
    return sum(live.values())


def test_each_worker_remembers_its_part_only_after_loading_the_whole() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world, torch.optim.AdamW)
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        model, optimizer = distributed(world, torch.optim.AdamW)
        optimizer.load_state_dict(saved)
        del saved
        assert 0 < _live_bytes(model) == _state_bytes(optimizer)
        assert len(vars(optimizer)["state"]) == 0

    on(3, body)


def test_each_worker_remembers_its_part_only_after_the_buckets_have_changed() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world, torch.optim.AdamW)
        train(model, optimizer, range(2))
        before = len(engine(model).buckets)
        engine(model).bucketing.use(Fusion(bucket_bytes=10_000))
        train(model, optimizer, range(2, 4))
        assert len(engine(model).buckets) < before
        assert 0 < _live_bytes(model) == _state_bytes(optimizer)

    on(3, body)


@pytest.mark.parametrize("size", [2, 4])
def test_each_worker_has_its_part_of_the_state_only(size: int) -> None:
    def body(world: Any) -> tuple[int, int, int]:
        model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30))
        model, optimizer = distributed(world, torch.optim.AdamW, model, mb=0.005)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
        assert len(optimizer.__dict__["state"]) == 0, "nothing is held whole"
        live = _live_bytes(model)
        params = sum(p.numel() for p in model.parameters())
        return _state_bytes(optimizer), live, params

    results = on(size, body)
    whole = 2 * 4 * results[0][2]  # two moments of four bytes
    assert sum(counted for counted, _, _ in results) == whole
    for counted, live, _ in results:
        assert counted == live, "a shard keeps more memory than its own elements"
        # What flags and rounding up do to a bucket of 5 KB.
        assert abs(counted - whole / size) < 0.05 * whole


def test_an_optimizer_that_comes_with_state_is_divided_too() -> None:
    model = net()
    optimizer = adamw(model.parameters())
    optimizer.zero_grad()
    backward(model, 0, 50)
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def resumed(params: Any) -> torch.optim.Optimizer:
        made = adamw(params)
        made.load_state_dict(copy.deepcopy(saved[1]))
        return made

    def body(model: Any, optimizer: Any, rank: int) -> None:
        assert not engine(model).strategy.update_part.shards or len(vars(optimizer)["state"]) == 0
        model.load_state_dict(saved[0])
        train(model, optimizer, range(3))

    compare(3, resumed, body)


def test_tuning_ends_with_the_weights_of_a_fixed_plan() -> None:
    def body(world: Any, **options: Any) -> Any:
        model, optimizer = distributed(world, adamw, net().double(), **options)
        for step in range(40):
            optimizer.zero_grad()
            model(batch(step, world.rank).double()).square().mean().backward()
            optimizer.step()
        tuning = engine(model).control.tuning
        assert tuning is None or tuning.done
        return weights(model), state_of(optimizer)

    kb = 2.0**-10
    tuned = {"plan": "random", "mb": kb, "min_mb": 0.1 * kb, "max_mb": 2 * kb, "edge_mb": 0.0}
    got = on(3, lambda world: body(world, trials=3, steps=2, **tuned))
    want = on(3, lambda world: body(world, shard_optimizer=False))
    for rank in range(3):
        assert_same(got[rank], got[0])
        assert_same(got[rank], want[0], 1e-10)
