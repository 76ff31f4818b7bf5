"""Whole parameters divided among workers."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import optim

import wingbeat
from helpers.amounts import each_once
from helpers.training import (
    TINY_MB,
    Make,
    assert_same,
    backward,
    compare,
    distributed,
    engine,
    net,
    on,
    outcome,
    state_of,
    train,
    weights,
)
from wingbeat.engine.updates.shards import Shards, TensorShards, partition, spans_of, update_cost
from wingbeat.errors import PeerError, UsageError
from wingbeat.types import Fusion, Span


class Lamb(optim.Optimizer):
    """Scales each parameter's update by norms, and remembers nests of all kinds."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group["lr"], param, self.state[param])

    def _update(self, lr: float, param: Any, state: Any) -> None:
        if not state:
            rows = param.reshape(param.shape[0] if param.dim() else 1, -1)
            state["step"] = torch.tensor(0.0)
            state["sides"] = [torch.zeros(rows.shape[0]), (torch.zeros_like(rows[0]),)]
            state["kept"] = {"made": 0, 3: torch.zeros_like(param), "none": None}
        state["step"] += 1
        state["kept"]["made"] += 1
        grad = param.grad.reshape(state["sides"][0].shape[0], -1)
        state["sides"][0].mul_(0.9).add_(grad.square().mean(1), alpha=0.1)
        state["sides"][1][0].mul_(0.9).add_(grad.square().mean(0), alpha=0.1)
        state["kept"][3].lerp_(param.grad, 0.5)
        scale = state["sides"][0].mean().sqrt() + state["sides"][1][0].mean().sqrt()
        param.sub_(state["kept"][3], alpha=float(lr / (scale + 0.1) * param.norm() / 9))


def _lamb(params: Any) -> optim.Optimizer:
    return Lamb(params)


def _adafactor(params: Any) -> optim.Optimizer:
    return optim.Adafactor(params, lr=0.1)


def _muon(params: Any) -> optim.Optimizer:
    return optim.Muon([p for p in params if p.dim() == 2], lr=0.05)


MAKES = [_lamb, _adafactor, _muon]


def _plain(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, range(6))


def _shards(model: Any) -> Any:
    return engine(model).update.shards


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("mb", [TINY_MB, 0.001, 25.0])
def test_tensor_shards_of_two_workers_equal_whole_bit_for_bit(make: Make, mb: float) -> None:
    compare(2, make, _plain, mb=mb)


@pytest.mark.parametrize("make", [_lamb, _adafactor])
@pytest.mark.parametrize("size", [3, 5])
def test_tensor_shards_of_more_workers_equal_whole_up_to_rounding(size: int, make: Make) -> None:
    """Blocks begin elsewhere, so a ring adds in another order."""
    compare(size, make, _plain, tolerance=1e-5, mb=0.001)


@pytest.mark.parametrize("topology", ["ring", "mesh"])
def test_tensor_shards_of_muon_equal_whole_up_to_rounding(topology: str) -> None:
    """It multiplies in bfloat16, where a last bit of a gradient can become one of 2 ** -8."""
    compare(3, _muon, _plain, tolerance=2e-3, mb=0.001, topology=topology)


def _odd(model: Any, optimizer: Any, rank: int) -> None:
    """Unused parameters, accumulation, clipping, a look at gradients, other buckets in between."""
    for step in range(8):
        model.use_spare = step in (3, 4)
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, rank, 50 + step)
        backward(model, rank, step)
        if step % 2:
            optimizer.clip_grad_norm_(0.3)
        if step == 5 and rank == 1:
            assert model.head.weight.grad.abs().sum() > 0
        optimizer.step()
        if step in (2, 5):
            engine(model).bucketing.use(Fusion(kind="layers", layers=step - 1))


@pytest.mark.parametrize("make", MAKES)
def test_tensor_shards_with_changes_between_steps_equal_whole(make: Make) -> None:
    def kept(model: Any, optimizer: Any, rank: int) -> None:
        _odd(model, optimizer, rank)
        if isinstance(_shards(model), Shards):
            assert isinstance(_shards(model), TensorShards)

    # A norm is the root of a sum of the blocks' own, which are others than without shards.
    compare(2, make, kept, tolerance=2e-3 if make is _muon else 1e-5)


