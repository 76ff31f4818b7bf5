"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.pool import Pool


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Four processes in torch's default group."""
    pool = Pool(4, default_group=True)
    yield pool
    pool.close()
