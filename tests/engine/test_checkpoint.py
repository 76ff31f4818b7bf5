"""State dicts of sharded runs: whole ones are torch's own, parts load at any number of workers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wingbeat
from helpers.amounts import examples
from helpers.training import (
    TINY_MB,
    adamw,
    assert_same,
    backward,
    distributed,
    engine,
    net,
    on,
    sgd,
    state_of,
    train,
    weights,
)
from wingbeat.types import Fusion

Kept = tuple[dict[str, Any], Any]
"""A model's state dict, and the optimizer's whole one or its parts."""


def _saved(value: Any) -> Any:
    """Through a file that holds no code."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _reference(steps: range, kept: Kept | None = None) -> Any:
    """One process whose one worker sees rank 0's batches."""
    model = net()
    optimizer = adamw(model.parameters())
    if kept is not None:
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))
    train(model, optimizer, steps, rank=0)
    return weights(model), state_of(optimizer)


def _go_on(size: int, steps: range, load: Callable[[Any, Any], None], parts: bool) -> Any:
    """Train ``size`` workers on rank 0's batches; return model, state or parts, and both whole."""

    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        load(model, optimizer)
        train(model, optimizer, steps, rank=0)
        whole = state_of(optimizer)
        part = optimizer.shard_state_dict() if parts else whole
        return _saved((model.state_dict(), part)), (weights(model), whole)

    results = on(size, body)
    for _, result in results:
        assert_same(result, results[0][1])
    (model_state, first), whole = results[0]
    return (model_state, [kept[1] for kept, _ in results] if parts else first), whole


@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 4, 2), (3, 2, 5)])
@pytest.mark.parametrize("parts", [False, True])
def test_a_run_goes_on_with_another_number_of_workers(sizes: tuple[int, ...], parts: bool) -> None:
    kept: Any = None

    def load(model: Any, optimizer: Any) -> None:
        if kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_shards(kept[1]) if parts else optimizer.load_state_dict(kept[1])

    for turn, size in enumerate(sizes):
        kept, whole = _go_on(size, range(3 * turn, 3 * turn + 3), load, parts)
    assert_same(whole, _reference(range(3 * len(sizes))), 1e-5)


@pytest.mark.parametrize("strategy", [wingbeat.AllReduce(), wingbeat.DeAR(plan="fixed")])
@pytest.mark.parametrize("parts", [False, True])
def test_other_strategies_load_the_shards(strategy: Any, parts: bool) -> None:
    kept, whole = _go_on(3, range(3), lambda model, optimizer: None, parts)

    def body(world: Any) -> Any:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), strategy, world=world
        )
        model.load_state_dict(kept[0])
        mine = copy.deepcopy(kept[1])  # torch keeps what it is given, and here ranks are threads
        optimizer.load_shards(mine) if parts else optimizer.load_state_dict(mine)
        assert_same(state_of(optimizer)["state"], whole[1]["state"])
        train(model, optimizer, range(3, 6), rank=0)
        return weights(model), state_of(optimizer)

    for found in on(2, body):
        assert_same(found, _reference(range(6)), 1e-5)


