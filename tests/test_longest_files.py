"""The order of tests on several workers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from helpers import longest


def test_longest_files_exist() -> None:
    missing = [name for name in longest.FILES if not (Path(__file__).parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_each_worker_begins_with_its_longest_files_and_none_is_lost(workers: int) -> None:
    names = [f"test_{number}.py" for number in range(1000)] + list(longest.FILES) * 3
    ordered = longest.first([(name, name) for name in names], workers)
    assert sorted(ordered) == sorted(names)
    begin, fronts = 0, []
    for number in range(workers):  # as xdist's worksteal divides them
        fronts.append(ordered[begin])
        begin += (len(ordered) - begin) // (workers - number)
    assert fronts == list(longest.FILES[:workers])


def test_files_are_not_divided_between_workers() -> None:
    names = list(longest.FILES) * 50  # more than a worker's part
    ordered = longest.first([(name, name) for name in names], 4)
    changes = sum(a != b for a, b in itertools.pairwise(ordered))
    assert changes == len(longest.FILES) - 1
