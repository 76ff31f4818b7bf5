"""Trainers with sharded models, and wingbeat between replicas, against the trainers' own HSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool, load_ddp
from helpers.refusals import assert_said
from integrations import mesh_cases as cases

PoolOf = Callable[[int], Pool]


@pytest.fixture(scope="module")
def pool_of() -> Iterator[PoolOf]:
    """Four workers for this module: torch keeps the groups of each mesh until a process ends.

    The thread of each group wakes 100 times a second. In workers that stay, those of a module take
    a fifth of a core from all later tests.
    """
    pool = Pool(4)
    pool.run(load_ddp, deadline=150.0)
    yield lambda _: pool
    pool.close()


@pytest.mark.parametrize("name", slow_except([], cases.TRAINED))
def test_lightning_trains_the_weights_of_its_hsdp(name: str, pool_of: PoolOf) -> None:
    pool_of(4).run(cases.as_hsdp, name, deadline=150.0)


@pytest.mark.slow
def test_lightning_trains_the_weights_of_its_tensor_parallelism(pool_of: PoolOf) -> None:
    """So the ranks along that dimension have the same batches."""
    pool_of(4).run(cases.tensor_parallel_as_lightnings, deadline=150.0)


def test_checkpoint_of_one_file_warns_once_of_residuals(pool_of: PoolOf, tmp_path: Path) -> None:
    first, *others = pool_of(4).run(cases.one_file_warnings, str(tmp_path), deadline=150.0)
    assert len(first) == 1
    assert "residuals start at zero, and warm-up of a codec from the beginning" in first[0]
    assert others == [[], [], []]


@pytest.mark.parametrize(
    ("kind", "distributed"),
    [
        pytest.param("sketch", True, marks=pytest.mark.slow),
        pytest.param("dear", True, marks=pytest.mark.slow),
        ("dear", False),
    ],
)
def test_lightning_continues_from_its_checkpoint(
    kind: str, distributed: bool, pool_of: PoolOf, tmp_path: Path
) -> None:
    pool_of(4).run(cases.resumed, kind, str(tmp_path), distributed, deadline=150.0)


@pytest.mark.parametrize(
    "clip", [{"max_norm": 0.1}, pytest.param({"clip_val": 0.01}, marks=pytest.mark.slow)]
)
def test_fabric_trains_the_weights_of_its_hsdp(
    clip: dict[str, float], pool_of: PoolOf, tmp_path: Path
) -> None:
    pool_of(4).run(cases.fabric_as_hsdp, clip, str(tmp_path), deadline=150.0)


def test_lightning_refuses_wrong_sizes_and_options_in_one_line(pool_of: PoolOf) -> None:
    wanted = [
        "unknown option of WingbeatModelParallelStrategy 'process_group'",
        "3 replicas x data_parallel_size 1 x tensor_parallel_size 1 are not the 4 workers",
        "replicas='all'",
        "tensor_parallel_size=0): give positive whole numbers",
        "all 4 workers are one replica, so there is nothing to exchange: give replicas=2",
        "call model = fabric.setup(model) first",
        "ADPSGD() is not possible for replicas of 2 ranks",
    ]
    for said in pool_of(4).run(cases.lightning_refusals, deadline=150.0):
        assert_said(said, wanted)


def test_accelerate_trains_shards_of_the_user_and_does_not_save_them(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    wanted = [f"{what}: Accelerate saves rank 0's shards only" for what in ("save", "load")]
    for said in pool_of(4).run(cases.own_shards, str(tmp_path), deadline=150.0):
        assert_said(said, [each.replace(":", "_state():") for each in wanted])


def test_fsdp_of_trainers_and_loaders_beside_tensor_parallelism_are_refused_in_one_line(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    wanted = [
        "parallelism_config with dp_shard_size: Accelerate's FSDP shards models by its own plugin",
        "its parallelism_config has tp_enabled; allowed is dp_replicate_size",
        "prepare(accelerator): Accelerate's FSDP shards models by its own plugin",
        "parameter '0.weight' is divided by parallelize_module(), whose ranks must read the same",
        "parameter '0.weight' is divided by parallelize_module(), whose ranks must read the same",
        "WingbeatTrainer: TrainingArguments(fsdp=...): Accelerate's FSDP shards models by its own",
        "prepare(accelerator): Accelerate's FSDP shards models by its own plugin",
    ]
    for said in pool_of(4).run(cases.fsdp_refusals, str(tmp_path), deadline=150.0):
        assert_said(said, wanted)
