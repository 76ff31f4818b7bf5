"""Lightning Fabric with wingbeat's strategies, against Fabric's own DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool
from integrations import fabric_cases as cases

PoolOf = Callable[[int], Pool]


@pytest.mark.parametrize(
    "name", slow_except(["accumulation", "clipped by inf", "16-mixed, clipped", "gan"], cases.CASES)
)
def test_weights_are_those_of_ddp(name: str, pool_of: PoolOf) -> None:
    pool_of(2).run(cases.as_ddp, name, deadline=150.0)


@pytest.mark.parametrize("kind", slow_except(["dear", "sketch"], [*cases.EXACT, "sketch"]))
def test_saving_and_loading_goes_on(kind: str, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(cases.saved, kind, str(tmp_path), deadline=150.0)


def test_what_is_saved_is_the_same_on_all_workers(pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(cases.averaged, str(tmp_path), deadline=150.0)


def test_what_cannot_be_served_is_refused(pool_of: PoolOf) -> None:
    pool_of(2).run(cases.refused, deadline=150.0)
