"""Models in replicas of several processes: `distribute(mesh=...)` against torch's own HSDP."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mesh_cases
import pytest

from helpers.amounts import each_once, slow_except
from helpers.pool import Pool

SIZE = 4
PAGE = Path(__file__).parents[2] / "docs/how-to/fsdp2.md"


def test_columns_have_the_ranks_of_other_replicas_and_work_as_worlds(job: Pool) -> None:
    first, second = job.run(mesh_cases.columns_of_two_meshes)[1::2]
    assert first[:3] == [
        [0, (1, 3), 0, (0, 1), ("dp_shard",)],
        [(0, 1), (1, 3), ("tp",)],
        [((0, 1),), [4.0] * 5, [1.0], True],
    ]
    assert second[0] == [1, (1, 3), 1, (2, 3), ("dp_shard",)]
    assert second[2] == [((0, 1),), [4.0] * 5, [5.0], True]
    for speeds, halves in (first[3], second[3]):  # two columns share what `init` has measured
        assert speeds == halves
        assert min(speeds) > 1e6


REFUSED = {
    "no mesh": r"'layers.0.weight' is sharded as Shard\(dim=0\) .*pass distribute\(\) the mesh",
    "not a mesh": r"mesh=tuple\): pass a torch DeviceMesh",
    "no such dimension": r"across='dp'\): the mesh has no such dimension; it has 'dp_replicate', ",
    "across without mesh": r"across='dp'\): it names a dimension of mesh=, not given",
    "a part of the mesh": r"ranks \[0, 1\], rank 2's has \[2, 3\].* of all ranks of the job",
    "sharded over all": r"'layers.0.weight' is placed on ranks 0, 1, 2, 3, and rank . is in",
    "nothing is divided": "no parameter is divided over dp_shard, so nothing averages",
    "of GPUs": "group of dimension 'dp_shard' carries no 'meta' tensors: start the default group",
    "sparse": "1 parameters have sparse gradients, which nothing averages.*use sparse=False",
    "terms": r"'weight' is placed as Partial\(sum\): a parameter must be sharded or replicated$",
    "averaging": "ADPSGD.* is not possible for replicas of 2 ranks.*use LocalSGD",
    "threshold file": "Geryon.* it keeps its thresholds in a file, .*; leave the file out",
    "measured colayers": "Canary.* it bundles colayers again .*; leave measured out",
    "communicating optimizer": "optimizer Adafactor may communicate .*such as AdamW",
    "divided": "DeAR.*fully_shard.. divides the .* state already; leave shard_optimizer out",
    "plan file": "2 ranks: it keeps its plan in a file, .*; leave the file out",
    "unequal meshes": r"rank 0's mesh has shape \[2, 2\], rank 3's has \[4, 1\]",
    "one without mesh": "rank 0 gives distribute.. a mesh and rank 3 none",
    "unequal dimensions": "rank 0 has across=None, rank 3 has across='dp_replicate'",
}


def test_impossible_meshes_and_models_are_refused_in_one_line(job: Pool) -> None:
    for rank, found in enumerate(job.run(mesh_cases.refusals)):
        assert found.keys() == REFUSED.keys()
        for what, words in REFUSED.items():
            assert re.search(words, found[what]), (rank, what, found[what])
            assert "\n" not in found[what]


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        ("allreduce", 10),
        ("dear", 20),
        pytest.param("allreduce", 100, marks=pytest.mark.slow),
        pytest.param("dear", 100, marks=pytest.mark.slow),
    ],
)
def test_exact_strategy_over_fsdp2_equals_hsdp(job: Pool, strategy: str, steps: int) -> None:
    differences = job.run(mesh_cases.difference_to_hsdp, strategy, steps, {})
    assert max(differences) < 1e-6, differences


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "dear"])
def test_each_use_of_fsdp2_equals_hsdps(job: Pool, strategy: str) -> None:
    for found in job.run(mesh_cases.variants, strategy, 6, deadline=150.0):
        wrong = {name: by for name, by in found.items() if not by < 1e-6}
        assert found.keys() == mesh_cases.VARIANTS.keys()
        assert not wrong


@pytest.mark.parametrize("strategy", slow_except(["dear"], ["allreduce", "dear"]))
def test_loop_as_in_torchtitan_continues_with_hsdps_weights(
    job: Pool, strategy: str, tmp_path: Path
) -> None:
    for difference, norms, own in job.run(mesh_cases.pretrained_as_hsdp, strategy, str(tmp_path)):
        assert difference < 1e-6
        assert own == pytest.approx(norms, rel=1e-5)
        assert min(norms) > 0.05, "the limit"


@pytest.mark.parametrize(
    ("strategy", "summed", "across"), each_once(["allreduce", "dear"], [True, False], [2, 1])
)
def test_tensor_parallel_replicas_equal_one_process(
    job: Pool, strategy: str, summed: bool, across: int
) -> None:
    differences = job.run(mesh_cases.tensor_parallel, strategy, summed, across, 20)
    assert max(differences) < 1e-6, differences


@pytest.mark.parametrize("strategy", slow_except(["dear"], ["allreduce", "dear"]))
@pytest.mark.parametrize("shape", slow_except([(2, 1, 2)], [(2, 1, 2), (1, 2, 2), (2, 2, 1)]))
def test_fsdp2_over_tensor_parallelism_equals_hsdp(
    job: Pool, strategy: str, shape: tuple[int, int, int]
) -> None:
    check_three_dimensions(job.run(mesh_cases.three_dimensions, shape, strategy, 4), shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_uses_of_fsdp2_over_tensor_parallelism_equal_hsdps(
    job: Pool, shape: tuple[int, int, int]
) -> None:
    for found in job.run(mesh_cases.parallel_uses, shape, "dear", 4):
        assert found.keys() == mesh_cases.PARALLEL_USES.keys()
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("strategy", slow_except(["dear"], ["allreduce", "dear"]))
def test_parameter_without_gradient_in_some_replicas_trains_as_in_one_process(
    job: Pool, strategy: str
) -> None:
    assert max(job.run(mesh_cases.unused_in_some_replicas, strategy, 7)) < 1e-6


def test_compressed_parts_of_tensor_parallelism_train_as_hsdp_nearly(job: Pool) -> None:
    """Copies of the norm's weight and of biases stay equal, because they are sent whole."""
    strategy = "allreduce:compression=sketch@4:auto_disable=false"
    found = job.run(mesh_cases.compressed_in_parallel, (2, 1, 2), strategy, 6)
    for difference, trained, kept in found:
        assert 1e-6 < difference < 0.05
        assert trained == found[0][1]
        assert any(kept)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "dear"])
