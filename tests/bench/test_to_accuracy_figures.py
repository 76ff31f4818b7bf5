"""``benchmarks/to_accuracy.py``: which curve stands for which row, and what is combined."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import FOLDER, benchmark


@pytest.fixture(scope="module")
def combined() -> Iterator[ModuleType]:
    with benchmark("to_accuracy") as module:
        yield module


def curve(*accuracies: float) -> list[dict[str, float]]:
    return [{"iteration": 10 * n, "accuracy": a} for n, a in enumerate(accuracies, 1)]


def cell(**seconds: float) -> dict[str, Any]:
    rows = {
        text.replace("_", "+"): {"iteration_s": s, "ddp": text.startswith("ddp")}
        for text, s in seconds.items()
    }
    return {"model": "resnet50", "rate": "1gbit", "rows": rows}


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ("ddp", "ddp"),
        ("ddp+bf16", "ddp+bf16"),
        ("ddp+powersgd:rank=1", "ddp+powersgd:rank=4"),
        ("allreduce", "ddp"),
        ("dear:plan=fixed", "ddp"),
        ("geryon", "ddp"),
        ("dear:plan=fixed,wire=bf16", "allreduce:wire=bf16"),
        ("dear:plan=fixed,wire=sketch:auto_disable=false", "allreduce:wire=sketch"),
        ("allreduce:wire=lowrank@1:auto_disable=false", "allreduce:wire=lowrank@4"),
        ("omgs", "omgs"),
        ("localsgd:every=30,wire=sketch@4", "localsgd:every=30,wire=sketch@4"),
    ],
)
def test_each_row_has_the_curve_of_what_it_sends(
    combined: ModuleType, row: str, trained: str
) -> None:
    assert combined.curve_of(row) == trained


def test_every_row_of_the_table_of_times_has_a_curve(combined: ModuleType) -> None:
    with benchmark("best") as best:
        rows = [*best.ROWS, *best.SELDOM]
    assert all(combined.curve_of(row) for row in rows)


def test_an_accuracy_that_is_lost_again_does_not_count(combined: ModuleType) -> None:
    assert combined.iterations_to([curve(50, 91, 89, 92, 93)], 90) == 40
    assert combined.iterations_to([curve(50, 91, 92, 89)], 90) is None


def test_seeds_count_by_their_mean(combined: ModuleType) -> None:
    assert combined.iterations_to([curve(88, 92), curve(94, 94)], 90) == 10
    assert combined.iterations_to([curve(80, 92), curve(94, 94)], 90) == 20


def test_seconds_are_iterations_times_what_one_takes(combined: ModuleType) -> None:
    curves = {"ddp": [curve(50, 94.9, 95)], "omgs": [curve(20, 30, 94.5)]}
    [made] = combined.table(curves, [cell(ddp=2.0, dear=1.5, omgs=0.5, ddp_fp16=1.0)])
    assert {text: row["s"] for text, row in made["rows"].items()} == {
        "ddp": 40.0,
        "dear": 30.0,
        "omgs": 15.0,
    }
    assert combined.first(made["rows"], ddp=False) == ("omgs", 15.0)


def test_who_ends_below_the_target_is_never_first(combined: ModuleType) -> None:
    curves = {"ddp": [curve(50, 95)], "omgs": [curve(20, 94.4)]}
    [made] = combined.table(curves, [cell(ddp=2.0, omgs=0.1)])
    assert made["rows"]["omgs"]["s"] is None
    assert combined.missed([made]) == ["resnet50, 1gbit: ddp takes 40 s, nothing of wingbeat's"]


def test_a_form_of_ddp_that_is_there_first_is_a_miss(combined: ModuleType) -> None:
    curves = {"ddp": [curve(50, 95)]}
    [behind, ahead] = combined.table(curves, [cell(ddp=1.0, dear=1.1), cell(ddp=1.1, dear=1.0)])
    assert combined.missed([behind, ahead]) == ["resnet50, 1gbit: ddp takes 20 s, dear (22 s)"]


def run(folder: Path, *, runs: Any, cells: Any) -> subprocess.CompletedProcess[str]:
    paths = [folder / "curves.json", folder / "times.json"]
    for path, key, value in zip(paths, ("runs", "cells"), (runs, cells), strict=True):
        path.write_text(json.dumps({key: value}))
    command = [sys.executable, FOLDER / "to_accuracy.py", *paths, "--json", folder / "out.json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_table_and_the_report(tmp_path: Path) -> None:
    runs = [{"task": "digits", "strategy": "ddp", "curve": curve(50, 95)}]
    ended = run(tmp_path, runs=runs, cells=[cell(ddp=2.0, dear=1.0)])
    assert ended.returncode == 0, ended.stderr
    assert "| `dear` | 20 | **20** |" in ended.stdout
    assert "| DDP's best form / ours | | 2.00 |" in ended.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["tasks"]["digits"]["target"] == 94.5


@pytest.mark.parametrize(
    ("runs", "cells", "said"),
    [
        ([{"task": "text", "strategy": "ddp", "curve": curve(9)}], [cell(ddp=1.0)], "no cell of"),
        (
            [{"task": "digits", "strategy": "omgs", "curve": curve(9)}],
            [cell(ddp=1.0)],
            "no row ddp",
        ),
        ("nothing", [cell(ddp=1.0)], "measure it by accuracy.py"),
        ([{"task": "digits", "strategy": "ddp", "curve": curve(9)}], 3, "measure it by best.py"),
    ],
)
def test_what_was_not_measured_is_said_in_one_line(
    tmp_path: Path, runs: Any, cells: Any, said: str
) -> None:
    ended = run(tmp_path, runs=runs, cells=cells)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
