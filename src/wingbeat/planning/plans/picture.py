"""What tuning has seen, as a picture (DeAR, Fig. 3): samples, what they make likely, the choice."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from wingbeat.files import replacing
from wingbeat.observe.figure import blank
from wingbeat.planning.plans.result import Result, as_mb, counted, setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT, _GRID = "#2b2f36", "#9aa1ab", "#e6e9ed"
_MEAN, _BAND = "#34679a", "#cfdff0"
_SAMPLE, _START, _CHOSEN = "#34679a", "#e39b3b", "#c8281e"
_POINTS = 400
_DPI = 150
_MAX_NUMBERED = 60
_SEARCHES = {"bo": "Bayesian optimisation", "random": "random search", "grid": "grid search"}


def draw_png(result: Result, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the samples in order, the posterior mean with its 95% band, start and chosen size.

    Args:
        result: what tuning has found.
        path: the PNG to write; its folder is made if it is missing.
        title: stands above; default: which search it was, over how many trials.

    Raises:
        UsageError: matplotlib (the extra ``bench``) is missing, or the file cannot be written.
    """
    figure, axes = _canvas()
    if not result.samples:
        _write_nothing(figure, axes, result, title)
        _save(figure, path)
        return
    _draw_posterior(axes, result)
    _draw_samples(axes, result)
    _finish_axes(axes, result)
    _number_samples(axes, result)
    _write_words(figure, result, title)
    _save(figure, path)


def _canvas() -> tuple[Figure, Axes]:
    figure = blank("plan", (9, 5.4), _DPI)
    return figure, figure.add_axes((0.085, 0.115, 0.84, 0.68))


def _limits(result: Result) -> tuple[float, float]:
    """Return the range shown in MB: that of tuning, and the start where that lies outside."""
    low = min(result.low_bytes, result.start_bytes) / 2**20
    high = max(result.high_bytes, result.start_bytes) / 2**20
    return low, max(high, low * 1.01)


def _draw_posterior(axes: Axes, result: Result) -> None:
    from wingbeat.planning.plans import bayes

    low, high = _limits(result)
    sizes = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    # Of the chosen topology, where several were tried.
    along = [result.chosen_topology] * len(sizes)
    mean, std = bayes.posterior(result.samples, [mb * 2**20 for mb in sizes], along)
    axes.fill_between(
        sizes, mean - 1.96 * std, mean + 1.96 * std, color=_BAND, linewidth=0, zorder=2
    )
    axes.plot(sizes, mean, color=_MEAN, linewidth=2, zorder=3)


def _draw_samples(axes: Axes, result: Result) -> None:
    """Filled circles; the start is orange, the chosen one has a ring and a line to its size."""
    chosen = result.samples[result.chosen_index]
    bottom, _ = axes.get_ylim()
    axes.vlines(
        [chosen.nbytes / 2**20], bottom, chosen.throughput,
        color=_CHOSEN, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3,
    )  # fmt: skip
    axes.set_ylim(bottom=bottom)
    for number, sample in enumerate(result.samples):
        axes.plot(
            [sample.nbytes / 2**20], [sample.throughput],
            marker="o", markersize=8, markeredgecolor="white", markeredgewidth=1.2,
            color=_SAMPLE if number else _START, linestyle="", zorder=6,
        )  # fmt: skip
    axes.plot(
        [chosen.nbytes / 2**20], [chosen.throughput],
        marker="o", markersize=14, markerfacecolor="none", markeredgecolor=_CHOSEN,
        markeredgewidth=2, linestyle="", zorder=7,
    )  # fmt: skip


def _finish_axes(axes: Axes, result: Result) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    low, high = _limits(result)
    axes.set_xscale("log", base=2)
    margin = (high / low) ** 0.025
    axes.set_xlim(low / margin, high * margin)
    ticks = _ticks(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([as_mb(tick * 2**20) for tick in ticks])
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.06 * (top - bottom))
    axes.set_xlabel("bucket size in MB", fontsize=10, color=_INK)
    axes.set_ylabel("iterations per second", fontsize=10, color=_INK)
    axes.tick_params(labelsize=9, color=_FAINT, labelcolor=_INK)
    axes.grid(color=_GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    first = result.expected[0]

    def relative(value: Any) -> Any:
        return value / first

    def absolute(value: Any) -> Any:
        return value * first

    right = axes.secondary_yaxis("right", functions=(relative, absolute))
    right.set_ylabel("relative to the start", fontsize=10, color=_INK)
    right.tick_params(labelsize=9, color=_FAINT, labelcolor=_INK)
    for spine in (axes.spines["top"], axes.spines["right"], *right.spines.values()):
        spine.set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)


