"""Figures of plan files: bucket sizes (DeAR, Fig. 3), thresholds, cost curves (OMGS-SGD, Fig. 2).

matplotlib is imported only to draw.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat.planning.bucket_size import (
    BucketSizeResult,
    counted,
    format_mb,
    format_setting,
    posterior,
)
from wingbeat.planning.costs import Fit, Linear, Linearithmic
from wingbeat.planning.probe import Probe
from wingbeat.planning.thresholds import (
    CutAxis,
    Cuts,
    ThresholdResult,
    format_thresholds,
    thresholds_from_cuts,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT, _GRID = "#2b2f36", "#9aa1ab", "#e6e9ed"
_SAMPLE, _START, _CHOSEN = "#34679a", "#e39b3b", "#c8281e"
_MEAN, _BAND, _CURVE = "#34679a", "#cfdff0", "#9db9d6"
_LINKS = ("#58a273", "#a577b8", "#e39b3b", "#6d7580", "#c8281e")
_DPI = 150
_POSTERIOR_POINTS, _FIT_POINTS = 400, 200
_MAX_NUMBERED = 60
_SEARCHES = {"bo": "Bayesian optimization", "random": "random search", "grid": "grid search"}

_DASHED = (0, (4, 3))
_DOT: dict[str, Any] = {"marker": "o", "linestyle": ""}
_RING: dict[str, Any] = {
    **_DOT, "markerfacecolor": "none", "markeredgecolor": _CHOSEN, "markeredgewidth": 2,
}  # fmt: skip


def draw_png(
    record: BucketSizeResult | ThresholdResult | Probe, path: str | os.PathLike[str]
) -> None:
    """Draw the content of a plan file."""
    if isinstance(record, BucketSizeResult):
        figure = _bucket_size_figure(record)
    elif isinstance(record, ThresholdResult):
        figure = _threshold_figure(record)
    else:
        figure = _probe_figure(record)
    _save(figure, path)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _title(figure: Figure, x: float, y: float, text: str) -> None:
    figure.text(x, y, text, fontsize=13, fontweight="bold", color=_INK, va="center")


def _style(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=10, color=_INK)
    axes.set_ylabel(y_label, fontsize=10, color=_INK)
    axes.tick_params(which="both", labelsize=9, color=_FAINT, labelcolor=_INK)
    axes.grid(color=_GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)


# -- bucket sizes --------------------------------------------------------------------------------


def _bucket_size_figure(result: BucketSizeResult) -> Figure:
    figure = blank("plan", (9, 5.4), _DPI)
    axes = figure.add_axes((0.085, 0.115, 0.84, 0.68))
    if not result.samples:  # empty axes would look like a failure
        axes.set_axis_off()
        _title(figure, 0.085, 0.95, "Bucket size: nothing to tune")
        figure.text(
            0.5, 0.5, result.explain_single_plan(),
            fontsize=10.5, color=_INK, ha="center", va="center",
        )  # fmt: skip
        return figure
    # The range shown, in MB, is that of tuning, extended to the start.
    low = min(result.low_bytes, result.start_bytes) / 2**20
    high = max(result.high_bytes / 2**20, result.start_bytes / 2**20, low * 1.01)
    _draw_posterior(axes, result, low, high)
    _draw_samples(axes, result)
    _finish_size_axes(axes, result, low, high)
    _number_samples(axes, result)
    _write_outcome(figure, result)
    return figure


def _draw_posterior(axes: Axes, result: BucketSizeResult, low: float, high: float) -> None:
    sizes = np.geomspace(low, high, _POSTERIOR_POINTS)
    topologies = [result.chosen_topology] * len(sizes)
    mean, std = posterior(result.samples, (sizes * 2**20).tolist(), topologies)
    axes.fill_between(
        sizes, mean - 1.96 * std, mean + 1.96 * std, color=_BAND, linewidth=0, zorder=2
    )
    axes.plot(sizes, mean, color=_MEAN, linewidth=2, zorder=3)


def _draw_samples(axes: Axes, result: BucketSizeResult) -> None:
    """Draw the samples: the start in orange, the chosen one with a ring and a line to its size."""
    chosen = result.samples[result.chosen_index]
    size, throughput = chosen.bucket_bytes / 2**20, chosen.iterations_per_s
    bottom, _ = axes.get_ylim()
    axes.vlines(
        [size], bottom, throughput, color=_CHOSEN, linewidth=1.2, linestyle=_DASHED, zorder=3
    )
    axes.set_ylim(bottom=bottom)
    for number, sample in enumerate(result.samples):
        axes.plot(
            [sample.bucket_bytes / 2**20], [sample.iterations_per_s], **_DOT, markersize=8,
            markeredgecolor="white", markeredgewidth=1.2, color=_SAMPLE if number else _START,
            zorder=6,
        )  # fmt: skip
    axes.plot([size], [throughput], **_RING, markersize=14, zorder=7)


def _finish_size_axes(axes: Axes, result: BucketSizeResult, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    margin = (high / low) ** 0.025
    axes.set_xlim(low / margin, high * margin)
    ticks = _ticks(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([format_mb(tick * 2**20) for tick in ticks])
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.06 * (top - bottom))
    _style(axes, "bucket size in MB", "iterations per second")
    first = result.expected[0]
    functions: Any = (lambda value: value / first, lambda value: value * first)
    right = axes.secondary_yaxis("right", functions=functions)
    right.set_ylabel("relative to the start", fontsize=10, color=_INK)
    right.tick_params(labelsize=9, color=_FAINT, labelcolor=_INK)
    right.spines[:].set_visible(False)


def _ticks(low: float, high: float) -> list[float]:
    """Return powers of two within the range, and its ends unless a power is near.

    >>> _ticks(1, 100)
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100]
    """
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / 12))
    powers = [2.0**exponent for exponent in range(first, last + 1, step)]
    near = math.exp(0.06 * math.log(high / low))
    ends = [end for end in (low, high) if all(max(p / end, end / p) > near for p in powers)]
    return sorted([*powers, *ends])


def _number_samples(axes: Axes, result: BucketSizeResult) -> None:
    """Write the number of each sample above it, or next to it where there is space."""
    scale = _DPI / 72
    if len(result.samples) > _MAX_NUMBERED:
        return
    data = [(sample.bucket_bytes / 2**20, sample.iterations_per_s) for sample in result.samples]
    points = [(float(x) / scale, float(y) / scale) for x, y in axes.transData.transform(data)]
    ring = points[result.chosen_index]
    taken: list[tuple[float, float]] = []
    for number, at in enumerate(points):
        away = 15.0 if math.dist(at, ring) < 4 else 11.5
        places = [
            (at[0] + reach * away * math.sin(turn), at[1] + reach * away * math.cos(turn))
            for reach in (1.0, 1.6, 2.2)
            for turn in (0.0, math.pi, 0.9, -0.9, math.pi - 0.9, math.pi + 0.9, 1.57, -1.57)
        ]
        things = [(point, 7.5) for point in points] + [(place, 10.0) for place in taken]
        place = max(places, key=lambda p: min(0.0, *(math.dist(p, t) - r for t, r in things)))
        taken.append(place)
        axes.annotate(
            str(number + 1), xy=(place[0] * scale, place[1] * scale), xycoords="figure pixels",
            ha="center", va="center", fontsize=9, color=_INK, zorder=8,
            fontweight="bold" if number == result.chosen_index else "normal",
        )  # fmt: skip


def _write_outcome(figure: Figure, result: BucketSizeResult) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    trials = counted(len(result.samples), "trial")
    _title(figure, 0.085, 0.95, f"Bucket size: {_SEARCHES[result.search]}, {trials}")
    why = "as at the start"
    if not result.matters:
        why = result.explain_no_difference()
    elif result.chosen_index > 0:
        why = f"{result.gain:.2f}x the throughput of the start"
    outcome = f"chosen: {format_setting(result.chosen_bytes, result.chosen_topology)}, {why}"
    figure.text(0.085, 0.893, outcome, fontsize=10.5, color=_CHOSEN, va="center")
    handles: list[Any] = [
        Line2D([], [], color=_MEAN, linewidth=2, label="expected throughput"),
        Patch(facecolor=_BAND, label="95% band"),
        Line2D([], [], color=_START, label="start", **_DOT, markersize=8),
        Line2D([], [], color=_SAMPLE, label="trial, numbered in order", **_DOT, markersize=8),
        Line2D([], [], color="none", label="chosen", **_RING, markersize=11),
    ]
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(0.085, 0.84), ncols=len(handles),
        frameon=False, fontsize=9, borderpad=0, borderaxespad=0, handlelength=1.4,
        columnspacing=1.5, handletextpad=0.5, labelcolor=_INK,
    )  # fmt: skip


# -- thresholds ----------------------------------------------------------------------------------


def _threshold_figure(result: ThresholdResult) -> Figure:
    panels = len(result.bases) or 1
    figure = blank("plan", (9 if panels == 1 else 5.4 * panels, 5.0), _DPI)
    plural = "s" if result.classes > 2 else ""
    figure.suptitle(
        f"Threshold{plural} of urgency, tuned in {result.iterations} iterations",
        x=0.06, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    outcome = result.explain()
    if result.samples:
        ms = 1e3 * result.seconds(result.chosen)
        outcome = f"chosen: {result.explain_choice()}, {ms:.4g} ms"
    figure.text(0.06, 0.885, outcome, fontsize=10.5, color=_CHOSEN)
    width = 0.91 / panels
    drawn: Axes | None = None
    for number, base in enumerate(result.bases):
        place = (0.07 + number * width, 0.12, width - 0.05, 0.70)
        drawn = figure.add_axes(place, sharey=drawn)
        _draw_axis(drawn, result, base)
    return figure


def _draw_axis(axes: Axes, result: ThresholdResult, base: Cuts) -> None:
    axis, fitted = CutAxis(base, result.layers), result.curve(base)
    curve = sorted((_threshold(result, place), 1e3 * s) for place, s in fitted.items())
    levels, times = zip(*curve, strict=True)
    axes.plot(levels, times, color=_CURVE, linewidth=2, zorder=2, label="fit: falls, then rises")
    tried = {_threshold(result, place): axis.at(place) for place in fitted}
    axes.plot(
        list(tried), [1e3 * result.seconds(cuts) for cuts in tried.values()], **_DOT,
        color=_SAMPLE, markersize=7, markeredgecolor="white", zorder=4,
        label="median of a trial's iterations",
    )  # fmt: skip
    ring = [level for level, cuts in tried.items() if cuts == result.chosen]
    if ring:
        axes.plot(
            ring, [1e3 * result.seconds(result.chosen)] * len(ring), **_RING, markersize=13,
            zorder=5, label="chosen",
        )  # fmt: skip
    for cut in base:
        axes.axvline(_threshold(result, cut), color=_FAINT, linestyle=_DASHED, zorder=1)
    axes.set_xlim(1.02, -0.02)
    fixed = thresholds_from_cuts(base, result.layers, len(base) + 1)
    beside = f" beside {format_thresholds(fixed)}" if base else ""
    _style(axes, f"threshold{beside}: above it a layer goes first", "iteration in ms")
    axes.legend(loc="upper center", frameon=False, fontsize=9, labelcolor=_INK)


def _threshold(result: ThresholdResult, position: int) -> float:
    """Return the threshold for ``position`` urgent layers."""
    (level,) = thresholds_from_cuts((position,) if position else (), result.layers, 2)
    return level


# -- cost curves ---------------------------------------------------------------------------------


def _probe_figure(probe: Probe) -> Figure:
    rows = max(1, 2 * len(probe.interfaces))
    inches = 4.9 + 0.18 * rows
    figure = blank("probe", (14, inches), _DPI)
    links = " + ".join(probe.links)
    heading = f"{probe.workers} workers over {links}, gradients as {probe.wire}"
    _title(figure, 0.05, 1 - 0.35 / inches, heading)
    encode, exchange = ([("", fit, _SAMPLE, "-")] for fit in (probe.encode, probe.exchange))
    plain = []
    for number, link in enumerate(probe.interfaces):
        colour = _LINKS[number % len(_LINKS)]
        plain.append((f"{link.name}: all-gather,", link.all_gather, colour, "-"))
        plain.append((f"{link.name}: all-reduce,", link.all_reduce, colour, "--"))
    panels = (
        ("Encoding", "elements", encode),
        ("Exchange, decoding included", "bytes of a payload", exchange),
        ("Plain collectives, by interface", "bytes", plain),
    )
    for number, (name, unit, curves) in enumerate(panels):
        left = 0.05 + 0.33 * number
        axes = figure.add_axes((left, 0.6 / inches, 0.265, 3.25 / inches))
        top = (4.05 + 0.18 * rows) / inches
        figure.text(left, top, name, fontsize=11, color=_INK, va="center")
        _draw_fits(axes, unit, curves)
        axes.legend(
            loc="upper left", bbox_to_anchor=(left, top - 0.1 / inches),
            bbox_transform=figure.transFigure, frameon=False, fontsize=8, labelcolor=_INK,
            borderpad=0.2, borderaxespad=0, handlelength=2,
        )  # fmt: skip
    return figure


def _draw_fits(axes: Axes, unit: str, curves: Sequence[tuple[str, Fit, str, str]]) -> None:
    """Draw points and fits on logarithmic scales."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest: list[float] = []
    for name, fit, colour, style in curves:
        xs, ys = (np.array(column) for column in zip(*fit.samples, strict=True))
        positive = (xs > 0) & (ys > 0)
        grid = np.geomspace(max(1.0, xs.min()), max(2.0, xs.max()), _FIT_POINTS)
        fitted = 1e3 * fit.curve(grid)
        axes.plot(
            grid, np.where(fitted > 0, fitted, np.nan), color=colour, linestyle=style,
            linewidth=1.8, zorder=3, label=f"{name} {_coefficients(fit)}".strip(),
        )  # fmt: skip
        axes.plot(
            xs[positive], 1e3 * ys[positive], **_DOT, markersize=5, color=colour,
            markerfacecolor=colour if style == "-" else "white", zorder=4,
        )  # fmt: skip
        lowest.extend(1e3 * ys[positive])
    if lowest:
        axes.set_ylim(bottom=min(lowest) / 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _style(axes, unit, "milliseconds")


def _coefficients(fit: Fit) -> str:
    curve, error = fit.curve, f"error {100 * fit.error:.1f}%"
    if isinstance(curve, Linear):
        alpha, beta = f"{1e3 * curve.alpha:.3g} ms", f"{1e9 * curve.beta:.3g} ns"
        return rf"$\alpha$ = {alpha}, $\beta$ = {beta}, {error}"
    if isinstance(curve, Linearithmic):
        gamma, fixed = f"{curve.gamma:.3g} s", f"{1e3 * curve.fixed:.3g} ms"
        return rf"$\gamma$ = {gamma}, fixed {fixed}, {error}"
    return f"through the medians, {error}"
