"""Worker pools that live as long as this folder's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from helpers.pool import Pool
from integrations import cases


@pytest.fixture(scope="package")
def pool_of() -> Iterator[Callable[[int], Pool]]:
    """``pool_of(size)``: that many workers in one gloo group, with DDP loaded."""
    pools: dict[int, Pool] = {}

    def get(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size)
            # DDP loads much of torch when it is first used, which takes its time on a busy machine.
            pools[size].run(cases.load, deadline=150.0)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def fresh_pool() -> Iterator[Callable[..., Pool]]:
    """``fresh_pool(size, default_group=...)``: workers for one test only."""
    pools: list[Pool] = []

    def make(size: int, default_group: bool = True) -> Pool:
        pools.append(Pool(size, default_group=default_group))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
