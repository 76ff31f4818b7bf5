"""Models averaged between replicas of several processes: LocalSGD, DiLoCo and Ripples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mesh_average_cases as cases
import pytest

from helpers.pool import Pool

SIZE = 4


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Four processes in torch's default group."""
    pool = Pool(SIZE, default_group=True)
    yield pool
    pool.close()


EXACT = {
    "localsgd:every=3": {"every": 3},
    "localsgd:every=1": {"every": 1},
    "localsgd:every=3,overlap=true": {"every": 3, "delay": 1},
    "diloco:every=3": {"every": 3, "lr": 0.7, "momentum": 0.9},
    "diloco:every=4,delay=2": {"every": 4, "lr": 0.7, "momentum": 0.9, "delay": 2},
}


@pytest.mark.parametrize("strategy", EXACT)
def test_averages_over_fsdp2_equal_one_process(job: Pool, strategy: str) -> None:
    options: dict[str, Any] = EXACT[strategy]
    differences = job.run(cases.compared_with_one_process, strategy, 20, options)
    assert max(map(max, differences)) < 1e-6, differences
