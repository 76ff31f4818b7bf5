"""``benchmarks/scheduling.py``: what it times, and how it judges."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat_lab import baselines


@pytest.fixture(scope="module")
def scheduling() -> Iterator[ModuleType]:
    with benchmark("scheduling") as module:
        yield module


def side(scheduling: ModuleType, row: str) -> Any:
    return scheduling.Side(baselines.parse(row))


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


def test_the_table_has_the_spread_of_the_iterations(scheduling: ModuleType) -> None:
    row = {"row": "P3", "elements": 1 << 20, "slices": 7, "held_back": 3}
    row |= {"median_ms": 0.4, "p99_ms": 0.8, "longest_ms": 0.9, "samples_ms": [0.3, 0.4, 0.9]}
    cells = ("P3, 1,048,576", "7", "0.400", "0.300 .. 0.800", "0.900", "3")
    assert scheduling.table([row]).rows == (cells,)
