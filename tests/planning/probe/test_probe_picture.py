"""Pictures of what was measured."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from probe_made import SIZES, probe

from wingbeat.errors import UsageError
from wingbeat.planning.costs import Line, Pieces, Sorting
from wingbeat.planning.costs.fit import best_fit
from wingbeat.planning.probe import picture

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keeps the figure that would have been written."""
    kept: dict[str, Any] = {}
    monkeypatch.setattr(picture, "_save", lambda figure, path: kept.update(figure=figure))
    return kept


def points_of(axes: Any) -> list[np.ndarray]:
    return [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]


def lines_of(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_marker() != "o"]


def test_pngs_are_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.png"
    picture.draw_png(probe(), path)
    assert path.read_bytes().startswith(SIGNATURE)
    assert path.stat().st_size > 20_000


def test_samples_stand_where_they_were_measured_and_fits_go_through(drawn: dict[str, Any]) -> None:
    found = probe()
    picture.draw_png(found, "unused.png")
    encode, exchange, plain = drawn["figure"].axes
    for axes, fit in ((encode, found.encode), (exchange, found.exchange)):
        [points] = points_of(axes)
        assert points == pytest.approx(np.array(fit.samples) * [1, 1e3])
        [line] = lines_of(axes)
        xs, ys = line.get_xydata().T
        assert ys == pytest.approx(1e3 * fit.curve(xs))
        assert xs[0] == pytest.approx(points[0, 0])
        assert xs[-1] == pytest.approx(points[-1, 0])
    assert len(points_of(plain)) == 6  # two collectives on two interfaces and on both together
    words = [text.get_text() for text in plain.get_legend().get_texts()]
    assert [text.partition(" $")[0] for text in words[:2]] == [
        "eth0: all-gather,",
        "eth0: all-reduce,",
    ]
    assert r"$\alpha$ = 1" in words[0] or r"$\alpha$ = 0.9" in words[0]
    assert drawn["figure"].texts[0].get_text().startswith("16 workers over eth0 + eth1")


@pytest.mark.parametrize(
    "curve", [Line(0.0, 0.0), Sorting(2.2e-10, 0.001, 1e-5), Pieces((1e3, 1e6), (1e-5, 1e-3))]
)
def test_every_curve_is_drawn(curve, tmp_path: Path) -> None:
    fit = dataclasses.replace(probe().encode, curve=curve)
    picture.draw_png(dataclasses.replace(probe(1), encode=fit), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(SIGNATURE)


def test_what_took_no_time_is_left_out(drawn: dict[str, Any]) -> None:
    fit = best_fit([(float(n), 0.0) for n in SIZES])
    picture.draw_png(dataclasses.replace(probe(1), encode=fit), "unused.png")
    [points] = points_of(drawn["figure"].axes[0])
    assert len(points) == 0
    drawn["figure"].canvas.draw()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot write '{tmp_path}'"):
        picture.draw_png(probe(), tmp_path)


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_it_says_how_to_install_it() -> None:
    with pytest.raises(UsageError, match=r"pip install 'wingbeat\[bench\]'"):
        picture.draw_png(probe(), "unused.png")


def test_importing_it_does_not_import_matplotlib() -> None:
    code = "import sys, wingbeat.planning.probe.picture; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
