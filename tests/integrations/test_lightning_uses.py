"""What people also do with Lightning's Trainer, on two workers and on four."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.pool import Pool
from integrations import lightning_cases, lightning_state_cases
from integrations import lightning_use_cases as cases

PoolOf = Callable[[int], Pool]
NAMES = list(cases.USES)


@pytest.mark.parametrize(
    "names",
    [NAMES[0::2], pytest.param(NAMES[1::2], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_options_change_what_they_change_with_ddp(names: list[str], pool_of: PoolOf) -> None:
    pool_of(2).run(cases.used, names, deadline=150.0)


def test_a_trainer_is_used_several_times(pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(cases.several_times, str(tmp_path), deadline=150.0)


@pytest.mark.slow
def test_the_tuner_finds_what_it_finds_with_ddp(pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(cases.tuned, str(tmp_path), deadline=150.0)


@pytest.mark.slow  # gradients of parameters that join later are in test_lightning, "late"
def test_parameters_may_be_trained_later(pool_of: PoolOf) -> None:
    pool_of(2).run(cases.fine_tuned, deadline=150.0)


def test_nothing_kept_is_lost_when_parameters_are_added(pool_of: PoolOf) -> None:
    pool_of(2).run(cases.carried, deadline=150.0)


@pytest.mark.parametrize(
    "names",
    [[*cases.OPTIMIZED][:4], pytest.param([*cases.OPTIMIZED][4:], marks=pytest.mark.slow)],
    ids=["gradients", "models"],
)
def test_two_optimizers(names: list[str], pool_of: PoolOf) -> None:
    pool_of(2).run(cases.several_optimizers, names, deadline=170.0)


def test_two_optimizers_are_refused_where_they_cannot_be_served(pool_of: PoolOf) -> None:
    for *several, growing in pool_of(2).run(cases.refused_with_several, deadline=150.0):
        assert all("is not the optimizer's: under bounded staleness" in each for each in several)
        assert growing.startswith("add_param_group() in training_step is not possible: add the")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipped accumulation", "gan"])
def test_four_workers(name: str, pool_of: PoolOf) -> None:
    kinds = ("allreduce", "dear", *(("sharded",) if name != "gan" else ()))
    pool_of(4).run(lightning_cases.as_ddp, name, kinds, deadline=170.0)


@pytest.mark.slow
def test_in_pairs_a_step_may_wait_for_all(pool_of: PoolOf) -> None:
    pool_of(4).run(lightning_state_cases.waits_for_all, deadline=170.0)
