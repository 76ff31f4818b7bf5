"""``benchmarks/scheduling.py``: what it times, and how it judges."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat import strategies


@pytest.fixture(scope="module")
def scheduling() -> Iterator[ModuleType]:
    with benchmark("scheduling") as module:
        yield module


def side(scheduling: ModuleType, row: str) -> Any:
    return scheduling.Side(strategies.parse(row).choices())


@pytest.mark.parametrize(
    ("row", "held"), [("geryon:pull=start", False), ("tictac", True), ("p3", False)]
)
def test_only_an_enforced_order_holds_sums_back(
    scheduling: ModuleType, row: str, held: bool
) -> None:
    made = side(scheduling, row)
    assert made.worker() > 0
    assert made.server() > 0
    # The layer that forward needs first is ready last: all others wait for it.
    assert (made.held > 0) is held


def test_smaller_slices_are_more(scheduling: ModuleType) -> None:
    counts = [side(scheduling, f"geryon:slice={n}").slices() for n in scheduling.SLICES]
    assert counts == sorted(set(counts))


def test_every_row_is_measured_at_every_threshold(scheduling: ModuleType) -> None:
    found = scheduling.measured(2)
    pairs = {(row["row"], row["elements"]) for row in found}
    assert pairs == {(name, n) for name in scheduling.ROWS for n in scheduling.SLICES}
    assert all(len(row["samples_ms"]) == 2 for row in found)
