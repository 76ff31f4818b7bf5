"""What every test gets: skips that say why, fixed seeds, and the same hypothesis runs in CI."""

from __future__ import annotations

import builtins
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings

from helpers.hanging import LastResort

if TYPE_CHECKING:
    from helpers.pool import Pool

SEED = 20_240

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@cache
def _why_no_lab() -> str:
    """Why this machine cannot make an emulated cluster; empty if it can."""
    from wingbeat.lab import available

    return available() or ""


@cache
def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device"


def pytest_configure(config: pytest.Config) -> None:
    """End the run, with the name and all stacks, if a test hangs in C++."""
    config.pluginmanager.register(LastResort())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep an emulated cluster to itself: other tests beside it would be in its figures."""
    if item.get_closest_marker("lab"):
        item.add_marker("alone")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with the reason."""
    for marker, why in (("lab", _why_no_lab), ("gpu", _why_no_gpu)):
        if item.get_closest_marker(marker) and why():
            pytest.skip(f"{marker}: {why()}")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Same random numbers in every run, whatever ran before."""
    random.seed(SEED)
    np.random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which matplotlib was not installed."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], Pool]]:
    """``pool_of(size)``: so many workers in a gloo group, for tests that leave it as it was."""
    from helpers.pool import Pool, load_ddp  # torch, which most folders do without

    pools: dict[int, Pool] = {}

    def get(size: int) -> Pool:
        if size not in pools:
            # Most cases run with three: enough to see that workers may hash text differently.
            pools[size] = Pool(size, interpreters=size == 3)
            # DDP loads much of torch when it is first used, which takes its time on a busy machine.
            pools[size].run(load_ddp, deadline=150.0)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def fresh_pool() -> Iterator[Callable[..., Pool]]:
    """``fresh_pool(size, default_group=...)``: workers for one test only."""
    from helpers.pool import Pool

    pools: list[Pool] = []

    def make(size: int, default_group: bool = False) -> Pool:
        pools.append(Pool(size, default_group=default_group))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
