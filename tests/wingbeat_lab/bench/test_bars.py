"""The picture of the breakdown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.disk import room_for
from wingbeat.errors import UsageError
from wingbeat_lab.bench import bars
from wingbeat_lab.bench.breakdown import Parts
from wingbeat_lab.bench.measure import Measured, Quantiles
from wingbeat_lab.bench.results import Rates, Report, Run

DEAR = {
    "whole": Parts(0.09, 0.18, 0.21, 0.27, 0.0, 0.015, 0.001),
    "RS-only": Parts(0.09, 0.18, 0.21, 0.0, 0.0, 0.01, 0.0),
    "AG-only": Parts(0.09, 0.18, 0.0, 0.26, 0.0, 0.01, 0.0),
}


def report(*breakdowns: dict[str, Parts] | None) -> Report:
    times = Quantiles(1.0, 1.0, 1.0)
    own: Any = (times, 1.0, 1.0, 0.0, None, None, None, "", None, 0.0, None, True)
    clocks: Any = ([], [], Rates(1.0, []), {}, 0.0, False)
    runs = [Run(f"row{i}", *own, *clocks, breakdown=b) for i, b in enumerate(breakdowns)]
    measured = Measured(4, 1, 1, 0.09, 0.18, 0.35, 0.35, 0.7, 1.5, {}, {})
    return Report(
        "star:4@1gbit", "paced:x", {}, runs, "star:4@1gbit", 4, {}, "", "", {}, None, {}, measured
    )


def test_each_row_has_its_bars_and_a_row_without_a_breakdown_has_none() -> None:
    drawn = bars.groups(report({"whole": Parts(1.0)}, None, DEAR))
    assert [[label for label, _ in own] for own in drawn] == [
        ["row0"],
        ["row2", "RS-only", "AG-only"],
    ]


@pytest.mark.parametrize("measured", [True, False])
def test_bars_are_drawn_to_a_png(tmp_path: Path, measured: bool) -> None:
    made = report({"whole": Parts(0.09, 0.18, 0.0, 0.0, 0.58, 0.01)}, DEAR)
    path = tmp_path / "bars.png"
    bars.draw_png(made if measured else replace(made, measured=None), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_bars_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no row"):
        bars.draw_png(report(None), tmp_path / "bars.png")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*bars\.png"):
        bars.draw_png(report(DEAR), tmp_path / "file" / "bars.png")


def test_picture_cut_short_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "bars.png"
    path.write_bytes(b"good")
    with room_for(1000), pytest.raises(UsageError, match=r"cannot write .*bars\.png.*too large"):
        bars.draw_png(report(DEAR), path)
    assert path.read_bytes() == b"good"
