"""``benchmarks/tuning.py``: what it calls found, and from where a search has something to find."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark


@pytest.fixture(scope="module")
def tuning() -> Iterator[ModuleType]:
    with benchmark("tuning") as module:
        yield module


def raw(*searches: tuple[float, list[float]], finals: list[float]) -> dict[str, Any]:
    """A curve that falls from 2 s at 1 MB to 1 s at 10 MB and stays there."""
    return {
        "sizes_mb": [1.0, 10.0, 100.0],
        "curve_s": [2.0, 1.0, 1.0],
        "final_s": finals,
        "searches": [
            {"search": "bo", "start_mb": start, "tried_mb": tried, "chosen_mb": tried[-1],
             "trial_cost_s": [0.001]}
            for start, tried in searches
        ],
    }  # fmt: skip


def test_a_start_far_from_the_best_is_the_first_trial(tuning: ModuleType) -> None:
    found = tuning.judge(raw((1.0, [1.0, 3.0, 20.0]), finals=[1.25, 1.0]))
    [each] = found["searches"]
    assert each["trials_until_found"] == 3
    assert each["start_of_best"] == 0.5
    assert each["chosen_of_best"] == 0.8


def test_a_start_that_is_good_already_counts_for_nothing(tuning: ModuleType) -> None:
    found = tuning.judge(raw((25.0, [25.0]), (1.0, [1.0, 25.0]), finals=[1.0, 1.0, 1.0]))
    made = tuning.table("resnet50", found, "star:4@7.62gbit")
    good, far = made.rows
    assert good[1:5] == ("25", "1.000, useless", "1", "1")
    assert far[1:5] == ("1", "0.500", "2", "2")
    assert made.title == "Fig. 10: bucket sizes for resnet50, star:4@7.62gbit"
    assert made.notes[0].startswith("bo, 1 starts: found after 2 to 2 trials, never from 0; chose")


def test_trials_spread_over_starts_and_those_that_find_nothing_are_counted(
    tuning: ModuleType,
) -> None:
    starts = (1.0, [1.0, 25.0]), (2.0, [2.0, 3.0, 25.0]), (3.0, [3.0, 4.0])
    found = tuning.judge(raw(*starts, finals=[1.0, 1.25, 2.0, 1.0]))
    assert tuning.over_starts("bo", found["searches"]) == (
        "bo, 3 starts: found after 2 to 3 trials, never from 1; chose 0.500 to 1.000 of the best"
    )


def test_a_search_that_finds_nothing_is_missed_by_its_start(tuning: ModuleType) -> None:
    found = tuning.judge(raw((1.0, [1.0, 1.5]), finals=[1.0, 1.0]))
    assert tuning.missed("resnet50", found) == [
        "resnet50: from 1 MB no size within 3% in 10 trials"
    ]


def test_starts_outside_of_the_range_are_refused(
    tuning: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tuning.py", "--starts", "0.5"])
    assert tuning.main() == 2
    assert "allowed are 1 to 100 MB" in capsys.readouterr().err
