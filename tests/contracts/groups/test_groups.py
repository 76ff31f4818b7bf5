"""The contract of groups, over threads of one process and over processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import wingbeat
from helpers.pool import Pool
from wingbeat.transport import loopback
from wingbeat.transport.world import World

from . import cases, failures
from .cases import SIZE

FreshPool = Callable[..., Pool]
PoolOf = Callable[[int], Pool]


def over_tcp(name: str, interfaces: int) -> None:
    """What a process of the pool does."""
    world = wingbeat.init(timeout=20, interfaces=["lo"] * interfaces)
    try:
        cases.CASES[name](world)
    finally:
        wingbeat.shutdown()


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_over_tcp(name: str, pool_of: PoolOf) -> None:
    pool_of(SIZE).run(over_tcp, name, 1)


@pytest.mark.parametrize(
    "name",
    ["every_operation_on_every_topology", "overlapping_groups_in_another_order_on_every_rank"],
)
def test_a_case_over_two_links_of_tcp(name: str, pool_of: PoolOf) -> None:
    pool_of(SIZE).run(over_tcp, name, 2)


@pytest.mark.parametrize("interfaces", [1, 2])
@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_over_loopback(name: str, interfaces: int) -> None:
    members = loopback.worlds(SIZE, interfaces=interfaces, timeout=20)
    loopback.run(members, cases.CASES[name])
    for world in members:
        world.close()


# -- failures ---------------------------------------------------------------------------------


def failing_over_tcp(name: str, what: Any) -> str:
    world = wingbeat.init(timeout=20)
    try:
        text: str = getattr(failures, name)(world, failures.kill if what is None else what)
    finally:
        wingbeat.shutdown()
    return text


def over_loopback(name: str, what: Any = None) -> list[str]:
    board = loopback.Switchboard()
    members = loopback.worlds(SIZE, switchboard=board, timeout=20)

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
    outcomes = fresh_pool(SIZE).outcomes(failing_over_tcp, name, None, grace=40.0)
    assert outcomes[failures.VICTIM].kind == "died", outcomes[failures.VICTIM]
    kinds = [outcome.kind for outcome in outcomes[1:]]
    details = "\n".join(f"{outcome.error}\n{outcome.detail}" for outcome in outcomes[1:])
    assert kinds == ["ok"] * (SIZE - 1), details


@pytest.mark.parametrize("name", DEATHS)
def test_a_lost_member_fails_its_groups_alone(name: str) -> None:
    over_loopback(name)


OTHERS = [
    ("is_slow_and_left_out", 0),
    ("is_slow_and_left_out", 2),
    ("fails_in_its_own_code", 0),
    ("fails_often", 8),
]


@pytest.mark.parametrize(("name", "what"), OTHERS)
def test_other_failures_over_tcp(name: str, what: int, fresh_pool: FreshPool) -> None:
    fresh_pool(SIZE).run(failing_over_tcp, name, what)


@pytest.mark.parametrize(("name", "what"), OTHERS)
def test_other_failures_over_loopback(name: str, what: int) -> None:
    over_loopback(name, what)


# -- one process ------------------------------------------------------------------------------


def test_a_group_without_work_holds_no_thread() -> None:
    members = loopback.worlds(2, timeout=20)

    def body(world: World) -> list[World]:
        opened = [world.open_group(wingbeat.Group((0, 1), epoch)) for epoch in range(40)]
        for group in opened:
            cases.right(cases.summed(group), (0, 1))
        return opened

    kept = loopback.run(members, body)
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("wingbeat-executor") for name in names) < 20
    del kept
    for world in members:
        world.close()


def test_the_end_of_the_world_is_that_of_its_groups() -> None:
    members = loopback.worlds(2, timeout=20)
    groups = loopback.run(members, lambda world: world.open_group(wingbeat.Group((0, 1))))
    loopback.run(groups, cases.summed)
    for world in members:
        world.close()
    assert "was started after group (0, 1) of epoch 0" in cases.error_of(
        lambda: cases.summed(groups[0])
    )


def test_what_is_queued_when_a_group_is_closed_is_done_first() -> None:
    members = loopback.worlds(2, timeout=20)

    def body(world: World) -> None:
        with world.open_group(wingbeat.Group((0, 1))) as group:
            many = [cases.started(group, 1000) for _ in range(20)]
        for buffer, handle in many:
            assert handle.done()
            handle.wait()
            cases.right(buffer, (0, 1))

    loopback.run(members, body)
    for world in members:
        world.close()


def test_tensors_on_a_gpu_are_refused() -> None:
    with loopback.worlds(1)[0] as world:
        members = world.open_group(wingbeat.Group((0,)))
        with pytest.raises(wingbeat.errors.UsageError, match=r"group \(0\) of epoch 0 carries CPU"):
            members.nccl  # noqa: B018
