"""Process groups of the accelerator of tests, on which meshes of accelerators are tested."""

from __future__ import annotations

import math

import late_group_cases as cases
import pytest
from late_group_cases import DEADLINE

from helpers.pool import Pool


def test_collectives_have_the_values_of_all_ranks(late_job: Pool) -> None:
    mine = [[float(i + 10 * rank) for i in range(8)] for rank in range(4)]
    total = [sum(column) for column in zip(*mine, strict=True)]
    everything = [value for row in mine for value in row]
    for rank, found in enumerate(late_job.run(cases.collectives, deadline=DEADLINE)):
        parts = [row[2 * rank + i] for row in mine for i in range(2)]
        want = [total, [each / 4 for each in total], mine[3], mine[1], everything]
        want += [total[2 * rank : 2 * rank + 2], everything, parts]
        assert found == want


def test_collectives_do_not_wait_for_the_device(late_job: Pool) -> None:
    assert late_job.run(cases.host_waits, deadline=DEADLINE) == [0] * 4


def test_hsdp_of_torch_on_the_device_equals_that_on_the_cpu(late_job: Pool) -> None:
    for found in late_job.run(cases.differences, "", range(2), deadline=DEADLINE):
        assert max(found) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("missing", [name for name in cases.MISSING if name])
def test_hsdp_of_torch_without_a_wait_has_wrong_weights(late_job: Pool, missing: str) -> None:
    found = late_job.run(cases.differences, missing, range(10, 14), deadline=DEADLINE)
    assert any(math.isnan(by) or by > 1e-3 for of_rank in found for by in of_rank)
