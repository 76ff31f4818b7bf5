"""Meshes on the accelerator of tests: FSDP2 with wingbeat between replicas against HSDP."""

from __future__ import annotations

import late_mesh_cases
import mesh_cases
import pytest
from late_group_cases import DEADLINE

from helpers.amounts import slow_except
from helpers.pool import Pool


@pytest.mark.parametrize("strategy", slow_except(["dear"], ["allreduce", "dear"]))
def test_exact_strategy_over_fsdp2_equals_hsdp(late_job: Pool, strategy: str) -> None:
    case, seeds = "mesh_cases.difference_to_hsdp", range(2)
    call = late_mesh_cases.each_seed
    for found in late_job.run(call, case, seeds, strategy, 5, {}, deadline=DEADLINE):
        assert max(found) < 1e-6, found


QUICK = ("accumulated without zero_grad", "clipped", "scaled", "bfloat16")


@pytest.mark.slow
def test_uses_of_fsdp2_equal_hsdps(late_job: Pool) -> None:
    """Accumulation replaces buffers that streams still use."""
    case, call = "mesh_cases.variants", late_mesh_cases.each_seed
    for [found] in late_job.run(call, case, range(9, 10), "dear", 3, QUICK, deadline=DEADLINE):
        assert max(found.values()) < 1e-6, found


OUTSIDE = (
    "roots without a common one",
    "partly sharded",
    "partly sharded without zero_grad",
    "sharded after plain layers",
    "sharded after plain layers, without zero_grad",
    "not the last backward",
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "dear"])
def test_gradients_of_several_streams_equal_hsdps(late_job: Pool, strategy: str) -> None:
    """A bucket has gradients of backward's stream, and of a stream of each root."""
    case, call = "mesh_cases.variants", late_mesh_cases.each_seed
    for found in late_job.run(call, case, range(20, 22), strategy, 3, OUTSIDE, deadline=DEADLINE):
        assert max(max(each.values()) for each in found) < 1e-6, found


@pytest.mark.parametrize(
    "strategy",
    slow_except(
        ["dear:compression=sketch@4:auto_disable=false"],
        [
            "omgs:compression=bf16",
            "allreduce:compression=bf16",
            "allreduce:compression=sketch@4:auto_disable=false",
            "dear:compression=sketch@4:auto_disable=false",
        ],
    ),
)
def test_strategy_on_the_device_has_the_weights_of_the_cpu(late_job: Pool, strategy: str) -> None:
    call = late_mesh_cases.differences
    for by_seed, exact in late_job.run(call, strategy, 6, range(30, 32), deadline=DEADLINE):
        assert max(by_seed) < 1e-6, by_seed
        assert (exact > 1e-6) == ("compression" in strategy), exact


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "dear"])
@pytest.mark.parametrize("name", list(mesh_cases.VARIANTS))
def test_use_of_fsdp2_equals_hsdps(late_job: Pool, name: str, strategy: str) -> None:
    case, seeds = "mesh_cases.variants", range(4)
    call = late_mesh_cases.each_seed
    for found in late_job.run(call, case, seeds, strategy, 4, [name], deadline=DEADLINE):
        assert max(each[name] for each in found) < 1e-6, found


_NO_SUMS = "it does not sum gradients by collectives, and its order with the streams of"
_CODEC = "its codec has no tested order of streams"
REFUSED = {
    "geryon": ("Geryon()", _NO_SUMS),
    "localsgd": ("LocalSGD()", _NO_SUMS),
    "allreduce:compression=topk": ("AllReduce(compression='topk')", _CODEC),
    "allreduce:compression=lowrank": ("AllReduce(compression='lowrank')", _CODEC),
    "omgs": ("OMGS()", _CODEC),
}


def test_strategies_whose_order_is_not_tested_are_refused(late_job: Pool) -> None:
    case, call = "late_mesh_cases.refused_strategy", late_mesh_cases.each_seed
    for strategy, (shown, why) in REFUSED.items():
        for [words] in late_job.run(call, case, range(1), strategy, deadline=DEADLINE):
            assert f"{shown} is not possible for replicas of 2 ranks: {why}" in words
            assert "on 'late' devices; use " in words
            assert words.endswith(", or a mesh of the CPU")
            assert "\n" not in words


def test_tensor_parallelism_is_refused(late_job: Pool) -> None:
    case, call = "late_mesh_cases.refused_tensor_parallelism", late_mesh_cases.each_seed
    for [words] in late_job.run(call, case, range(1), deadline=DEADLINE):
        assert "devices: parameter 'layers.0.weight' is tensor parallel, and its order" in words
        assert "divide the model by fully_shard() alone, or use a mesh of the CPU" in words
