"""What is saved of a training in which every worker has weights of its own, and loaded again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wingbeat
import wingbeat_lab
from helpers.sums import (
    SIZE,
    TINY_MB,
    Sums,
    assert_same,
    drain,
    given,
    made,
    step,
    trained_on,
    weights,
)
from helpers.training import on


def save(model: Any, optimizer: Any) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@functools.cache
def saved() -> tuple[tuple[Any, ...], tuple[dict[str, Tensor], ...]]:
    """Each worker's state in the middle of a run, and its weights at the end of that."""

    def body(world: Any) -> Any:
        model, optimizer = made(world)
        for number in range(3):
            step(model, optimizer, given(number, world.rank))
        state = save(model, optimizer)
        for number in range(3, 5):
            step(model, optimizer, given(number, world.rank))
        return state, weights(model)

    found = on(SIZE, body)
    return tuple(state for state, _ in found), tuple(end for _, end in found)


def resumed(choose: Callable[[int], tuple[int, int]], before: bool = False) -> list[Any]:
    """Load the model and the optimizer of these ranks, and train on to the end, and to the rest."""
    states, _ = saved()

    def body(world: Any) -> Any:
        model, optimizer = (None, None) if before else made(world)
        of_model, of_optimizer = choose(world.rank)
        if before:
            model = Sums()
            model.load_state_dict(states[of_model][0])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            strategy = wingbeat_lab.Ako(mb=TINY_MB, first_mb=TINY_MB)
            model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        optimizer.load_state_dict(states[of_optimizer][1])
        if not before:
            model.load_state_dict(states[of_model][0])
        for number in range(3, 5):
            step(model, optimizer, given(number, world.rank))
        end = weights(model)
        drain(model, optimizer)
        return end, weights(model)

    return on(SIZE, body)


ALL = [given(n, rank) for n in range(5) for rank in range(SIZE)]


def test_each_worker_goes_on_from_its_own_state_as_if_it_had_not_stopped() -> None:
    _, ends = saved()
    for (end, after), wanted in zip(resumed(lambda rank: (rank, rank)), ends, strict=True):
        assert_same(end, wanted)
        assert_same(after, trained_on(ALL))


def test_weights_of_rank_0_and_states_of_their_own() -> None:
    for _, after in resumed(lambda rank: (rank, rank), before=True):
        assert_same(after, trained_on(ALL))


def test_all_from_rank_0_go_on_from_its_weights() -> None:
    begin = saved()[0][0][0]
    more = trained_on([given(n, rank) for n in (3, 4) for rank in range(SIZE)])
    for _, after in resumed(lambda _: (0, 0)):
        assert_same(after, {name: begin[name] + more[name] for name in more})


def test_parts_of_more_workers_than_there_are_now() -> None:
    states, _ = saved()

    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world)
        model.load_state_dict(states[0][0])
        optimizer.load_residuals([state["wingbeat"] for _, state in states])
        drain(model, optimizer)
        return weights(model)

    wanted = trained_on([given(n, rank) for n in range(3) for rank in range(SIZE)])
    for found in on(2, body):
        assert_same(found, wanted)


def test_a_worker_that_has_loaded_nothing_is_named() -> None:
    states, _ = saved()

    def body(world: Any) -> None:
        model, optimizer = made(world)
        if world.rank == 0:
            optimizer.load_state_dict(states[0][1])
            with pytest.raises(wingbeat.errors.WingbeatError, match="rank 1"):
                step(model, optimizer, given(3, 0))

    on(2, body, timeout=0.5)


def test_a_worker_alone_trains_as_with_any_strategy() -> None:
    states, _ = saved()

    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world)
        optimizer.load_state_dict(states[0][1])
        for number in range(2):
            model(given(number, 0)).backward()
        optimizer.step()
        return weights(model)

    assert_same(on(1, body)[0], trained_on([given(0, 0), given(1, 0)], 1))