def test_tensor_shards_of_transposed_parameters_equal_whole() -> None:
    def turned(params: Any) -> optim.Optimizer:
        params = list(params)
        for param in params:
            if param.dim() == 2:
                param.data = param.data.t().contiguous().t()
        return _lamb(params)

    compare(2, turned, _plain, tolerance=1e-6)


def test_each_worker_has_whole_parameters_and_about_as_much_work() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world, _lamb, torch.nn.Sequential(*_squares(8)), mb=25.0)
        x = torch.ones(2, 6)
        model(x).sum().backward()
        optimizer.step()
        mine = [p.slot.name for p in _shards(model).pieces if p.slot.param.dim() == 2]
        assert all(p.stand_in.shape == p.slot.param.shape for p in _shards(model).pieces)
        assert len(_shards(model).state) == len(_shards(model).pieces)
        return mine

    names = on(4, body)
    assert [len(each) for each in names] == [2, 2, 2, 2]
    assert len({name for each in names for name in each}) == 8


def test_buckets_of_one_parameter_take_turns() -> None:
    def body(world: Any) -> int:
        model, _ = distributed(world, _muon, torch.nn.Sequential(*_squares(8)), mb=TINY_MB)
        return len([p for p in _shards(model).pieces if p.slot.param.dim() == 2])

    assert on(4, body) == [2, 2, 2, 2]


def _squares(count: int) -> list[torch.nn.Module]:
    return [torch.nn.Linear(6, 6) for _ in range(count)]


# -- state ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "parts", "sizes"), each_once(MAKES, [True, False], [(3, 2), (2, 3), (2, 1), (1, 2)])
)
def test_training_goes_on_from_a_checkpoint_of_other_workers(
    make: Make, parts: bool, sizes: tuple[int, int]
) -> None:
    before, after = sizes

    def first(world: Any) -> Any:
        model, optimizer = distributed(world, make)
        train(model, optimizer, range(3), rank=0)
        kept = optimizer.shard_state_dict() if parts else optimizer.state_dict()
        return _through_a_file([model.state_dict(), kept])

    def then(world: Any) -> Any:
        model, optimizer = distributed(world, make, net(seed=1))
        model.load_state_dict(saved[0][0])
        if parts:
            optimizer.load_shards([kept for _, kept in saved])
        else:
            optimizer.load_state_dict(saved[0][1])
        train(model, optimizer, range(3, 6), rank=0)
        return weights(model), state_of(optimizer)

    def through(world: Any) -> Any:
        model, optimizer = distributed(world, make)
        train(model, optimizer, range(6), rank=0)
        return weights(model), state_of(optimizer)

    saved = on(before, first)
    [wanted] = on(1, through)
    # All ranks see rank 0's batches: a mean of equal numbers, rounded where there are three.
    for result in on(after, then):
        assert_same(result, wanted, 2e-3 if make is _muon else 1e-5)


def _through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_gathered_state_loads_into_plain_torch() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world, _lamb)
        train(model, optimizer, range(3))
        state = optimizer.state_dict()
        plain = net()
        fresh = _lamb(plain.parameters())
        fresh.load_state_dict(state)
        assert_same(fresh.state_dict(), state)
        twin = copy.deepcopy(optimizer)
        assert_same(twin.state_dict(), state)
        wingbeat_state = {id(v) for v in optimizer.state_dict()["state"][0].values()}
        assert wingbeat_state.isdisjoint(id(v) for v in _shards(model).state.values())
        wingbeat.release(model, optimizer)
        assert_same(optimizer.state_dict(), state)

    on(3, body)


def test_load_shards_of_mixed_kinds_names_the_parameter() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world, _lamb)
        train(model, optimizer, range(2))
        return optimizer.shard_state_dict()

    parts = on(2, body)
    name = next(iter(parts[0]["shards"]))
    parts[1]["shards"][name] = parts[0]["shards"][name]

    def load(world: Any) -> None:
        _, optimizer = distributed(world, _lamb)
        with pytest.raises(UsageError, match=f"parameter {name!r} are in two parts"):
            optimizer.load_shards(parts)

    on(2, load)