def test_the_whole_state_dict_is_that_of_plain_torch() -> None:
    kept, _ = _go_on(3, range(3), lambda model, optimizer: None, parts=False)
    assert_same(_reference(range(3, 6), kept), _reference(range(6)), 1e-5)
    plain = net()
    plain.load_state_dict(kept[0])
    optimizer = adamw(plain.parameters())
    optimizer.load_state_dict(kept[1])

    def load(model: Any, other: Any) -> None:
        model.load_state_dict(plain.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    _, whole = _go_on(2, range(3, 6), load, parts=True)
    assert_same(whole, _reference(range(6)), 1e-5)


def test_a_run_of_another_bucket_size_loads_the_shards() -> None:
    kept, _ = _go_on(2, range(3), lambda model, optimizer: None, parts=True)

    def body(world: Any) -> Any:
        model, optimizer = distributed(world, mb=25.0)
        train(model, optimizer, range(20, 22))
        engine(model).bucketing.use(Fusion(kind="layers", layers=2))
        model.load_state_dict(kept[0])
        optimizer.load_shards(kept[1])
        train(model, optimizer, range(3, 6), rank=0)
        return weights(model), state_of(optimizer)

    for found in on(3, body):
        assert_same(found, _reference(range(6)), 1e-5)


def test_loading_replaces_existing_state() -> None:
    kept, _ = _go_on(2, range(0), lambda model, optimizer: None, parts=True)

    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        optimizer.load_shards(kept[1])
        assert state_of(optimizer)["state"] == {}

    on(2, body)


def test_settings_come_with_the_parts() -> None:
    def save(world: Any) -> Any:
        model, optimizer = distributed(world, sgd)
        optimizer.param_groups[0]["lr"] = 0.25
        train(model, optimizer, range(1))
        return optimizer.shard_state_dict()

    parts = on(2, save)

    def load(world: Any) -> float:
        _, optimizer = distributed(world, sgd)
        optimizer.load_shards(parts)
        return float(optimizer.param_groups[0]["lr"])

    assert on(1, load) + on(3, load) == [0.25] * 4


def test_steps_count_on_after_loading() -> None:
    """Parts of two moments of a run are told apart by them."""

    def save(world: Any) -> Any:
        model, optimizer = distributed(world, sgd)
        train(model, optimizer, range(3))
        return optimizer.shard_state_dict()

    parts = on(2, save)

    def load(world: Any) -> list[int]:
        model, optimizer = distributed(world, sgd)
        optimizer.load_shards(parts)
        loaded = optimizer.shard_state_dict()["steps"]
        train(model, optimizer, [3])
        return [loaded, optimizer.shard_state_dict()["steps"]]

    assert on(3, load) == [[3, 4]] * 3


def test_a_part_is_made_and_loaded_without_the_others() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        model.synchronize()
        part = optimizer.shard_state_dict() if world.rank == 1 else None
        train(model, optimizer, range(2, 3))
        return part, optimizer.shard_state_dict()

    results = on(2, body)
    spans = [
        (name, shard["start"], shard["stop"])
        for part in (results[0][1], results[1][1])
        for name, shard in part["shards"].items()
    ]
    sizes = {name: p.numel() for name, p in net().named_parameters()}
    held = {name: 0 for name, _, _ in spans}
    for name, start, stop in spans:
        held[name] += stop - start
    assert held == {n: size for n, size in sizes.items() if not n.startswith("spare")}


def test_frozen_parameters_keep_their_state() -> None:
    """Trained once, frozen later: their momentum waits in the optimizer, whole."""

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = sgd(params)
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["momentum_buffer"] = torch.full_like(param, 3.0)
        return optimizer

    def body(world: Any) -> Any:
        model = net()
        model.first.requires_grad_(False)
        model, optimizer = distributed(world, make, model)
        train(model, optimizer, range(2))
        return state_of(optimizer), optimizer.shard_state_dict()

    results = on(3, body)
    whole = results[0][0]
    assert whole["state"][1]["momentum_buffer"].eq(3.0).all()

    def load(world: Any) -> Any:
        model = net()
        model.first.requires_grad_(False)
        model, optimizer = distributed(world, sgd, model)
        optimizer.load_shards([part for _, part in results])
        return state_of(optimizer)

    for found in on(2, load):
        assert_same(found, whole)


def test_state_follows_the_parameter_to_another_precision() -> None:
    kept, _ = _go_on(2, range(2), lambda model, optimizer: None, parts=True)

    def body(world: Any) -> Any:
        _, optimizer = distributed(world, model=net().double())
        optimizer.load_shards(kept[1])
        return {str(v.dtype) for e in state_of(optimizer)["state"].values() for v in e.values()}

    assert on(2, body) == [{"torch.float64", "torch.float32"}] * 2  # moments, step counters


@settings(max_examples=examples(15))
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
    st.sampled_from([TINY_MB, 0.001, 25.0]),
    st.booleans(),
)
def test_shards_of_any_number_of_workers_make_the_same_whole(
    sizes: list[int], mb: float, spare: bool
) -> None:
    """State is moved from world to world, and read whole at the end."""

    def first(world: Any) -> Any:
        model, optimizer = distributed(world, mb=mb)
        model.use_spare = spare
        train(model, optimizer, range(2))
        return state_of(optimizer), _saved(optimizer.shard_state_dict())

    def then(parts: list[Any]) -> Callable[[Any], Any]:
        def body(world: Any) -> Any:
            _, optimizer = distributed(world, mb=TINY_MB)
            optimizer.load_shards(parts)
            return state_of(optimizer), _saved(optimizer.shard_state_dict())

        return body

    results = on(sizes[0], first)
    whole = results[0][0]
    for size in sizes[1:]:
        results = on(size, then([part for _, part in reversed(results)]))
        for state, _ in results:
            assert_same(state, whole)


def test_a_scalar_parameter_does_not_make_a_counter_one_value_for_each_element() -> None:
    """Whose shape is that of the count of steps; whichever the optimizer has last."""

    def make(params: Any) -> torch.optim.Optimizer:
        return adamw(sorted(params, key=lambda p: -p.ndim))

    def first(world: Any) -> Any:
        model, optimizer = distributed(world, make)
        train(model, optimizer, range(2))
        return state_of(optimizer), _saved(optimizer.shard_state_dict())

    def then(world: Any) -> Any:
        _, optimizer = distributed(world, make)
        optimizer.load_shards([part])
        return state_of(optimizer)

    [(whole, part)] = on(1, first)
    for state in on(2, then):
        assert_same(state, whole)


def test_shards_can_be_exported_with_pending_gradients() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        backward(model, world.rank, 2)
        part = optimizer.shard_state_dict()
        whole = state_of(optimizer)
        optimizer.step()
        assert part["steps"] == 2
        return whole, weights(model)

    results = on(2, body)
    assert_same(results[0], results[1])
