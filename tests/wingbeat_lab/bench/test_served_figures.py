"""``benchmarks/served.py``: how it judges, and that it looks first where it is to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark

OURS = {"vanilla": 0.5, "slicing": 0.8, "geryon": 0.96, "ready": 0.99, "coarse": 0.9}


@pytest.fixture(scope="module")
def served() -> Iterator[ModuleType]:
    with benchmark("served") as module:
        yield module


def tuned(**values: Any) -> dict[int, dict[str, Any]]:
    return {2: {"efficiency": 0.97, "of_best": 1.0, **values}, 3: {"efficiency": 0.98}}


@pytest.mark.parametrize(
    ("ours", "found", "named"),
    [
        ({}, {}, []),
        ({"slicing": 0.4}, {}, ["paper's order"]),
        ({"ready": 0.95}, {}, ["Geryon pulled when ready 95.0%, the paper 95.4%"]),
        ({}, {"efficiency": 0.95}, ["Geryon tuned 95.0%"]),
        ({}, {"of_best": 1.03}, ["takes 1.030 of the best one's time"]),
    ],
)
def test_each_mark_that_is_missed_is_said(
    served: ModuleType, ours: dict[str, float], found: dict[str, float], named: list[str]
) -> None:
    lines = served.missed("alexnet", OURS | ours, tuned(**found))
    assert len(lines) == len(named)
    assert all(words in line for words, line in zip(named, lines, strict=True))


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_simulated(
    served: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(served, "Setting", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["served.py", "--json", str(tmp_path / "file" / "x.json")])
    assert served.main() == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_derived_pace_is_an_interval(served: ModuleType) -> None:
    """A device that takes half as long hides less, and AlexNet's throughput is derived."""
    usual, fast = (served.Setting("alexnet", 3, pace) for pace in (1.0, 0.5))
    assert fast.alone_s == pytest.approx(usual.alone_s / 2)
    assert "vgg19" not in served.DERIVED
    assert fast.efficiency(served.ROWS["geryon"]) < usual.efficiency(served.ROWS["geryon"])


def test_the_tables_have_what_is_tuned_and_the_sweep(served: ModuleType) -> None:
    found = tuned(thresholds=(0.9,), trials=14, sweep={0.9: 0.97, 0.5: 0.95})
    found[3] |= {"thresholds": (0.9, 0.2), "trials": 23}
    made = served.rows_table("alexnet", OURS, found, {"geryon": [0.98, 0.71]})
    assert made.rows[0] == ("vanilla", "50.0%", "", "36.4%", "", "", "")
    geryon = next(row for row in made.rows if row[0] == "geryon")
    assert geryon[:4] == ("geryon", "96.0%", "98.0% and 71.0%", "95.4%")
    assert made.rows[-2:] == (
        ("tuned, 2 classes", "97.0%", "", "95.4%", "0.900", "14", "1.000"),
        ("tuned, 3 classes", "98.0%", "", "95.4%", "0.900 + 0.200", "23", ""),
    )
    swept = served.sweep_table("alexnet", found[2]["sweep"])
    assert swept.rows == (("0.90", "97.0%"), ("0.50", "95.0%"))