@pytest.mark.parametrize(
    "wrong",
    [
        [[0, {"dict": [["a", {"tensor": ["float33", [2], False]}]]}]],
        [[0, {"dict": [["a", {"tensor": ["float32", [-2], False]}]]}]],
        [[99, {"dict": []}]],
        [[0, {"list": []}]],
        [[0, {"dict": [[[], 1]]}]],
        [[0, {"dict": [["a", {"set": []}]]}]],
        [7],
        None,
    ],
)
def test_a_malformed_state_names_its_sender(wrong: Any) -> None:
    def body(world: Any) -> None:
        model, _ = distributed(world, _lamb)
        shards = _shards(model)
        if world.rank == 1:
            what = "optimizer state (shard_optimizer: every rank must ask for it)"
            world = engine(model).world
            world.exchange(what, wrong)
            return
        with pytest.raises(PeerError, match="rank 0: rank 1 sent a malformed optimizer state"):
            shards.whole()

    on(2, body)


@pytest.mark.parametrize("wire", ["bf16", "sketch@4", "topk@0.5"])
def test_tensor_shards_with_compressed_gradients_are_equal_on_all_workers(wire: str) -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world, _adafactor, mb=0.001, compression=wire)
        assert isinstance(_shards(model), TensorShards)
        train(model, optimizer, range(5))
        return weights(model), state_of(optimizer)["state"]

    first, *others = on(3, body)
    for other in others:
        assert_same(other, first)


def test_tensor_shards_beside_a_plain_optimizer_equal_whole() -> None:
    def body(world: Any, sharded: bool) -> Any:
        model = net()
        rest = optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.02)
        model, muon = distributed(
            world, lambda _: _muon(model.parameters()), model, shard_optimizer=sharded
        )
        for step in range(4):
            muon.zero_grad()
            rest.zero_grad()
            backward(model, world.rank, step)
            muon.step()
            rest.step()
        return weights(model), state_of(muon), state_of(rest)

    wanted = on(2, lambda world: body(world, False))
    assert_same(on(2, lambda world: body(world, True)), wanted)


def test_the_gathered_state_has_the_same_bits_on_all_ranks() -> None:
    def body(world: Any) -> Any:
        return outcome(world, _lamb, True, _odd)

    first, *others = on(3, body)
    for other in others:
        assert_same(other, first)


@given(st.lists(st.integers(0, 9), max_size=7), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_partition_minimises_the_largest_load(costs: list[int], loads: list[int]) -> None:
    after = list(loads)
    counts = partition(costs, after)
    assert sum(counts) == len(costs)
    assert len(counts) == len(loads)
    assert sum(after) == sum(loads) + sum(costs)
    best = min(
        max(
            load + sum(costs[a:b])
            for load, a, b in zip(loads, (0, *cuts), (*cuts, len(costs)), strict=True)
        )
        for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), len(loads) - 1)
    )
    assert max(after) == best


def test_partition_of_later_buckets_balances_earlier_ones() -> None:
    loads = [0, 0, 0]
    counts = [partition([5], loads) for _ in range(6)]
    assert loads == [10, 10, 10]
    assert {tuple(each) for each in counts} == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


@given(st.lists(st.integers(0, 9), max_size=7), st.lists(st.integers(0, 3), min_size=1))
def test_spans_are_contiguous_and_cover_the_buffer(lengths: list[int], counts: list[int]) -> None:
    counts[-1] += max(0, len(lengths) - sum(counts))
    found = spans_of(lengths, counts, sum(lengths) + 5)
    assert found[0].start == 0
    assert found[-1].stop == sum(lengths) + 5
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))
    assert len(found) == len(counts)


def test_a_matrix_costs_its_elements_times_its_shorter_side() -> None:
    assert update_cost((3, 5)) == update_cost((5, 3)) == 45
    assert update_cost((4, 3, 2)) == 24 * 4
    assert update_cost((7,)) == 7
    assert update_cost(()) == 1
    assert update_cost((0, 3)) == 0
    assert spans_of([], [0], 4) == (Span(0, 4),)
