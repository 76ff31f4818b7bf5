"""``benchmarks/accuracy.py``: what its workers train on, what it refuses, and how it judges."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import wingbeat
from helpers.scripts import FOLDER, benchmark


@pytest.fixture(scope="module")
def accuracy() -> Iterator[ModuleType]:
    with benchmark("accuracy") as module:
        yield module


def made(task: str, strategy: str, *finals: float, same: bool = True) -> list[dict[str, Any]]:
    """One run for each final accuracy, seeds counted from 0."""
    return [
        {
            "task": task,
            "strategy": strategy,
            "seed": seed,
            "same_weights": same,
            "s": 2.0,
            "curve": [
                {"iteration": 50, "accuracy": final / 2, "bits": 3.0},
                {"iteration": 100, "accuracy": final, "bits": 2.0},
            ],
        }
        for seed, final in enumerate(finals)
    ]


def test_a_judged_row_may_lose_half_a_point_on_average(accuracy: ModuleType) -> None:
    for name in (
        "allreduce:compression=sketch",
        "dear:compression=sketch@8",
        "allreduce:compression=topk@0.01",
    ):
        dense = made("text", "allreduce", 60.0, 61.0, 62.0)
        rows = accuracy.summary(dense + made("text", name, 59.0, 61.0, 61.6))
        assert rows[1]["gap"] == pytest.approx(-1.4 / 3)
        assert (rows[1]["lowest"], rows[1]["highest"]) == (59.0, 61.6)
        assert accuracy.missed(rows) == []
        [line] = accuracy.missed(accuracy.summary(dense + made("text", name, 59.0, 61.0, 61.4)))
        assert line == f"text: {name} ends 0.53 points below the first row; limit 0.5"


@pytest.mark.parametrize(
    "name",
    [
        "allreduce:compression=sketch@4",
        "allreduce:compression=topk@0.001",
        "dear:compression=lowrank",
        "ddp+powersgd",
    ],
)
def test_coarser_rows_are_shown_and_not_judged(accuracy: ModuleType, name: str) -> None:
    rows = accuracy.summary(made("text", "allreduce", 60.0) + made("text", name, 20.0, same=False))
    assert rows[1]["gap"] == -40.0
    assert accuracy.missed(rows) == []


def test_a_warm_up_for_all_rows_leaves_those_that_have_one(accuracy: ModuleType) -> None:
    assert accuracy.parse("omgs:warmup=1000", 200).strategy.compression.warmup == 1000
    assert accuracy.parse("omgs", 200).strategy.compression.warmup == 200
    assert (
        accuracy.parse("omgs", None).strategy.compression.warmup
        == wingbeat.OMGS().compression.warmup
        == 400
    )
    assert accuracy.parse("lags:warmup=0", 200).strategy.compression.warmup == 0
    runs = made("text", "allreduce", 60.0) + made("text", "allreduce:compression=topk@0.001", 20.0)
    assert accuracy.missed(accuracy.summary(runs)) == []
    assert len(accuracy.missed(accuracy.summary(runs, warmup=200))) == 1


def test_accuracy_of_each_task_has_its_own_reference(accuracy: ModuleType) -> None:
    runs = made("text", "allreduce", 60.0) + made("text", "allreduce:compression=sketch", 59.9)
    runs += made("digits", "allreduce", 99.0) + made("digits", "allreduce:compression=sketch", 98.0)
    [line] = accuracy.missed(accuracy.summary(runs))
    assert line.startswith("digits: allreduce:compression=sketch ends 1.00 points")


def test_accuracy_of_workers_with_different_weights_is_a_miss(accuracy: ModuleType) -> None:
    runs = made("text", "allreduce", 60.0) + made(
        "text", "dear:compression=sketch", 60.0, same=False
    )
    [line] = accuracy.missed(accuracy.summary(runs))
    assert line == "text: dear:compression=sketch leaves the workers with different weights"


def test_codecs_are_used_whatever_they_add_residual(accuracy: ModuleType) -> None:
    for name in ("sketch", "topk@0.01", "lowrank@2", "fp16"):
        assert (
            accuracy.parse(f"allreduce:compression={name}", 0).strategy.wire.auto_disable is False
        )
    assert accuracy.parse("dear:compression=topk@0.001", 70).strategy.wire.warmup == 70
    assert accuracy.parse("dear:mb=3", 70).strategy.plan.mb == 3


def test_what_is_left_is_what_the_same_task_took(accuracy: ModuleType) -> None:
    runs = [("digits", 1, "allreduce"), ("digits", 1, "omgs"), ("text", 0, "allreduce")]
    assert accuracy.left(runs[:2], [100, 300], {"digits": 0.2}) == ", about 80 s left"
    known = accuracy.left(runs, [100, 300, 10], {"digits": 0.2})
    assert known == ", about 80 s left, and the tasks not begun"
    assert accuracy.left([], [], {"digits": 0.2}) == ""


def test_learning_rate_rises_then_falls_to_zero(accuracy: ModuleType) -> None:
    rates = [accuracy.rate_at(step, 200) for step in range(200)]
    top = rates.index(max(rates))
    assert 8 <= top <= 10
    assert max(rates) > 0.98
    assert all(a < b for a, b in itertools.pairwise(rates[: top + 1]))
    assert all(a > b for a, b in itertools.pairwise(rates[top:]))
    assert 0 < rates[-1] < 1e-3


@pytest.mark.parametrize("name", ["digits", "text"])
def test_batches_and_weights_depend_on_the_seed_alone(accuracy: ModuleType, name: str) -> None:
    task = accuracy.TASKS[name]()

    def first(rank: int, seed: int) -> torch.Tensor:
        x: torch.Tensor = next(task.batches(rank, 4, seed))[0]
        return x.clone()

    for rank in range(4):
        assert torch.equal(first(rank, 0), first(rank, 0))
        assert not torch.equal(first(rank, 0), first(rank, 1))
        assert not torch.equal(first(rank, 0), first((rank + 1) % 4, 0))
    weights = [next(iter(task.network(seed).parameters())) for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_digits_for_training_and_testing_are_disjoint(accuracy: ModuleType) -> None:
    task = accuracy.digits_task()
    x, y = task.held_out
    assert len(x) == len(y) == 9 * 797
    held_out = {image.numpy().tobytes() for image in x}
    epochs = 10
    for rank in range(4):
        for images, _ in itertools.islice(task.batches(rank, 4, 0), 7 * epochs):
            assert not held_out & {image.numpy().tobytes() for image in images}


def test_text_is_held_out_by_module_and_shifted_by_one(accuracy: ModuleType) -> None:
    task = accuracy.text_task()
    x, y = task.held_out
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x[1:, 0], y[:-1, -1])
    assert x.numel() > 200_000
    held_out = bytes(x.flatten().tolist())
    assert accuracy.source(accuracy.MODULES.split()[0])[-200:] in held_out
    windows = []
    for inputs, answers in itertools.islice(task.batches(3, 4, 0), 50):
        assert torch.equal(inputs[:, 1:], answers[:, :-1])
        assert int(inputs.max()) < 128
        windows += [bytes(window) for window in inputs.tolist()]
    # Modules have some lines in common; a twelfth of all text is held out.
    assert sum(window in held_out for window in windows) < len(windows) / 100


def test_a_source_that_is_missing_is_said(accuracy: ModuleType) -> None:
    with pytest.raises(accuracy.UsageError, match="no source of 'sys'"):
        accuracy.source("sys")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["--strategies", "allreduce:compression=sketch", "allreduce"],
            "'allreduce:compression=sketch'",
        ),
        (["--strategies", "ddp", "fsdp"], "'fsdp'"),
        (["--strategies", "allreduce", "allreduce"], "--strategies allreduce allreduce"),
        (["--strategies", "allreduce", "allreduce:compression=skech"], "'skech'"),
        (["--seeds", "1", "1"], "--seeds 1 1"),
        (["--iterations", "9"], "--iterations 9"),
        (["--warmup", "-1", "--strategies", "allreduce", "allreduce:compression=topk"], "-1"),
        (["--png", "/dev/null/a.png"], "'/dev/null/a.png'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    accuracy: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *words])
    monkeypatch.setattr(accuracy, "run", lambda _: pytest.fail("it started"))
    assert accuracy.main() == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_what_was_trained_is_kept_drawn_and_judged(
    accuracy: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    runs = made("digits", "allreduce", 99.0, 98.0) + made(
        "digits", "allreduce:compression=sketch", 97, 99
    )
    runs[-1]["curve"][-1]["bits"] = None
    figures, picture = tmp_path / "new" / "a.json", tmp_path / "new" / "a.png"
    words = ["--tasks", "digits", "--json", str(figures), "--png", str(picture)]
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *words, "--seeds", "0", "1"])
    monkeypatch.setattr(accuracy, "run", lambda _: runs)
    assert accuracy.main() == 0
    report = json.loads(figures.read_text(encoding="utf-8"))
    assert report["runs"] == runs
    assert [row["gap"] for row in report["rows"]] == [0.0, -0.5]
    assert report["rows"][1]["bits"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "97.00 .. 99.00" in capsys.readouterr().out
    runs[-1]["curve"][-1]["accuracy"] = 98.9
    assert accuracy.main() == 1
    assert (
        "MISSED: digits: allreduce:compression=sketch ends 0.55 points" in capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_workers_learn_digits_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    words = ["--tasks", "digits", "--seeds", "0", "--iterations", "300", "--json", str(path)]
    words += ["--strategies", "ddp", "dear:plan=fixed"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "accuracy.py"), *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    dense, dear = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert [point["iteration"] for point in dense["curve"]] == list(range(30, 301, 30))
    assert dense["curve"][-1]["accuracy"] > 93
    assert math.isclose(dense["curve"][-1]["accuracy"], dear["curve"][-1]["accuracy"], abs_tol=1)
    assert dense["same_weights"]
    assert dear["same_weights"]
