"""What tuning of thresholds has found, in a file and as a figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.thresholds import CURVES, play, seconds_of
from wingbeat.errors import UsageError
from wingbeat.planning import figures, files
from wingbeat.planning.thresholds import ThresholdResult, untuned

KEY = {"parameters": "abc", "workers": 4}


def load(path: Path) -> files.Saved[ThresholdResult]:
    return files.load(path, ThresholdResult)


def result_of(classes: int = 2) -> ThresholdResult:
    start = tuple(1 - (i + 1) / classes for i in range(classes - 1))
    times = lambda cuts, _: [seconds_of(CURVES["vee"], cuts, 24) - 0.01 * len(cuts)]  # noqa: E731
    return play(times, 24, start)[0]


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_threshold_file_round_trip_is_equal(classes: int, tmp_path: Path) -> None:
    path, result = tmp_path / "urgent.json", result_of(classes)
    files.save(path, result, KEY)
    assert load(path) == files.Saved(result, KEY)
    assert files.kind_of(path) == ThresholdResult.kind
    assert json.loads(path.read_text())["summary"] == result.explain()


def test_threshold_file_keeps_untuned_result(tmp_path: Path) -> None:
    files.save(tmp_path / "one.json", untuned(1, 2), KEY)
    known = load(tmp_path / "one.json").record
    assert known == untuned(1, 2)
    assert known.explain() == "nothing to tune: 1 layer, and classes need two"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 9}, "version 9"),
        ({"format": "wingbeat bucket plan"}, "is not a plan file"),
        ({"layers": 0}, "layers is 0"),
        ({"classes": 1}, "classes is 1"),
        ({"chosen": [24]}, "chosen is"),
        ({"chosen": [3, 5]}, "chosen is"),
        ({"chosen": ["3"]}, r"chosen\[0\] is"),
        ({"chosen": [5]}, "among the samples"),
        ({"bases": []}, "bases"),
        ({"bases": [[3]]}, "bases is"),
        ({"samples": []}, "bases"),
        ({"samples": [{"cuts": [], "seconds": 0, "iterations": 5}]}, "seconds is 0"),
        ({"samples": [{"cuts": [], "seconds": 1, "iterations": 0}]}, "iterations is 0"),
        ({"samples": [{"cuts": [], "seconds": 1, "iterations": 5}] * 2}, "each division once"),
        ({"samples": 3}, "samples"),
        ({"iterations": -1}, "iterations is -1"),
        ({"key": 3}, "key"),
    ],
)
def test_threshold_file_damaged_is_one_line(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "urgent.json"
    files.save(path, result_of(), KEY)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=named) as info:
        load(path)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_threshold_figure_has_trials_curve_and_choice(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}
    blank = figures.blank
    monkeypatch.setattr(figures, "blank", lambda *a: kept.setdefault("figure", blank(*a)))
    path, result = tmp_path / "new" / "urgent.png", result_of(classes)
    figures.draw_png(result, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    panels = kept["figure"].axes
    assert len(panels) == classes - 1
    curve, dots, *_ = panels[0].lines
    assert len(curve.get_xdata()) == len(dots.get_xdata())
    assert sorted(dots.get_ydata()) == sorted(
        1e3 * s.seconds for s in result.samples if len(s.cuts) < 2
    )
    rings = [line for panel in panels for line in panel.lines if line.get_label() == "chosen"]
    assert all(set(r.get_ydata()) == {1e3 * result.seconds(result.chosen)} for r in rings)
    assert rings
    assert "chosen: " + result.explain_choice() in kept["figure"].texts[-1].get_text()


def test_threshold_figure_of_untuned_result_says_why(tmp_path: Path) -> None:
    figures.draw_png(untuned(1, 2), tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_threshold_figure_unwritable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        figures.draw_png(untuned(1, 2), tmp_path / "file" / "none.png")


def test_show_verb_shows_and_draws_thresholds(tmp_path: Path) -> None:
    path, png = tmp_path / "urgent.json", tmp_path / "urgent.png"
    result = result_of(3)
    files.save(path, result, KEY)
    command = [sys.executable, "-m", "wingbeat.cli.main", "show", str(path), "--png", str(png)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert result.explain() in " ".join(said.split())
    assert "tuned for parameters abc, workers 4" in said
    assert "one class" in said
    assert png.exists()
