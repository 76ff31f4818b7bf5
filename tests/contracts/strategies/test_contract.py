"""The contract: every scenario and check, for strategies, world sizes and bucket sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import pytest
from _pytest.mark import ParameterSet

from helpers.pool import Pool

from . import cases, play
from .registry import (
    BY_PRIORITY,
    CHANGES,
    CHECKS,
    CODED,
    MEASURED,
    SCENARIOS,
    SERVED,
    SERVED_CODED,
    TINY,
    UPDATED_THERE,
    Check,
    Grid,
    Scenario,
)

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
"""Cases that planning in the midst of training might disturb, or a codec at servers; each takes
seconds to measure, or to start."""


TELLING = frozenset(
    {
        "route_unused_on_some_ranks_adamw",
        "no_sync_with_clipping",
        "resume_adamw_loaded_after_steps",
        "after_an_exception_in_backward",
        "state_dicts_load_into_plain_objects",
    }
)
"""The cases that every strategy of `RARE` has in the quick run."""

CHANGING = frozenset(
    {
        "no_sync_with_clipping",
        "resume_adamw_loaded_after_steps",
        "state_dicts_load_into_plain_objects",
    }
)
"""Cases that a change of the strategy in each iteration has in the quick run, with `PLANNING`."""

RARE = ("bytescheduler", "canary", "dear-mesh", "geryon-server", "mgwfbp")
"""Strategies that have few other cases in the quick run."""

MORE_MODELS = frozenset(f"random_model_{seed}" for seed in range(6, 20))
"""More of the same for the slow run; six of them stay."""

DEADLINE = 150.0
"""Seconds for a case. Some start servers more than once, and those load torch."""

DEFERS = "dear"
"""The strategy under which neither gradients nor updates are there before somebody looks."""

Point = tuple[int, str, float]  # world, strategy, mb


def _sizes(grid: Grid, world: int) -> tuple[float, ...]:
    """Bucket sizes of the quick run: every world and every size have one another."""
    if len(grid.worlds) == 1 or world == 1:
        return grid.mbs
    return (max(grid.mbs) if world == 2 else min(grid.mbs),)


def _worth_seconds(case: Scenario | Check, strategy: str) -> bool:
    """Whether the quick run has this case with a strategy that takes seconds to start.

    Those that start servers with optimizers take longest, twice what the rest does: when their
    parameters are asked for depends little on the case, so they take turns.
    """
    if strategy == CHANGES and case.name in CHANGING:
        return True
    if case.name not in PLANNING:
        return False
    there = [name for name in UPDATED_THERE if name in case.grid.strategies]
    return (
        strategy not in there or strategy == there[sorted(PLANNING).index(case.name) % len(there)]
    )


def _usual(case: Scenario | Check, turn: int) -> set[Point]:
    """Return the points of which the quick run is made.

    Each case runs with many buckets and most workers under the schedule that defers most. What
    whole all-reduces, codecs, pairs of workers and shards add to that depends little on the case:
    they take turns.
    """
    if case.name in MORE_MODELS:
        return set()
    grid = case.grid
    usual = (min(3, max(grid.worlds)), min(grid.mbs))
    chosen: set[Point] = set()
    simple: list[Point] = []
    sharded: list[Point] = []
    others: list[Point] = []
    served: list[Point] = []
    for strategy in grid.strategies:
        if strategy in (CHANGES, *BY_PRIORITY, *MEASURED, *SERVED_CODED, *UPDATED_THERE):
            chosen |= {(usual[0], strategy, usual[1])} if _worth_seconds(case, strategy) else set()
        elif strategy in (*SERVED, *CODED):
            group = served if strategy in SERVED else others
            group.append((usual[0], strategy, usual[1]))
        else:
            for world in grid.worlds:
                points = [(world, strategy, mb) for mb in _sizes(grid, world)]
                if "sharded" in strategy:
                    sharded += points if world == usual[0] else []
                elif world == 2 and usual[0] == 3:
                    others += points
                elif strategy == DEFERS:
                    chosen.update(points)
                else:
                    simple += points
    groups = [points for points in (simple, sharded, simple, others, served) if points]
    if groups:
        points = groups[turn % len(groups)]
        chosen.add(points[turn // len(groups) % len(points)])
    return chosen


def _covering(case: Scenario | Check, turn: int) -> set[Point]:
    """Return the points of the slow run: half of the grid, with every pair of its values.

    A case meets each strategy in each world and with each size; what only a third value together
    with two others would show is met by every other case.
    """
    worlds, mbs = case.grid.worlds, case.grid.mbs
    chosen: set[Point] = set()
    for s, strategy in enumerate(case.grid.strategies):
        if strategy in MEASURED:  # its buckets are planned, whatever the size
            chosen |= {(world, strategy, min(mbs)) for world in worlds}
            continue
        for (w, world), (m, mb) in product(enumerate(worlds), enumerate(mbs)):
            if min(len(worlds), len(mbs)) == 1 or (w + m + s + turn) % 2 == 0:
                chosen.add((world, strategy, mb))
    return chosen


def _points(named: Mapping[str, Scenario | Check]) -> list[ParameterSet]:
    rows = []
    for turn, case in enumerate(named.values()):
        usual = _usual(case, turn)
        # In the quick run three of four cases have no more than the schedule that defers most, in
        # one of its worlds each.
        quick = {point for point in usual if turn % 4 == 0 or point[1] == DEFERS} or usual
        if turn % 4 and len(worlds := sorted({point[0] for point in quick})) > 1:
            quick = {point for point in quick if point[0] == worlds[turn % len(worlds)]}
        quick |= {(3, name, TINY) for name in RARE if case.name in TELLING}
        for point in sorted(usual | quick | _covering(case, turn)):
            world, strategy, mb = point
            name = f"{case.name}-{strategy}-{mb:g}MB-{world}"
            marks = [] if point in quick else [pytest.mark.slow]
            rows.append(pytest.param(world, case.name, strategy, mb, id=name, marks=marks))
    rows.sort(key=lambda row: row.values[0])  # one pool after the other
    return rows


@pytest.mark.parametrize(("world", "name", "strategy", "mb"), _points(SCENARIOS))
def test_equals_the_reference(
    world: int, name: str, strategy: str, mb: float, pool_of: Callable[[int], Pool]
) -> None:
    pool_of(world).run(play.scenario, name, strategy, mb, deadline=DEADLINE)


@pytest.mark.parametrize(("world", "name", "strategy", "mb"), _points(CHECKS))
def test_check(
    world: int, name: str, strategy: str, mb: float, pool_of: Callable[[int], Pool]
) -> None:
    pool_of(world).run(play.check, name, strategy, mb, deadline=DEADLINE)


def test_the_workers_of_the_contract_hash_text_differently(pool_of: Callable[[int], Pool]) -> None:
    """As real ones do: what is planned in the order of a set would differ between them."""
    assert len(set(pool_of(3).run(hash, "text"))) > 1