def _ticks(low: float, high: float) -> list[float]:
    """Return powers of two within the range, and the ends if no power is near.

    >>> _ticks(1, 100)
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100]
    """
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / 12))
    powers = [2.0**exponent for exponent in range(first, last + 1, step)]
    near = math.exp(0.06 * math.log(high / low))
    ends = [end for end in (low, high) if all(max(p / end, end / p) > near for p in powers)]
    return sorted([*powers, *ends])


def _number_samples(axes: Axes, result: Result) -> None:
    """Write each sample's number above it, or wherever around it nothing is in the way yet."""
    scale = _DPI / 72
    if len(result.samples) > _MAX_NUMBERED:
        return
    data = [(sample.nbytes / 2**20, sample.throughput) for sample in result.samples]
    points = [(float(x) / scale, float(y) / scale) for x, y in axes.transData.transform(data)]
    ring = points[result.chosen_index]
    taken: list[tuple[float, float]] = []
    for number, at in enumerate(points):
        away = 15.0 if _distance(at, ring) < 4 else 11.5
        places = [
            (at[0] + reach * away * math.sin(turn), at[1] + reach * away * math.cos(turn))
            for reach in (1.0, 1.6, 2.2)
            for turn in (0.0, math.pi, 0.9, -0.9, math.pi - 0.9, math.pi + 0.9, 1.57, -1.57)
        ]
        things = [(point, 7.5) for point in points] + [(place, 10.0) for place in taken]
        place = max(places, key=lambda p: min(0.0, *(_distance(p, t) - r for t, r in things)))
        taken.append(place)
        axes.annotate(
            str(number + 1), xy=(place[0] * scale, place[1] * scale), xycoords="figure pixels",
            ha="center", va="center", fontsize=9, color=_INK, zorder=8,
            fontweight="bold" if number == result.chosen_index else "normal",
        )  # fmt: skip


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return math.hypot(a[0] - b[0], a[1] - b[1])


def _write_words(figure: Figure, result: Result, title: str) -> None:
    """Title, what came of it, and the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    trials = counted(len(result.samples), "trial")
    heading = title or f"Bucket size: {_SEARCHES[result.search]}, {trials}"
    figure.text(0.085, 0.95, heading, fontsize=13, fontweight="bold", color=_INK, va="center")
    moved = result.chosen_index > 0
    why = f"{result.gain:.2f}x the throughput of the start" if moved else "as at the start"
    why = why if result.matters else result.no_matter()
    outcome = f"chosen: {setting(result.chosen_bytes, result.chosen_topology)}, {why}"
    figure.text(0.085, 0.893, outcome, fontsize=10.5, color=_CHOSEN, va="center")
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 8}
    ring: dict[str, Any] = {**dot, "markersize": 11, "markeredgewidth": 2}
    handles: list[Any] = [
        Line2D([], [], color=_MEAN, linewidth=2, label="expected throughput"),
        Patch(facecolor=_BAND, label="95% band"),
        Line2D([], [], color=_START, label="start", **dot),
        Line2D([], [], color=_SAMPLE, label="trial, numbered in order", **dot),
        Line2D(
            [], [], color="none", markeredgecolor=_CHOSEN, markerfacecolor="none",
            label="chosen", **ring,
        ),
    ]  # fmt: skip
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(0.085, 0.84), ncols=len(handles),
        frameon=False, fontsize=9, borderpad=0, borderaxespad=0, handlelength=1.4,
        columnspacing=1.5, handletextpad=0.5, labelcolor=_INK,
    )  # fmt: skip


def _write_nothing(figure: Figure, axes: Axes, result: Result, title: str) -> None:
    """Say why there is nothing to draw; an empty pair of axes would look like a failure."""
    axes.set_axis_off()
    heading = title or "Bucket size: nothing to tune"
    figure.text(0.085, 0.95, heading, fontsize=13, fontweight="bold", color=_INK, va="center")
    figure.text(0.5, 0.5, result.one_plan(), fontsize=10.5, color=_INK, ha="center", va="center")


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="png")
