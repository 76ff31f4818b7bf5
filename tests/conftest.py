"""What every test gets: skips that say why, fixed seeds, and the same hypothesis runs in CI."""

from __future__ import annotations

import builtins
import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings

from helpers import longest
from helpers.amounts import examples
from helpers.hanging import LastResort

if TYPE_CHECKING:
    from helpers.pool import Pool

SEED = 20_240

ALONE_FILES = "WINGBEAT_TEST_ALONE_FILES"
"""Environment variable: where tools/test.py wants to be told which files have tests for later."""

settings.register_profile("local", deadline=None, max_examples=examples(100))
settings.register_profile(
    "ci", deadline=None, max_examples=examples(100), derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@cache
def _why_no_lab() -> str:
    """Why this machine cannot make an emulated cluster; empty if it can."""
    from wingbeat_lab.lab import available

    return available() or ""


@cache
def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device"


def pytest_configure(config: pytest.Config) -> None:
    """End the run, with the name and all stacks, if a test hangs in C++."""
    os.environ.setdefault("WINGBEAT_TOP", "off")  # hundreds of jobs would each start a supervisor
    config.pluginmanager.register(LastResort())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep the garbage collector off what stays: thousands of tests, and all modules.

    It would go through them again and again, here and whenever a test collects its own garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let extensions free at the end what they hold: some complain of what is left."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """List the files with tests that run by themselves; a second run need not load the others.

    Then, when tests are deselected, let workers begin with the longest files.
    """
    # Not for the processes that tests start, which may run pytest too.
    if where := os.environ.pop(ALONE_FILES, ""):
        found = sorted({str(item.path) for item in items if item.get_closest_marker("alone")})
        Path(where).write_text("\n".join(found), encoding="utf-8")
    yield
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        folder = Path(__file__).parent
        named = [(os.path.relpath(item.path, folder), item) for item in items]
        items[:] = longest.first(named, workers)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with the reason."""
    for marker, why in (("lab", _why_no_lab), ("gpu", _why_no_gpu)):
        if item.get_closest_marker(marker) and why():
            pytest.skip(f"{marker}: {why()}")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Same random numbers in every run, whatever ran before."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if request.node.get_closest_marker("gpu"):
        torch.manual_seed(SEED)
    else:  # for kinds of devices that nobody uses it would format the stack, each time
        torch.default_generator.manual_seed(SEED)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which matplotlib was not installed."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder as ``/tmp`` is: all users may create files there, and remove their own."""
    made = Path(tempfile.mkdtemp(prefix="wb-", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], Pool]]:
    """``pool_of(size)``: so many workers in a gloo group, for tests that leave it as it was."""
    from helpers.pool import Pool, load_ddp  # torch, which most folders do without

    pools: dict[int, Pool] = {}

    def get(size: int) -> Pool:
        if size not in pools:
            # Most cases run with three: enough to see that workers may hash text differently.
            pools[size] = Pool(size, interpreter=size == 3)
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
