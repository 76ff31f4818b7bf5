"""Thresholds that were tried, as a picture: times, the curve through them, the chosen one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from wingbeat.files import replacing
from wingbeat.observe.figure import blank
from wingbeat.planning.plans.thresholds.cuts import Cuts, levels_of
from wingbeat.planning.plans.thresholds.line import Line
from wingbeat.planning.plans.thresholds.result import Result, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT, _GRID = "#2b2f36", "#9aa1ab", "#e6e9ed"
_CURVE, _SAMPLE, _CHOSEN = "#9db9d6", "#34679a", "#c8281e"
_DPI = 150


def draw_png(result: Result, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw iteration times by threshold, a panel for each threshold that was looked for.

    Args:
        result: what tuning has found.
        path: the PNG to write; its folder is made if it is missing.
        title: stands above; default: how many thresholds, in how many iterations.

    Raises:
        UsageError: matplotlib (the extra ``bench``) is missing, or the file cannot be written.
    """
    panels = len(result.bases) or 1
    figure = blank("plan", (9 if panels == 1 else 5.4 * panels, 5.0), _DPI)
    many = "s" if result.classes > 2 else ""
    figure.suptitle(
        title or f"Threshold{many} of urgency, tuned in {result.iterations} iterations",
        x=0.06, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.text(0.06, 0.885, _outcome(result), fontsize=10.5, color=_CHOSEN)
    room = 0.91 / panels
    drawn: Axes | None = None
    for number, base in enumerate(result.bases):
        place = (0.07 + number * room, 0.12, room - 0.05, 0.70)
        drawn = figure.add_axes(place, sharey=drawn)
        _draw_line(drawn, result, base)
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _outcome(result: Result) -> str:
    if not result.samples:
        return result.explain()
    return f"chosen: {result.named()}, {1e3 * result.seconds(result.chosen):.4g} ms"


def _draw_line(axes: Axes, result: Result, base: Cuts) -> None:
    line = Line(base, result.layers)
    curve = sorted((_level(result, place), 1e3 * s) for place, s in result.curve(base).items())
    levels, fitted = zip(*curve, strict=True)
    axes.plot(levels, fitted, color=_CURVE, linewidth=2, zorder=2, label="fit: falls, then rises")
    tried = {_level(result, place): line.at(place) for place in result.curve(base)}
    axes.plot(
        list(tried), [1e3 * result.seconds(cuts) for cuts in tried.values()],
        marker="o", linestyle="", color=_SAMPLE, markersize=7, markeredgecolor="white",
        zorder=4, label="median of a trial's iterations",
    )  # fmt: skip
    ring = [level for level, cuts in tried.items() if cuts == result.chosen]
    if ring:
        axes.plot(
            ring, [1e3 * result.seconds(result.chosen)] * len(ring),
            marker="o", linestyle="", markersize=13, markerfacecolor="none",
            markeredgecolor=_CHOSEN, markeredgewidth=2, zorder=5, label="chosen",
        )  # fmt: skip
    for cut in base:
        axes.axvline(_level(result, cut), color=_FAINT, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlim(1.02, -0.02)
    stays = f" beside {written(levels_of(base, result.layers, len(base) + 1))}" if base else ""
    axes.set_xlabel(f"threshold{stays}: above it a layer goes first", fontsize=10, color=_INK)
    axes.set_ylabel("iteration in ms", fontsize=10, color=_INK)
    axes.tick_params(labelsize=9, color=_FAINT, labelcolor=_INK)
    axes.grid(color=_GRID, linewidth=0.7, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper center", frameon=False, fontsize=9, labelcolor=_INK)


def _level(result: Result, place: int) -> float:
    """Return the threshold that puts so many layers on the urgent side."""
    (level,) = levels_of((place,) if place else (), result.layers, 2)
    return level
