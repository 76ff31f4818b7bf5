"""Worker pools that live as long as the test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from helpers.pool import Pool


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], Pool]]:
    """``pool_of(size)``: that many workers, started at the first use."""
    pools: dict[int, Pool] = {}

    def get(size: int) -> Pool:
        return pools.setdefault(size, Pool(size))

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def fresh_pool() -> Iterator[Callable[..., Pool]]:
    """``fresh_pool(size, default_group=...)``: workers for one test only."""
    pools: list[Pool] = []

    def make(size: int, default_group: bool = False) -> Pool:
        pools.append(Pool(size, default_group=default_group))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
