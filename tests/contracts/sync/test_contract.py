"""The contract: every scenario and check, for every strategy, world size and bucket size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from helpers.pool import Pool

from . import cases, play
from .registry import CHECKS, MEASURED, SCENARIOS, Check, Grid, Scenario

assert cases, "importing the package registers the cases"


PLANNING = frozenset(
    {
        "two_backwards_without_no_sync",
        "join_with_accumulation",
        "route_unused_on_some_ranks_adamw",
        "three_dtypes_in_one_model",
        "random_model_0",
        "two_models_alternating",
        "after_an_exception_in_backward",
        "distribute_again_after_release",
    }
)
"""Cases that planning in the midst of training might disturb; each takes a second to measure."""


def _can_wait(name: str, grid: Grid, world: int, strategy: str, mb: float) -> bool:
    """Whether only the slow run needs this point: every world and every size have another."""
    if strategy in MEASURED and name not in PLANNING:
        return True
    if "sharded" in strategy and world == 2 and 3 in grid.worlds:
        return True  # what it shares with the others is tested there
    if ("coded" in strategy or strategy in MEASURED) and (world, mb) != (
        min(3, max(grid.worlds)),
        min(grid.mbs),
    ):
        return True  # hardly anything of what remains depends on it
    if len(grid.worlds) == 1 or len(grid.mbs) == 1 or world == 1:
        return False
    return mb == (min(grid.mbs) if world == 2 else max(grid.mbs))


def _marks(*point: Any) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if _can_wait(*point) else []


def _points(named: Mapping[str, Scenario | Check]) -> list[ParameterSet]:
    rows = [
        (world, case, strategy, mb)
        for case in named.values()
        for world in case.grid.worlds
        for strategy in case.grid.strategies
        for mb in case.grid.mbs
    ]
    rows.sort(key=lambda row: row[0])  # one pool after the other
    return [
        pytest.param(
            *(world, case.name, strategy, mb),
            id=f"{case.name}-{strategy}-{mb:g}MB-{world}",
            marks=[pytest.mark.slow]
            if _can_wait(case.name, case.grid, world, strategy, mb)
            else [],
        )
        for world, case, strategy, mb in rows
    ]


@pytest.mark.parametrize(("world", "name", "strategy", "mb"), _points(SCENARIOS))
def test_equals_the_reference(
    world: int, name: str, strategy: str, mb: float, pool_of: Callable[[int], Pool]
) -> None:
    pool_of(world).run(play.scenario, name, strategy, mb)


@pytest.mark.parametrize(("world", "name", "strategy", "mb"), _points(CHECKS))
def test_check(
    world: int, name: str, strategy: str, mb: float, pool_of: Callable[[int], Pool]
) -> None:
    pool_of(world).run(play.check, name, strategy, mb)
