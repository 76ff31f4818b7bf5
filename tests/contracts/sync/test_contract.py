"""The contract: every scenario and check, for every strategy, world size and bucket size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from _pytest.mark import ParameterSet

from helpers.pool import Pool

from . import cases, play
from .registry import CHECKS, LARGE, SCENARIOS, Check, Scenario

assert cases, "importing the package registers the cases"


def _grid(named: Mapping[str, Scenario | Check]) -> list[ParameterSet]:
    rows = [
        (world, case.name, strategy, mb)
        for case in named.values()
        for world in case.grid.worlds
        for strategy in case.grid.strategies
        for mb in case.grid.mbs
    ]
    rows.sort(key=lambda row: row[0])  # one pool after the other
    return [
        pytest.param(
            *(world, name, strategy, mb),
            id=f"{name}-{strategy}-{mb:g}MB-{world}",
            # One bucket on many workers: nothing that the rest of the grid does not see.
            marks=[pytest.mark.slow] if world > 2 and mb == LARGE else [],
        )
        for world, name, strategy, mb in rows
    ]


@pytest.mark.parametrize(("world", "name", "strategy", "mb"), _grid(SCENARIOS))
def test_equals_the_reference(
    world: int, name: str, strategy: str, mb: float, pool_of: Callable[[int], Pool]
) -> None:
    pool_of(world).run(play.scenario, name, strategy, mb)


@pytest.mark.parametrize(("world", "name", "strategy", "mb"), _grid(CHECKS))
def test_check(
    world: int, name: str, strategy: str, mb: float, pool_of: Callable[[int], Pool]
) -> None:
    pool_of(world).run(play.check, name, strategy, mb)