def test_three_dimensions_of_several_ranks_equal_hsdp(
    fresh_pool: Callable[..., Pool], strategy: str
) -> None:
    pool, shape = fresh_pool(8, default_group=True), (2, 2, 2)
    check_three_dimensions(pool.run(mesh_cases.three_dimensions, shape, strategy, 4), shape)


def check_three_dimensions(found: list[Any], shape: tuple[int, int, int]) -> None:
    for difference, norms, placed in found:
        assert difference < 1e-6
        assert norms[:4] == pytest.approx(norms[4:], rel=1e-5)
        assert min(norms) > 0.05, "the limit"
        assert ("_StridedShard" in placed[0]) == (shape[2] > 1)
        assert "Replicate" in placed[-1]


@pytest.mark.parametrize("strategy", ["allreduce", "dear:shard_optimizer=true"])
def test_model_that_is_not_divided_is_averaged_over_all_ranks(job: Pool, strategy: str) -> None:
    found = job.run(mesh_cases.whole_models, strategy)
    assert [each[0] for each in found] == pytest.approx([0.0] * SIZE, abs=1e-7)
    assert len({each[1] for each in found}) == 1
    assert [each[2] for each in found] == [0] * SIZE, "columns were connected and are not used"


def test_different_gradients_of_a_parameter_that_ranks_share_are_refused(job: Pool) -> None:
    words = "parameter 'head.weight' is whole on each of the ranks along 'dp_shard'.*norms from"
    assert all(re.search(words, found) for found in job.run(mesh_cases.unequal_batches))


def test_different_numbers_of_steps_are_told_by_ranks_of_the_job(job: Pool) -> None:
    assert job.run(mesh_cases.unequal_steps) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_join_is_refused_in_replicas_of_several_ranks(job: Pool) -> None:
    assert all("give each worker as many batches" in each for each in job.run(mesh_cases.joined))


def test_every_reader_of_a_deferred_shard_sees_its_update(job: Pool) -> None:
    assert job.run(mesh_cases.deferral) == [[(True, True)] * 4] * SIZE


@pytest.mark.parametrize("replicas", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_checkpoint_of_2x2_loads_on_4x1_and_3x2(
    job: Pool, fresh_pool: Callable[..., Pool], tmp_path: Path, replicas: int
) -> None:
    saved = job.run(mesh_cases.checkpoint, str(tmp_path), 2, True)
    pool = job if replicas == 4 else fresh_pool(6, default_group=True)
    loaded = pool.run(mesh_cases.checkpoint, str(tmp_path), replicas, False)
    assert loaded == pytest.approx(saved[:1] * len(loaded), rel=1e-9)


@pytest.mark.slow
def test_program_of_the_page_trains_equal_weights_on_all_ranks(job: Pool) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    losses, weights = zip(*job.run(mesh_cases.page, program, deadline=250.0), strict=True)
    assert max(losses) < 1.0  # the first is 2.3
    assert all(each == weights[0] for each in weights)


def test_rank_that_dies_in_the_first_distribute_is_named_on_all_others(
    fresh_pool: Callable[..., Pool],
) -> None:
    outcomes = fresh_pool(SIZE, default_group=True).outcomes(
        mesh_cases.killed_in_distribute, 3, grace=50.0
    )
    assert [each.kind for each in outcomes] == ["ok"] * 3 + ["died"], outcomes
    words, seconds = zip(*(each.value for each in outcomes[:3]), strict=True)
    assert all("rank 3" in text for text in words[1:]), words
    assert max(seconds) < 25.0


def test_lost_rank_is_named_with_its_replica(job: Pool) -> None:
    found = job.run(mesh_cases.lost_replica, 3)
    assert found[3] == "no more data"
    assert re.search("rank 1: rank 3 failed with ValueError: no more data.*replica 1", found[1])
    assert found[0] == found[2] == ""
