"""PyTorch's own tests of c10d and DDP with the backend "wingbeat"; the page lists them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from helpers.pool import Pool
from integrations import process_group_cases as cases

from . import play, torch_suite
from .test_ddp_suite import DEADLINE, DOCS

PAGE = (DOCS / "developers/c10d-suite.md").read_text(encoding="utf-8")
COLLECTIVES, DDP = (
    re.findall(r"test_\w+", block)
    for block in re.findall(r"^```\n(test_.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)

pytestmark = pytest.mark.slow


def run_collective(name: str) -> None:
    suite = torch_suite.load()
    suite.BACKEND = "wingbeat"
    cases.join()
    torch_suite.case(name)()
    if "monitored" in name:  # some ranks have called it more often than others
        dist.destroy_process_group()


def run_ddp(name: str) -> None:
    cases.join()
    play.run(name, "ddp")


@pytest.fixture(scope="module")
def pool_in() -> Iterator[Callable[[int], Pool]]:
    """``pool_in(size)``: so many processes whose default group has the backend "wingbeat"."""
    pools: dict[int, Pool] = {}

    def get(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size, default_group=False)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


def test_page_names_tests() -> None:
    assert len(COLLECTIVES) > 90
    assert len(DDP) > 30


def _skip_if_missing(name: str) -> None:
    if f"def {name}(" not in torch_suite.source():
        pytest.skip("this torch has no such test")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_passes_as_on_page(name: str, pool_in: Callable[[int], Pool]) -> None:
    _skip_if_missing(name)
    pool_in(4).run(run_collective, name, deadline=DEADLINE)


@pytest.mark.parametrize("name", DDP)
def test_ddp_passes_as_on_page(name: str, pool_in: Callable[[int], Pool]) -> None:
    _skip_if_missing(name)
    pool_in(2).run(run_ddp, name, deadline=DEADLINE)
