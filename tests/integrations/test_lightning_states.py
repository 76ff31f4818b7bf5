"""Lightning's Trainer with wingbeat's strategies: checkpoints, what comes after, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool
from integrations import lightning_state_cases as cases

PoolOf = Callable[[int], Pool]


@pytest.mark.parametrize(
    "kind", slow_except(["dear", "sharded", "sketch", "localsgd"], cases.EXTRA)
)
def test_training_goes_on_from_a_checkpoint(kind: str, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(cases.resumed, kind, str(tmp_path), deadline=150.0)


def test_a_checkpoint_has_each_workers_residuals(pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(cases.parts_are_each_workers, str(tmp_path), deadline=150.0)


@pytest.mark.parametrize("kind", ["dear", "sharded"])
def test_all_that_comes_after_a_fit_is_as_with_ddp(kind: str, pool_of: PoolOf) -> None:
    pool_of(2).run(cases.after_fit, kind, deadline=150.0)


@pytest.mark.parametrize(
    "kind",
    slow_except(["ripples", "canary"], ["ripples", "adpsgd", "localsgd", "diloco", "canary"]),
)
def test_models_are_one_where_they_are_looked_at(
    kind: str, pool_of: PoolOf, tmp_path: Path
) -> None:
    pool_of(2).run(cases.averaged, kind, str(tmp_path), deadline=150.0)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("kind", ["allreduce", "dear"])
def test_accumulated_gradients_stay_where_they_are(
    kind: str, manual: bool, pool_of: PoolOf
) -> None:
    pool_of(2).run(cases.local_until_the_last, kind, manual, deadline=150.0)


def test_what_cannot_be_served_is_refused_in_a_line(pool_of: PoolOf) -> None:
    pool_of(2).run(cases.refused, deadline=150.0)


def test_when_one_worker_fails_the_others_end(pool_of: PoolOf) -> None:
    other, failed = pool_of(2).run(cases.one_fails, deadline=150.0)
    assert failed == "ArithmeticError: mine"
    assert other.startswith("PeerError: rank 0: rank 1 "), other
