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
from wingbeat.planning import figures
from wingbeat.planning.costs import Linear, Linearithmic, PiecewiseLinear, best_fit

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keeps the figure that would have been written."""
    kept: dict[str, Any] = {}
    monkeypatch.setattr(figures, "_save", lambda figure, path: kept.update(figure=figure))
    return kept


def points_of(axes: Any) -> list[np.ndarray]:
    return [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]


def lines_of(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_marker() != "o"]


def test_probe_figure_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.png"
    figures.draw_png(probe(), path)
    assert path.read_bytes().startswith(SIGNATURE)
    assert path.stat().st_size > 20_000


def test_probe_figure_shows_samples_and_fits(drawn: dict[str, Any]) -> None:
    found = probe()
    figures.draw_png(found, "unused.png")
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
    "curve",
    [
        Linear(0.0, 0.0),
        Linearithmic(2.2e-10, 0.001, 1e-5),
        PiecewiseLinear((1e3, 1e6), (1e-5, 1e-3)),
    ],
)
def test_probe_figure_draws_every_curve(curve, tmp_path: Path) -> None:
    fit = dataclasses.replace(probe().encode, curve=curve, intervals={})
    figures.draw_png(dataclasses.replace(probe(1), encode=fit), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(SIGNATURE)


def test_probe_figure_omits_zero_times(drawn: dict[str, Any]) -> None:
    fit = best_fit([(float(n), 0.0) for n in SIZES])
    figures.draw_png(dataclasses.replace(probe(1), encode=fit), "unused.png")
    [points] = points_of(drawn["figure"].axes[0])
    assert len(points) == 0
    drawn["figure"].canvas.draw()


def test_probe_figure_unwritable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot write '{tmp_path}'"):
        figures.draw_png(probe(), tmp_path)


@pytest.mark.usefixtures("no_matplotlib")
def test_probe_figure_without_matplotlib_says_how_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install 'wingbeat\[bench\]'"):
        figures.draw_png(probe(), "unused.png")


def test_probe_figure_import_does_not_import_matplotlib() -> None:
    code = "import sys, wingbeat.planning.figures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
