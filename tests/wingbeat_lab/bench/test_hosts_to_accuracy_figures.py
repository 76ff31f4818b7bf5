"""``benchmarks/hosts_to_accuracy.py``: the product, what is judged, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.scripts import Refusal, benchmark
from wingbeat_lab.bench.measure import Quantiles
from wingbeat_lab.bench.results import Deciding


@pytest.fixture(scope="module")
def hosts() -> Iterator[ModuleType]:
    with benchmark("hosts_to_accuracy") as module:
        yield module


def runs(strategy: str, *ends: tuple[int, float], same: bool = True) -> list[dict[str, Any]]:
    """Trainings that end after so many iterations with such an accuracy."""
    return [
        {
            "strategy": strategy,
            "seed": seed,
            "same_weights": same,
            "curve": [{"iteration": count, "s": 1.0, "accuracy": right}],
        }
        for seed, (count, right) in enumerate(ends)
    ]


def bench(seconds: float, deciding: Deciding | None = None) -> Any:
    """The bench's figures of a row, with a spread of a tenth."""
    quantiles = Quantiles(median=seconds, p10=0.9 * seconds, p90=1.1 * seconds)
    return SimpleNamespace(iteration_s=quantiles, deciding=deciding, bytes_per_iteration=1.0)


def test_seconds_are_iterations_times_an_iteration(hosts: ModuleType) -> None:
    trained = runs("omgs:warmup=0", (100, 97.0), (200, 98.0), (300, 97.5))
    [row] = hosts.summary(trained, {"omgs:warmup=0": bench(0.5)}, 97.0)
    assert row["iterations"] == 200
    assert row["seconds"] == 200 * 0.5
    assert row["range_s"] == pytest.approx([100 * 0.45, 300 * 0.55])
    assert (row["deciding_s"], row["deciding_iterations"]) == (0.0, 0)


def test_iterations_of_deciding_take_its_seconds(hosts: ModuleType) -> None:
    """Of the fastest seed there are fewer iterations than deciding needs."""
    trained = runs("omgs:warmup=0", (30, 97.0), (200, 98.0), (300, 97.5))
    deciding = Deciding(iterations=40, seconds=35.0, decision={})
    [row] = hosts.summary(trained, {"omgs:warmup=0": bench(0.5, deciding)}, 97.0)
    assert row["seconds"] == 35.0 + (200 - 40) * 0.5
    assert row["range_s"] == pytest.approx([35.0, 35.0 + (300 - 40) * 0.55])
    assert (row["deciding_s"], row["deciding_iterations"]) == (35.0, 40)


def test_seeds_below_the_target_count_as_the_worst(hosts: ModuleType) -> None:
    trained = runs("ddp", (100, 97.0), (400, 96.9), (300, 97.5))
    trained += runs("omgs", (100, 97.0), (400, 96.9), (400, 90.0))
    first, second = hosts.summary(trained, {"ddp": bench(1.0), "omgs": bench(1.0)}, 97.0)
    assert (first["seconds"], first["not_reached"]) == (300.0, 1)
    assert (second["seconds"], second["not_reached"]) == (None, 2)


def test_each_kind_must_be_ahead_of_the_fastest_powersgd(hosts: ModuleType) -> None:
    sketched = "{}:compression=sketch@4:auto_disable=false"
    times = {
        "ddp": 0.01,  # exact rows of DDP are no baseline
        "ddp+powersgd:rank=1": 0.5,
        "ddp+powersgd:rank=4": 0.4,
        sketched.format("allreduce"): 0.6,
        sketched.format("dear"): 0.3,
        "allreduce:compression=lowrank@4:auto_disable=false": 0.4,
        "omgs:warmup=0": 0.39,
    }
    trained = [run for row in times for run in runs(row, *[(100, 98.0)] * 3)]
    rows = hosts.summary(trained, {row: bench(s) for row, s in times.items()}, 97.0)
    assert hosts.missed(rows) == [
        "allreduce:compression=lowrank@4:auto_disable=false (40.0 s) is not ahead of "
        "ddp+powersgd:rank=4 (40.0 s)"
    ]


def test_a_kind_without_the_target_and_different_weights_are_missed(hosts: ModuleType) -> None:
    trained = runs("ddp+powersgd:rank=1", *[(100, 90.0)] * 3)
    trained += runs("omgs", *[(100, 90.0)] * 3) + runs("dear", *[(100, 98.0)] * 3, same=False)
    times = {row: bench(1.0) for row in ("ddp+powersgd:rank=1", "omgs", "dear")}
    assert hosts.missed(hosts.summary(trained, times, 97.0)) == [
        "dear leaves the workers with different weights",
        "omgs (target not reached) is not ahead of ddp+powersgd:rank=1 (target not reached)",
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seeds", "0", "1"], "allowed are 3 or more"),
        (["--rows", "ddp+powersgd", "ddp"], "a row of wingbeat's"),
        (["--rows", "ddp", "dear"], "lists with ddp+powersgd"),
        (["--rows", "ddp+powersgd", "omgs"], "add warmup=0"),
        (["--rows", "ddp+powersgd", "dera"], "'dear'"),
        (["--model", "paced:resnet5"], "resnet50"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    hosts: ModuleType, refusal: Refusal, words: list[str], named: str
) -> None:
    assert named in refusal(hosts, words)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_counts_iterations_and_times_them(
    hosts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = ["ddp+powersgd:rank=1", "allreduce:compression=sketch@4:auto_disable=false"]
    words = ["--per-host", "2", "--seeds", "0", "1", "2", "--target", "11", "--length", "40"]
    words += ["--evaluations", "4", "--model", "paced:resnet50@0.02", "--iterations", "2"]
    words += ["--rounds", "1", "--json", str(tmp_path / "a.json"), "--rows", *rows]
    monkeypatch.setattr(sys, "argv", ["hosts_to_accuracy.py", *words])
    assert hosts.main() in (0, 1)  # which is ahead is chance
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [row["strategy"] for row in found["rows"]] == rows
    for row in found["rows"]:
        assert row["same_weights"]
        assert row["iterations"] in range(10, 41)
        assert row["seconds"] >= row["iterations"] * row["iteration_s"]
    assert {run["strategy"] for run in found["bench"]["runs"]} == set(rows)
