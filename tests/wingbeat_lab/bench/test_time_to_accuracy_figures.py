"""``benchmarks/time_to_accuracy.py``: how it scores, and that it trains and times in one run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import Refusal, benchmark


@pytest.fixture(scope="module")
def timed() -> Iterator[ModuleType]:
    with benchmark("time_to_accuracy") as module:
        yield module


def runs(strategy: str, *ends: tuple[float, float], same: bool = True) -> list[dict[str, Any]]:
    """Trainings that end after so many seconds with such an accuracy."""
    return [
        {
            "strategy": strategy,
            "seed": seed,
            "same_weights": same,
            "curve": [
                {"iteration": 10, "s": 1.0, "accuracy": 20.0},
                {"iteration": 20, "s": s, "accuracy": right},
            ],
        }
        for seed, (s, right) in enumerate(ends)
    ]


@pytest.mark.parametrize(
    ("seconds", "score"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([5.0, 1.0, 2.0, 4.0], 3.0),
        ([3.0, None, 2.0], 3.0),
        ([None, 1.0, None], None),
    ],
)
def test_time_to_accuracy_drops_best_and_worst_with_missing_as_worst(
    timed: ModuleType, seconds: list[float | None], score: float | None
) -> None:
    assert timed.score(seconds) == score


def test_time_to_accuracy_below_the_target_has_no_seconds(timed: ModuleType) -> None:
    trained = runs("ddp", (9.0, 97.0), (8.0, 97.5), (7.0, 99.0))
    trained += runs("omgs", (2.0, 96.9), (2.0, 96.9), (2.0, 98.0))
    first, second = timed.summary(trained, 97.0)
    assert (first["score_s"], first["not_reached"], first["ddp"]) == (8.0, 0, True)
    assert (second["score_s"], second["not_reached"], second["ddp"]) == (None, 2, False)
    assert timed.missed([first, second]) == [
        "ddp (8.0 s) is there first; nothing of wingbeat's is",
    ]


def test_a_form_of_ddp_that_is_there_first_is_a_miss(timed: ModuleType) -> None:
    slow, fast = [(9.0, 98.0)] * 3, [(8.0, 98.0)] * 3
    behind = timed.summary(runs("ddp+bf16", *fast) + runs("dear", *slow), 97.0)
    assert timed.missed(behind) == ["ddp+bf16 (8.0 s) is there first; dear (9.0 s)"]
    ahead = timed.summary(runs("ddp+bf16", *slow) + runs("dear", *fast), 97.0)
    assert timed.missed(ahead) == []
    parted = timed.summary(runs("ddp", *slow) + runs("dear", *fast, same=False), 97.0)
    assert timed.missed(parted) == ["dear leaves the workers with different weights"]


def test_time_to_accuracy_table_lists_missing_and_slowest_first(timed: ModuleType) -> None:
    trained = runs("dear", (3.0, 98.0), (4.0, 98.5), (5.0, 98.0))
    trained += runs("ddp", *[(9.0, 98.0)] * 3) + runs("omgs", *[(9.0, 90.0)] * 3)
    options = argparse.Namespace(task="digits", target=97.0, lab="star:4@100mbit", seeds=[0, 1, 2])
    made = timed.table(options, timed.summary(trained, 97.0))
    assert made.title == "digits to 97%, on star:4@100mbit, real pace, 3 seeds"
    assert made.rows == (
        ("omgs", "", "", "3", "20", "90.00 .. 90.00"),
        ("ddp", "9.0", "9.0 .. 9.0", "0", "20", "98.00 .. 98.00"),
        ("dear", "4.0", "3.0 .. 5.0", "0", "20", "98.00 .. 98.50"),
    )
    behind = timed.summary(runs("ddp", *[(2.0, 98.0)] * 3) + runs("dear", *[(3.0, 98.0)] * 3), 97.0)
    first, *_ = timed.table(options, behind).notes
    assert first == "ddp (2.0 s) is there first; dear (3.0 s)"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seeds", "0", "1"], "allowed are 3 or more"),
        (["--seeds", "0", "1", "1"], "each once"),
        (["--strategies", "dera"], "'dear'"),
        (["--lab", "sta:4@1gbit"], "'sta'"),
        (["--evaluations", "0"], "allowed are 1 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    timed: ModuleType, refusal: Refusal, words: list[str], named: str
) -> None:
    assert named in refusal(timed, words)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_and_timing_are_one_run_and_end_at_the_target(
    timed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--lab", "star:2@100mbit", "--strategies", "ddp", "omgs", "--target", "15"]
    words += ["--iterations", "60", "--evaluations", "6", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["time_to_accuracy.py", *words])
    assert timed.main() in (0, 1)  # which is there first is chance
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [(run["seed"], run["strategy"]) for run in found["runs"]] == [
        (seed, row) for seed in (0, 1, 2) for row in ("ddp", "omgs")
    ]
    for run in found["runs"]:
        assert all(point["accuracy"] < 15 for point in run["curve"][:-1])
        stamps = [point["s"] for point in run["curve"]]
        assert stamps == sorted(stamps)
        assert 0 < stamps[-1] < run["s"]
    assert all(row["same_weights"] for row in found["rows"])
