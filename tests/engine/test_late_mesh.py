"""Meshes on the accelerator of tests: FSDP2 with wingbeat between replicas against HSDP."""

from __future__ import annotations

from collections.abc import Iterator

import late_group_cases
import late_mesh_cases
import mesh_cases
import pytest

from helpers import accelerator
from helpers.pool import Pool

DEADLINE = 170.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    if accelerator.why_not():
        pytest.skip(accelerator.why_not())
    made = Pool(4, default_group=False)
    made.run(late_group_cases.join, deadline=DEADLINE)
    yield made
    made.close()


@pytest.mark.parametrize("strategy", ["allreduce", "dear"])
def test_exact_strategy_over_fsdp2_equals_hsdp(pool: Pool, strategy: str) -> None:
    case, seeds = "mesh_cases.difference_to_hsdp", range(2)
    call = late_mesh_cases.each_seed
    for found in pool.run(call, case, seeds, strategy, 10, {}, deadline=DEADLINE):
        assert max(found) < 1e-6, found


QUICK = ("accumulated without zero_grad", "clipped", "scaled")


def test_uses_of_fsdp2_equal_hsdps(pool: Pool) -> None:
    """Accumulation replaces buffers that streams still use."""
    case, call = "mesh_cases.variants", late_mesh_cases.each_seed
    for [found] in pool.run(call, case, range(9, 10), "dear", 3, QUICK, deadline=DEADLINE):
        assert max(found.values()) < 1e-6, found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "dear"])
@pytest.mark.parametrize("name", list(mesh_cases.VARIANTS))
def test_use_of_fsdp2_equals_hsdps(pool: Pool, name: str, strategy: str) -> None:
    case, seeds = "mesh_cases.variants", range(4)
    call = late_mesh_cases.each_seed
    for found in pool.run(call, case, seeds, strategy, 4, [name], deadline=DEADLINE):
        assert max(each[name] for each in found) < 1e-6, found


def test_methods_whose_order_is_not_tested_are_refused(pool: Pool) -> None:
    [words] = {each for [each] in pool.run(
        late_mesh_cases.each_seed, "late_mesh_cases.refused_method", range(1), deadline=DEADLINE
    )}  # fmt: skip
    assert "a mesh of 'late' devices: Geryon() does not sum gradients by collectives" in words
    assert "use AllReduce() or DeAR(), or a mesh of the CPU" in words
