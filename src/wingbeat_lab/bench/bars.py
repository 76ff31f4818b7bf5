"""The breakdown of each row's iteration as stacked bars, as in DeAR's Fig. 8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.timeline import COLOURS, blank
from wingbeat_lab.bench.breakdown import Parts
from wingbeat_lab.bench.protocol import WHOLE
from wingbeat_lab.bench.results import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bar = tuple[str, Parts]
"""The label of a bar, and the bar."""

_SEGMENTS = (
    ("forward", ("forward_s",)),
    ("backward", ("backward_s",)),
    ("encode", ("encode_s",)),
    ("reduce_scatter", ("reduce_scatter_s",)),
    ("all_gather", ("all_gather_s",)),
    ("all_reduce", ("all_reduce_s",)),
    ("update", ("update_s", "other_s")),
)
_LABELS = {
    "encode": "encoding",
    "reduce_scatter": "exposed reduce-scatter",
    "all_gather": "exposed all-gather",
    "all_reduce": "exposed all-reduce",
    "update": "update and other",
}
_DARK = ("backward", "update", "all_reduce", "all_gather")
_INK, _FAINT, _GRID = "#2b2f36", "#7d848e", "#e4e7eb"
_STEP, _NARROW_STEP = 1.0, 0.74
_HEIGHT, _NARROW_HEIGHT = 0.72, 0.5
_LEGIBLE = 0.045
"""A segment shorter than this share of the longest bar has no number."""


def groups(report: Report) -> list[list[Bar]]:
    """Return each row's bars: the row itself, and the duration of its parts alone."""
    out = []
    for run in report.runs:
        if run.breakdown:
            names = {WHOLE: run.strategy}
            out.append([(names.get(key, key), parts) for key, parts in run.breakdown.items()])
    return out


def draw_png(report: Report, path: Path) -> None:
    """Draw all rows that have a breakdown.

    UsageError if no row has one, matplotlib is missing, or the file cannot be written.
    """
    drawn = groups(report)
    if not drawn:
        raise UsageError("no row of this bench has a breakdown to draw")
    rows = sum(_STEP + _NARROW_STEP * (len(bars) - 1) for bars in drawn) + 0.25 * len(drawn)
    figure = blank("breakdown", (11, 2.3 + 0.52 * rows), 150)
    axes = figure.add_subplot()
    _draw(axes, drawn)
    if report.measured is not None:
        _mark_bound(axes, report.measured.bound_s)
    _title(axes, f"{report.model} on {report.lab}, {report.workers} workers")
    _legend(axes, drawn)
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format="png", bbox_inches="tight")


def _draw(axes: Axes, drawn: Sequence[Sequence[Bar]]) -> None:
    """Draw the bars from top to bottom, and the axes."""
    longest = 1e3 * max(parts.total_s for bars in drawn for _, parts in bars)
    at = 0.0
    ticks: list[tuple[float, str, bool]] = []
    for bars in drawn:
        for number, (label, parts) in enumerate(bars):
            height = _NARROW_HEIGHT if number else _HEIGHT
            at += (_NARROW_STEP if number else _STEP) if ticks else 0.0
            _draw_bar(axes, at, height, parts, longest)
            ticks.append((at, label, number == 0))
        at += 0.25
    axes.set_yticks([at for at, _, _ in ticks], [label for _, label, _ in ticks])
    for text, (_, _, first) in zip(axes.get_yticklabels(), ticks, strict=True):
        text.set_fontweight("bold" if first else "normal")
        text.set_color(_INK if first else _FAINT)
        text.set_fontsize(10.5 if first else 9.5)
    axes.set_ylim(ticks[-1][0] + 0.6, -0.6)
    axes.set_xlim(0, longest * 1.1)
    axes.set_xlabel("milliseconds", color=_INK)
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_bar(axes: Axes, at: float, height: float, parts: Parts, longest: float) -> None:
    left = 0.0
    for what, fields in _SEGMENTS:
        width = 1e3 * sum(getattr(parts, field) for field in fields)
        style: dict[str, Any] = {"color": COLOURS[what], "edgecolor": "white", "linewidth": 0.8}
        axes.barh(at, width, height, left=left, **style)
        if width >= _LEGIBLE * longest:
            colour = "white" if what in _DARK else _INK
            middle = left + width / 2
            text = f"{width:.0f}" if longest >= 100 else f"{width:.1f}"
            axes.text(middle, at, text, ha="center", va="center", fontsize=9, color=colour)
        left += width
    total = f"{left:.0f} ms" if longest >= 100 else f"{left:.1f} ms"
    axes.text(left + 0.008 * longest, at, total, va="center", fontsize=9.5, color=_INK)


def _mark_bound(axes: Axes, bound_s: float) -> None:
    axes.axvline(1e3 * bound_s, color=_INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=4)
    axes.annotate(
        "bound (S_max)",
        (1e3 * bound_s, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=_INK,
    )


def _title(axes: Axes, about: str) -> None:
    above: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "color": _INK,
    }
    axes.annotate(
        "Where an iteration's time goes",
        (0, 1),
        xytext=(0, 62),
        fontweight="bold",
        fontsize=13,
        **above,
    )
    axes.annotate(about, (0, 1), xytext=(0, 45), fontsize=10, **above)


def _legend(axes: Axes, drawn: Sequence[Sequence[Bar]]) -> None:
    from matplotlib.patches import Patch

    everything = [parts for bars in drawn for _, parts in bars]
    handles = [
        Patch(facecolor=COLOURS[what], label=_LABELS.get(what, what))
        for what, fields in _SEGMENTS
        if any(getattr(parts, field) > 0 for parts in everything for field in fields)
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.025, 1.0),
        borderaxespad=1.3,
        ncols=len(handles),
        frameon=False,
        fontsize=9.5,
        handlelength=1.2,
        columnspacing=1.3,
    )
