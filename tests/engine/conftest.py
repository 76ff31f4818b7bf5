"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import late_group_cases
import pytest

from helpers import accelerator
from helpers.pool import Pool


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Four processes in torch's default group."""
    pool = Pool(4, default_group=True)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def late_job() -> Iterator[Pool]:
    """Four processes in a default group for the CPU and the accelerator of tests."""
    if accelerator.why_not():
        pytest.skip(accelerator.why_not())
    pool = Pool(4, default_group=False)
    pool.run(late_group_cases.join, deadline=late_group_cases.DEADLINE)
    yield pool
    pool.close()
