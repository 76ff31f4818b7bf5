"""What needs worker processes of its own: fresh starts, resuming, and workers that die."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.pool import Outcome, Pool

from .cases import errors, lifecycle
from .registry import ALL, LARGE, TINY

FreshPool = Callable[..., Pool]
TIMEOUT = 4.0
"""Seconds the workers of these tests wait for a silent peer."""

# How a lost worker is noticed does not depend on the strategy: one is enough in the quick suite.
ONE_QUICK = [pytest.param(s, marks=[] if s == "dear" else [pytest.mark.slow]) for s in ALL]

SLACK = 8.0
"""Seconds on top of it for two busy cores."""


@pytest.mark.parametrize(
    ("strategy", "size"), [pytest.param("allreduce", 1, marks=pytest.mark.slow), ("dear", 2)]
)
def test_init_makes_and_shutdown_closes_the_default_group(
    strategy: str, size: int, fresh_pool: FreshPool
) -> None:
    fresh_pool(size).run(lifecycle.without_a_default_group, strategy, TINY)


def test_resuming_in_fresh_processes_equals_going_on(
    fresh_pool: FreshPool, pool_of: Callable[[int], Pool], tmp_path: Path
) -> None:
    kinds = [(strategy, mb) for strategy in ALL for mb in (TINY, LARGE)]
    for strategy, mb in kinds:
        pool_of(2).run(lifecycle.save_in_the_middle, strategy, mb, str(tmp_path))
    fresh = fresh_pool(2, default_group=True)
    for strategy, mb in kinds:
        fresh.run(lifecycle.resume_and_compare, strategy, mb, str(tmp_path))


def _survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    """Everyone but the victim, each having named it within the timeout."""
    others = [o for o in outcomes if o.rank != victim]
    for o in others:
        assert o.kind == "ok", f"rank {o.rank} {o.kind}: {o.error}\n{o.detail}"
        assert o.value < TIMEOUT + SLACK, f"rank {o.rank} took {o.value:.1f} s to notice"
    return others


@pytest.mark.parametrize("strategy", ONE_QUICK)
@pytest.mark.parametrize(
    ("size", "where", "mb"),
    [
        pytest.param(2, "between", LARGE, marks=pytest.mark.slow),
        (3, "backward", TINY),
        pytest.param(3, "between", TINY, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_is_named_by_the_others(
    strategy: str, size: int, where: str, mb: float, fresh_pool: FreshPool
) -> None:
    outcomes = fresh_pool(size).outcomes(
        errors.victim_of, strategy, mb, where, "dies", 1, TIMEOUT, grace=TIMEOUT + 2 * SLACK
    )
    assert outcomes[1].kind == "died", outcomes[1]
    assert len(_survivors(outcomes, victim=1)) == size - 1


@pytest.mark.parametrize("strategy", ONE_QUICK)
def test_a_worker_that_falls_silent_is_named_by_the_other(
    strategy: str, fresh_pool: FreshPool
) -> None:
    outcomes = fresh_pool(2).outcomes(
        errors.victim_of, strategy, TINY, "backward", "stops", 1, TIMEOUT, silent=[1]
    )
    assert outcomes[1].kind == "hung", outcomes[1]
    assert len(_survivors(outcomes, victim=1)) == 1


ALONE_S = 2.5
"""Seconds that a silent peer is waited for where one works alone."""


def test_rank_that_works_alone_for_longer_than_the_timeout_ends_nothing(
    fresh_pool: FreshPool,
) -> None:
    fresh_pool(2).run(errors.works_alone, ["dear"], ALONE_S)


@pytest.mark.slow
def test_rank_that_works_alone_for_longer_than_the_timeout_ends_nothing_elsewhere(
    fresh_pool: FreshPool,
) -> None:
    """The group generator takes longer to start than the timeout above."""
    strategies = [
        *("allreduce", "canary:s=2,p=none,compression=fp32,encrypted=false"),
        *("localsgd:every=1,encrypted=false", "adpsgd:overlap=false,encrypted=false"),
    ]
    fresh_pool(2).run(errors.works_alone, strategies, 10.0, deadline=300.0)
