from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wingbeat.errors import UsageError
from wingbeat.planning import figures
from wingbeat.planning.bucket_size import BucketSizeResult, Sample, choose, untuned
from wingbeat.types import Tuning

MB = 2**20
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def result_of(sizes_mb: list[float], low: float = 1, high: float = 100) -> BucketSizeResult:
    samples = tuple(Sample(int(mb * MB), 1 / (0.05 + 0.02 / mb + 0.002 * mb)) for mb in sizes_mb)
    chosen, expected = choose(samples)
    return BucketSizeResult(
        search="bo",
        low_bytes=int(low * MB),
        high_bytes=int(high * MB),
        steps=10,
        samples=samples,
        expected=expected,
        chosen_bytes=samples[chosen].bucket_bytes,
        decision_s=(0.002,) * len(samples),
    )


TUNED = result_of([25, 1, 2.86, 5.22, 99.7, 1.91, 9.48, 3.47, 2.63, 3.79])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keeps the figure that would have been written."""
    kept: dict[str, Any] = {}
    monkeypatch.setattr(figures, "_save", lambda figure, path: kept.update(figure=figure))
    return kept


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bucket_size_figure_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.png"
    figures.draw_png(TUNED, path)
    assert path.read_bytes().startswith(SIGNATURE)
    assert path.stat().st_size > 20_000


def test_bucket_size_figure_numbers_samples_at_their_positions(drawn: dict[str, Any]) -> None:
    figures.draw_png(TUNED, "unused.png")
    axes = drawn["figure"].axes[0]
    assert texts(axes) == [str(n) for n in range(1, 11)]
    dots = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == "o"]
    expected = [(s.bucket_bytes / MB, s.iterations_per_s) for s in TUNED.samples]
    ring = TUNED.samples[TUNED.chosen_index]
    assert [tuple(dot) for dot in dots] == [
        *expected,
        (ring.bucket_bytes / MB, ring.iterations_per_s),
    ]


def test_bucket_size_figure_numbers_do_not_overlap(drawn: dict[str, Any]) -> None:
    figures.draw_png(TUNED, "unused.png")
    figure = drawn["figure"]
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_bucket_size_figure_mean_is_within_band(drawn: dict[str, Any]) -> None:
    figures.draw_png(TUNED, "unused.png")
    axes = drawn["figure"].axes[0]
    [mean] = [line for line in axes.lines if line.get_marker() == "None"]
    assert mean.get_xdata()[[0, -1]] == pytest.approx([1, 100])
    band = axes.collections[0].get_paths()[0].get_extents()
    assert band.y0 < min(mean.get_ydata())
    assert band.y1 > max(mean.get_ydata())


@pytest.mark.parametrize("start", [0.01, 25])
def test_bucket_size_figure_shows_start_outside_range(drawn: dict[str, Any], start: float) -> None:
    figures.draw_png(result_of([start, 0.05, 0.4, 2, 8], low=0.05, high=8), "unused.png")
    low, high = drawn["figure"].axes[0].get_xlim()
    assert low < min(start, 0.05)
    assert high > max(start, 8)


@pytest.mark.parametrize("search", ["bo", "random", "grid"])
def test_bucket_size_figure_text_has_search_and_choice(drawn: dict[str, Any], search: str) -> None:
    figures.draw_png(replace(TUNED, search=search), "unused.png")
    title, outcome = [text.get_text() for text in drawn["figure"].texts]
    assert title.startswith("Bucket size: ")
    assert title.endswith("search, 10 trials") or search == "bo"
    assert "x the throughput of the start" in outcome


def test_bucket_size_figure_says_that_size_has_no_effect(drawn: dict[str, Any]) -> None:
    near = replace(TUNED, expected=tuple(10 + i / 100 for i in range(10)))
    figures.draw_png(near, "unused.png")
    outcome = drawn["figure"].texts[1].get_text()
    assert (
        outcome
        == "chosen: 2.86 MB, no size matters here: those tried are within 0.9% of each other"
    )
    rule = Tuning(search="bo", low_bytes=MB, high_bytes=100 * MB)
    figures.draw_png(untuned(rule, 25 * MB, 1), "unused.png")
    words = [text.get_text() for text in drawn["figure"].texts]
    assert words[0] == "Bucket size: nothing to tune"
    assert words[1].endswith("bucket sizes from 1 to 100 MB are all one plan, 1 bucket")
    assert not drawn["figure"].axes[0].axison


@pytest.mark.parametrize(
    "result",
    [
        result_of([25]),
        result_of([25, 25, 25], low=25, high=25),
        result_of([1 + i / 2 for i in range(100)]),
        result_of([25, 1e-5, 4000], low=1e-5, high=4000),
    ],
    ids=["one trial", "one size", "a hundred trials", "a wide range"],
)
def test_bucket_size_figure_unusual_results_are_drawn(
    result: BucketSizeResult, tmp_path: Path
) -> None:
    figures.draw_png(result, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(SIGNATURE)


def test_bucket_size_figure_unwritable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot write '{tmp_path}'"):
        figures.draw_png(TUNED, tmp_path)


@pytest.mark.usefixtures("no_matplotlib")
def test_bucket_size_figure_without_matplotlib_says_how_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install 'wingbeat\[bench\]'"):
        figures.draw_png(TUNED, "unused.png")


def test_figures_import_does_not_import_matplotlib() -> None:
    code = "import sys, wingbeat.planning.figures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
