"""``benchmarks/averages.py``: what counts as growth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from helpers.scripts import FOLDER, benchmark


@pytest.fixture(scope="module")
def averages() -> Iterator[ModuleType]:
    with benchmark("averages") as module:
        yield module


def looks(*sockets: int) -> list[dict[str, float]]:
    return [{"mb": 100.0, "threads": 9, "sockets": each} for each in sockets]


def test_averages_halves_exclude_the_first_look(averages: ModuleType) -> None:
    first, second = averages.halves(looks(90, 90, *[20] * 8, *[21] * 10))
    assert (first["sockets"], second["sockets"]) == (20, 21)
    first, second = averages.halves(looks(20, 20, 90, *[20] * 7, *[21] * 10))
    assert (first["sockets"], second["sockets"]) == (90, 21)


@pytest.mark.parametrize(("later", "grown"), [(20, 0), (24, 0), (25, 1)])
def test_averages_that_grow_are_a_miss(averages: ModuleType, later: int, grown: int) -> None:
    found = averages.missed({"rank 0": looks(*[20] * 10, *[later] * 10)})
    assert len(found) == grown
    assert all("rank 0: sockets 25" in line for line in found)


def test_a_row_without_averages_is_refused_in_one_line() -> None:
    command = [sys.executable, FOLDER / "averages.py", "--row", "dear", "--json", "/dev/null"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "no models are averaged in groups" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_table_has_both_halves(averages: ModuleType) -> None:
    seen = {"rank 0": looks(*[20] * 10, *[21] * 10)}
    made = averages.table({"averages": 2000, "s": 9.0, "seen": seen}, "ripples")
    assert made.rows == (("rank 0", "100.0", "9", "20", "100.0", "9", "21"),)
    assert made.title == "ripples: 2,000 steps, each with an average, in 9 s"
