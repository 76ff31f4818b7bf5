from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wingbeat.errors import UsageError
from wingbeat.observe import timeline
from wingbeat.observe.events import Event

MS = 1_000_000
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def iteration(worker: int, start: int, lanes: tuple[str, ...] = ("eth0",)) -> list[Event]:
    """20 ms of forward, 40 of backward, 30 of waiting, 10 of update: 100 ms in all."""
    at = start

    def compute(what: str, ms: int) -> Event:
        nonlocal at
        begin, at = at, at + ms * MS
        return Event(worker, -1, what, begin, at, 0, "compute")

    made = [compute("forward", 20), compute("backward", 40), compute("wait", 30)]
    made += [
        Event(worker, b, "all_reduce", start + (30 + 15 * b) * MS, start + (60 + 15 * b) * MS, 8, x)
        for b in range(3)
        for x in lanes
    ]
    made.append(compute("update", 10))
    made.append(Event(worker, -1, "step", start + 60 * MS, at, 0, "compute"))
    return made


def run_of(workers: int, count: int, lanes: tuple[str, ...] = ("eth0",)) -> list[Event]:
    return [
        event
        for worker in range(workers)
        for number in range(count)
        for event in iteration(worker, (5_000 + 100 * number) * MS, lanes)
    ]


class Sketch:
    """What `draw_png` put on its axes, seen instead of a picture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.figure: Any = None
        monkeypatch.setattr(timeline, "_save", self._keep)

    def _keep(self, figure: Any, path: Any) -> None:
        self.figure = figure

    @property
    def axes(self) -> Any:
        return self.figure.axes[0]

    def hatched_ms(self) -> float:
        """Length of all hatched bars together."""
        return sum(
            path.get_extents().width
            for bars in self.axes.collections
            if bars.get_hatch()
            for path in bars.get_paths()
        )

    def rows(self) -> list[str]:
        return [label.get_text() for label in self.axes.get_yticklabels()]

    def texts(self) -> list[str]:
        return [text.get_text() for text in self.axes.texts]


@pytest.fixture
def sketch(monkeypatch: pytest.MonkeyPatch) -> Sketch:
    return Sketch(monkeypatch)


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out" / "timeline.png"
    timeline.draw_png(run_of(2, 3), path, title="two workers")
    assert path.read_bytes().startswith(SIGNATURE)
    assert path.stat().st_size > 10_000


def test_each_worker_has_a_row_and_one_for_each_interface(sketch: Sketch) -> None:
    timeline.draw_png(run_of(2, 1, ("eth0", "eth1")), "unused")
    assert sketch.rows() == ["worker 0", "eth0", "eth1", "worker 1", "eth0", "eth1"]


def test_the_exposed_part_is_hatched_over_its_whole_length(sketch: Sketch) -> None:
    timeline.draw_png(run_of(1, 5), "unused", last=2)
    assert sketch.hatched_ms() == pytest.approx(2 * 30)
    assert sketch.axes.get_xlim() == pytest.approx((0, 200))
    assert "100.0 ms / iteration\n30% exposed" in sketch.texts()


def test_a_worker_that_is_late_is_summed_over_its_own_iterations(sketch: Sketch) -> None:
    events = iteration(0, 5_000 * MS) + iteration(1, 5_040 * MS)
    timeline.draw_png(events, "unused")
    assert sketch.texts().count("100.0 ms / iteration\n30% exposed") == 2


def test_averages_of_models_have_a_row_with_their_groups(sketch: Sketch) -> None:
    begin = 5_000 * MS
    beside = [
        Event(0, -1, "request", begin, begin, 0, "averages"),
        Event(0, -1, "group_wait", begin, begin + 30 * MS, 0, "averages", (2, 0)),
        Event(0, -1, "average", begin + 30 * MS, begin + 70 * MS, 8, "averages", (2, 0)),
        Event(0, -1, "left", begin + 5 * MS, begin + 5 * MS, 0, "averages", (1,)),
        Event(0, -1, "take_over", begin + 90 * MS, begin + 95 * MS, 0, "compute", (2, 0)),
    ]
    timeline.draw_png([*iteration(0, begin), *beside], "unused")
    assert sketch.rows() == ["worker 0", "averages", "eth0"]
    assert sketch.texts().count("2 0") == 2
    named = [text.get_text() for text in sketch.figure.legends[0].get_texts()]
    assert {"take-over", "group-wait", "average"} < set(named)


def test_the_legend_names_what_is_there_and_nothing_else(sketch: Sketch) -> None:
    timeline.draw_png(run_of(1, 1), "unused")
    named = [text.get_text() for text in sketch.figure.legends[0].get_texts()]
    assert named == [
        "forward",
        "backward",
        "update",
        "all-reduce",
        "exposed: waiting for the network",
        "rest of step()",
        "end of iteration",
    ]


def test_a_worker_without_communication_can_be_drawn(sketch: Sketch) -> None:
    timeline.draw_png([Event(0, -1, "forward", 5, 5, 0, "compute")], "unused")
    assert sketch.rows() == ["worker 0"]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no events to draw"):
        timeline.draw_png([], tmp_path / "timeline.png")
    with pytest.raises(UsageError, match="last 0 iterations"):
        timeline.draw_png(run_of(1, 1), tmp_path / "timeline.png", last=0)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        timeline.draw_png(run_of(1, 1), tmp_path / "file" / "timeline.png")


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_the_extra_is_named() -> None:
    with pytest.raises(UsageError, match=r"pip install 'wingbeat\[bench\]'"):
        timeline.draw_png(run_of(1, 1), "unused")


def test_observing_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, wingbeat.observe.timeline, wingbeat.observe.trace;"
        "print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
