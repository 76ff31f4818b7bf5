"""``wingbeat show`` as a user runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers.verbs import wingbeat
from wingbeat.planning import files
from wingbeat.planning.bucket_size import BucketSizeResult, Sample, untuned
from wingbeat.planning.choice import StrategyResult, TimedStrategy
from wingbeat.types import Tuning

MB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"
TUNED = BucketSizeResult(
    search="bo",
    low_bytes=MB,
    high_bytes=100 * MB,
    steps=10,
    samples=(Sample(25 * MB, 10.0), Sample(6 * MB, 12.25), Sample(MB, 9.0)),
    expected=(10.0, 12.0, 9.1),
    chosen_bytes=6 * MB,
    decision_s=(0.0011, 0.0024, 0.0009),
)


def show(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return wingbeat("show", *args)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    files.save(tmp_path / "plan.json", TUNED, {"parameters": "ab12", "workers": 4})
    return tmp_path / "plan.json"


def test_show_verb_tuned_file_shows_trials_choice_and_reason(file: Path) -> None:
    done = show(file)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["1", "25", "10", "1.000", "10", "start"] in rows
    assert ["2", "6", "12.25", "1.225", "12", "chosen"] in rows
    assert ["3", "1", "9", "0.900", "9.1"] in rows
    assert TUNED.explain() in done.stdout.splitlines()
    assert "tuned for parameters ab12, workers 4" in done.stdout


def test_show_verb_choice_of_strategy_shows_times_and_has_no_picture(tmp_path: Path) -> None:
    tried = TimedStrategy("AllReduce(mb=25)", 0.025), TimedStrategy("DeAR(mb=5)", 0.02)
    choice = StrategyResult(tried=tried, chosen="DeAR(mb=5)", iterations=41)
    files.save(tmp_path / "auto.json", choice, {"workers": 4})
    done = show(tmp_path / "auto.json")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    first = rows.index(["DeAR(mb=5)", "20", "chosen"])
    assert rows[first + 1] == ["AllReduce(mb=25)", "25"]
    assert choice.explain() in done.stdout
    done = show(tmp_path / "auto.json", "--png", tmp_path / "auto.png")
    assert done.returncode == 2
    assert "has no picture" in done.stderr
    assert not (tmp_path / "auto.png").exists()


def test_show_verb_single_plan_says_nothing_to_tune(tmp_path: Path) -> None:
    rule = Tuning(search="bo", low_bytes=MB, high_bytes=100 * MB)
    files.save(tmp_path / "none.json", untuned(rule, 25 * MB, 1), {"workers": 4})
    done = show(tmp_path / "none.json", "--png", tmp_path / "none.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nothing to tune: for this model bucket sizes from 1 to 100 MB")
    assert (tmp_path / "none.png").read_bytes().startswith(PNG)


def test_show_verb_with_png_writes_figure(file: Path, tmp_path: Path) -> None:
    done = show(file, "--png", tmp_path / "out" / "plan.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "plan.png").read_bytes().startswith(PNG)
    assert f"picture: {tmp_path}/out/plan.png" in done.stdout


def test_show_verb_help_has_examples() -> None:
    done = show("--help")
    assert "wingbeat show plan.json --png out/plan.png" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "file"),
        (["none.json"], "none.json"),
        (["/"], "'/'"),
        (["damaged.json"], "is damaged"),
        (["FILE", "--png", "/proc/none/plan.png"], "/proc/none/plan.png"),
        (["FILE", "--pgn", "plan.png"], "--pgn"),
    ],
)
def test_show_verb_bad_input_is_one_line_and_exit_2(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.json").write_text('{"format":', encoding="utf-8")
    done = show(*[file if arg == "FILE" else arg for arg in args])
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert words in line
