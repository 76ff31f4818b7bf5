"""What tuning of thresholds has found, in a file and as a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.thresholds import CURVES, play, seconds_of
from wingbeat.errors import UsageError
from wingbeat.planning.plans import planfile
from wingbeat.planning.plans.thresholds import picture, saved
from wingbeat.planning.plans.thresholds.result import Result, nothing

KEY = {"parameters": "abc", "workers": 4}


def result_of(classes: int = 2) -> Result:
    start = tuple(1 - (i + 1) / classes for i in range(classes - 1))
    times = lambda cuts, _: [seconds_of(CURVES["vee"], cuts, 24) - 0.01 * len(cuts)]  # noqa: E731
    return play(times, 24, start)[0]


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_a_file_holds_all_that_was_found(classes: int, tmp_path: Path) -> None:
    path, result = tmp_path / "urgent.json", result_of(classes)
    saved.save(path, result, KEY)
    assert saved.load(path) == saved.Saved(result, KEY)
    assert planfile.kind_of(path) is planfile.THRESHOLDS
    assert json.loads(path.read_text())["thresholds"] == list(result.thresholds)


def test_one_bucket_is_kept_too(tmp_path: Path) -> None:
    saved.save(tmp_path / "one.json", nothing(1, 2), KEY)
    known = saved.load(tmp_path / "one.json").result
    assert known == nothing(1, 2)
    assert known.explain() == "nothing to tune: 1 layer, and classes need two"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 9}, "version 9"),
        ({"format": "wingbeat bucket plan"}, "is no plan file"),
        ({"layers": 0}, "layers holds 0"),
        ({"classes": 1}, "classes holds 1"),
        ({"cuts": [24]}, "cuts holds"),
        ({"cuts": [3, 5]}, "cuts holds"),
        ({"cuts": ["3"]}, "cuts holds"),
        ({"cuts": [5]}, "among the samples"),
        ({"looked_beside": []}, "looked_beside"),
        ({"looked_beside": [[3]]}, "looked_beside holds"),
        ({"samples": []}, "looked_beside"),
        ({"samples": [{"cuts": [], "seconds": 0, "iterations": 5}]}, "samples.seconds holds 0"),
        ({"samples": [{"cuts": [], "seconds": 1, "iterations": 0}]}, "samples.iterations holds 0"),
        ({"samples": [{"cuts": [], "seconds": 1, "iterations": 5}] * 2}, "each division once"),
        ({"samples": 3}, "samples"),
        ({"iterations": -1}, "iterations holds -1"),
        ({"key": 3}, "key"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "urgent.json"
    saved.save(path, result_of(), KEY)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=named) as info:
        saved.load(path)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_a_picture_has_each_trial_the_curve_and_the_chosen_one(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}
    blank = picture.blank
    monkeypatch.setattr(picture, "blank", lambda *a: kept.setdefault("figure", blank(*a)))
    path, result = tmp_path / "new" / "urgent.png", result_of(classes)
    picture.draw_png(result, path)
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
    assert "chosen: " + result.named() in kept["figure"].texts[-1].get_text()


def test_a_picture_of_nothing_says_why(tmp_path: Path) -> None:
    picture.draw_png(nothing(1, 2), tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        picture.draw_png(nothing(1, 2), tmp_path / "file" / "none.png")


def test_the_verb_shows_and_draws_it(tmp_path: Path) -> None:
    path, png = tmp_path / "urgent.json", tmp_path / "urgent.png"
    result = result_of(3)
    saved.save(path, result, KEY)
    command = [sys.executable, "-m", "wingbeat.cli.main", "plan", str(path), "--png", str(png)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert result.explain() in " ".join(said.split())
    assert "tuned for parameters abc, workers 4" in said
    assert "one class" in said
    assert png.exists()
