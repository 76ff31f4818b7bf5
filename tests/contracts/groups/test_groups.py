"""The contract of groups, over threads of one process and over processes with gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wingbeat
from helpers.pool import Pool
from wingbeat.transport import loopback
from wingbeat.transport.world import World

from . import cases, failures
from .cases import SIZE

FreshPool = Callable[..., Pool]
PoolOf = Callable[[int], Pool]


def on_gloo(name: str) -> None:
    """What a process of the pool does."""
    world = wingbeat.init(timeout=20)
    try:
        cases.CASES[name](world)
    finally:
        wingbeat.shutdown()


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_over_gloo(name: str, pool_of: PoolOf) -> None:
    pool_of(SIZE).run(on_gloo, name)


@pytest.mark.parametrize("interfaces", [1, 2])
@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_over_loopback(name: str, interfaces: int) -> None:
    members = loopback.worlds(SIZE, interfaces=interfaces, timeout=20)
    loopback.run(members, cases.CASES[name])
    for world in members:
        world.close()


# -- failures ---------------------------------------------------------------------------------


def failing_on_gloo(name: str, what: Any) -> str:
    world = wingbeat.init(timeout=20)
    try:
        text: str = getattr(failures, name)(world, failures.kill if what is None else what)
    finally:
        wingbeat.shutdown()
    return text


def over_loopback(name: str, what: Any = None) -> list[str]:
    board = loopback.Switchboard()
    members = loopback.worlds_on(board, SIZE, timeout=20)

    def body(world: World) -> str:
        act = what if what is not None else lambda: board.fail(world.rank)
        text: str = getattr(failures, name)(world, act)
        return text

    said = loopback.run(members, body)
    for world in members:
        world.close()
    return said


DEATHS = ["dies_in_the_middle", "dies_before_it_comes"]


@pytest.mark.parametrize("name", DEATHS)
def test_a_killed_member_fails_its_groups_alone(name: str, fresh_pool: FreshPool) -> None:
    outcomes = fresh_pool(SIZE).outcomes(failing_on_gloo, name, None, grace=40.0)
    assert outcomes[failures.VICTIM].kind == "died", outcomes[failures.VICTIM]
    for outcome in outcomes[1:]:
        assert outcome.kind == "ok", f"{outcome.error}\n{outcome.detail}"


@pytest.mark.parametrize("name", DEATHS)
def test_a_lost_member_fails_its_groups_alone(name: str) -> None:
    over_loopback(name)


OTHERS = [("is_slow_and_left_out", 0), ("is_slow_and_left_out", 2), ("fails_in_its_own_code", 0)]


@pytest.mark.parametrize(("name", "what"), OTHERS)
def test_other_failures_over_gloo(name: str, what: int, fresh_pool: FreshPool) -> None:
    fresh_pool(SIZE).run(failing_on_gloo, name, what)


@pytest.mark.parametrize(("name", "what"), OTHERS)
def test_other_failures_over_loopback(name: str, what: int) -> None:
    over_loopback(name, what)


def test_tensors_on_a_gpu_are_refused_before_anything_is_sent() -> None:
    with loopback.worlds(1)[0] as world:
        members = world.open_group(wingbeat.Group((0,)))
        with pytest.raises(wingbeat.errors.UsageError, match=r"group \(0\) of epoch 0 carries CPU"):
            members.native  # noqa: B018
    assert torch.get_num_threads()
