"""Pictures of what was measured, and of a plan's schedule."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from probe_made import SIZES, SPECS, WIRE, probe

from wingbeat.costs import Costs, Line, Pieces, Sorting, Workload
from wingbeat.costs.fit import best_fit
from wingbeat.errors import UsageError
from wingbeat.plans import merge
from wingbeat.probe import picture
from wingbeat.probe.model import payload_bytes

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
    picture.draw_timeline_png(schedule(), tmp_path / "other" / "plan.png")
    assert (tmp_path / "other" / "plan.png").read_bytes().startswith(SIGNATURE)


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


def schedule() -> merge.Timeline:
    found = probe()
    workload = found.workload(SPECS, payload_bytes(SPECS, WIRE))
    return merge.predict(merge.none(workload), workload, found.costs())


def test_a_schedule_has_backward_encoding_and_exchange_in_their_places(
    drawn: dict[str, Any],
) -> None:
    timeline = schedule()
    picture.draw_timeline_png(timeline, "unused.png")
    axes = drawn["figure"].axes[0]
    bars: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: []}
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            bars[int(box.y0)].append((box.x0 / 1e3, box.x1 / 1e3))
    rows = timeline.rows
    ends = [0.0, *(row.encode_end_s for row in rows[:-1])]
    begins = [row.encode_begin_s for row in rows]
    assert np.array(bars[0]) == pytest.approx(np.array([ends, begins]).T)
    assert np.array(bars[1]) == pytest.approx(
        np.array([(row.encode_begin_s, row.encode_end_s) for row in rows])
    )
    assert np.array(bars[2]) == pytest.approx(
        np.array([(row.exchange_begin_s, row.exchange_end_s) for row in rows])
    )
    assert axes.get_xlim()[1] == pytest.approx(1e3 * timeline.finish_s)
    legend = [text.get_text() for text in drawn["figure"].legends[0].get_texts()]
    assert [text.split()[0] for text in legend] == ["backward", "encode", "exchange", "exposed"]
    assert legend[0] == "backward 60 ms"
    assert legend[3] == f"exposed {1e3 * timeline.exposed_s:.4g} ms"


def test_many_buckets_are_drawn(tmp_path: Path) -> None:
    count = 449
    workload = Workload(
        tensors=tuple(range(count)),
        ready_s=tuple(1e-3 * i for i in range(count)),
        numels=(1000,) * count,
        nbytes=(10.0,) * count,
        kinds=("float32 on cpu",) * count,
    )
    costs = Costs(encode=Line(1e-4, 1e-9), exchange=Line(1e-3, 1e-8))
    timeline = merge.predict(merge.none(workload), workload, costs)
    picture.draw_timeline_png(timeline, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(SIGNATURE)


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(UsageError, match="no buckets to draw"):
        picture.draw_timeline_png(merge.Timeline((), 0.0, 0.0, 0.0, 0.0), "unused.png")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot write '{tmp_path}'"):
        picture.draw_png(probe(), tmp_path)
    with pytest.raises(UsageError, match=f"cannot write '{tmp_path}'"):
        picture.draw_timeline_png(schedule(), tmp_path)


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_it_says_how_to_install_it() -> None:
    with pytest.raises(UsageError, match=r"pip install 'wingbeat\[bench\]'"):
        picture.draw_png(probe(), "unused.png")


def test_importing_it_does_not_import_matplotlib() -> None:
    code = "import sys, wingbeat.probe.picture; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
