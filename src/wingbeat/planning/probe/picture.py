"""What was measured, as the paper's Fig. 2 shows it (OMGS-SGD)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from wingbeat.files import replacing
from wingbeat.observe.figure import blank
from wingbeat.planning.costs import Line, Sorting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wingbeat.planning.costs.fit import Fit
    from wingbeat.planning.probe.model import Probe

_INK, _FAINT, _GRID = "#2b2f36", "#9aa1ab", "#e6e9ed"
_MEASURED = "#34679a"
_LINKS = ("#58a273", "#a577b8", "#e39b3b", "#6d7580", "#c8281e")
_POINTS = 200
_DPI = 150


def draw_png(probe: Probe, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw encoding, exchange and plain collectives over their sizes: points, and their fits.

    Args:
        probe: what was measured.
        path: the PNG to write; its folder is made if it is missing.
        title: stands above; default: workers, links and wire.

    Raises:
        UsageError: matplotlib (the extra ``bench``) is missing, or the file cannot be written.
    """
    rows = max(1, 2 * len(probe.interfaces))
    inches = 4.9 + 0.18 * rows
    figure = blank("probe", (14, inches), _DPI)
    heading = title or (
        f"{probe.workers} workers over {' + '.join(probe.links)}, gradients as {probe.wire}"
    )
    figure.text(
        0.05, 1 - 0.35 / inches, heading, fontsize=13, fontweight="bold", color=_INK, va="center"
    )
    encode, exchange = ([("", fit, _MEASURED, "-")] for fit in (probe.encode, probe.exchange))
    panels = (
        ("Encoding", "elements", encode),
        ("Exchange, decoding included", "bytes of a payload", exchange),
        ("Plain collectives, by interface", "bytes", list(_by_interface(probe))),
    )
    for number, (name, unit, curves) in enumerate(panels):
        left = 0.05 + 0.33 * number
        axes = figure.add_axes((left, 0.6 / inches, 0.265, 3.25 / inches))
        top = (4.05 + 0.18 * rows) / inches
        figure.text(left, top, name, fontsize=11, color=_INK, va="center")
        _panel(axes, unit, curves)
        axes.legend(
            loc="upper left", bbox_to_anchor=(left, top - 0.1 / inches),
            bbox_transform=figure.transFigure, frameon=False, fontsize=8, labelcolor=_INK,
            borderpad=0.2, borderaxespad=0, handlelength=2,
        )  # fmt: skip
    _save(figure, path)


def _by_interface(probe: Probe) -> Iterator[tuple[str, Fit, str, str]]:
    for number, link in enumerate(probe.interfaces):
        colour = _LINKS[number % len(_LINKS)]
        yield f"{link.name}: all-gather,", link.all_gather, colour, "-"
        yield f"{link.name}: all-reduce,", link.all_reduce, colour, "--"


def _panel(axes: Axes, unit: str, curves: Sequence[tuple[str, Fit, str, str]]) -> None:
    """Draw measured points and fits over sizes: each with its name, colour and style of line.

    Both scales are logarithmic.
    """
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest: list[float] = []
    for name, fit, colour, style in curves:
        xs, ys = (np.array(column) for column in zip(*fit.samples, strict=True))
        # What took no time at all has no place on this scale.
        above = (xs > 0) & (ys > 0)
        grid = np.geomspace(max(1.0, xs.min()), max(2.0, xs.max()), _POINTS)
        fitted = 1e3 * fit.curve(grid)
        axes.plot(
            grid, np.where(fitted > 0, fitted, np.nan), color=colour, linestyle=style,
            linewidth=1.8, zorder=3, label=f"{name} {_words(fit)}".strip(),
        )  # fmt: skip
        axes.plot(
            xs[above], 1e3 * ys[above], marker="o", markersize=5, linestyle="", color=colour,
            markerfacecolor=colour if style == "-" else "white", zorder=4,
        )  # fmt: skip
        lowest.extend(1e3 * ys[above])
    if lowest:
        axes.set_ylim(bottom=min(lowest) / 2)
    _finish_panel(axes, unit)


def _finish_panel(axes: Axes, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(unit, fontsize=10, color=_INK)
    axes.set_ylabel("milliseconds", fontsize=10, color=_INK)
    axes.tick_params(which="both", labelsize=9, color=_FAINT, labelcolor=_INK)
    axes.grid(color=_GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)


def _words(fit: Fit) -> str:
    """Say the coefficients in short."""
    curve, error = fit.curve, f"error {100 * fit.error:.1f}%"
    if isinstance(curve, Line):
        alpha, beta = f"{1e3 * curve.alpha:.3g} ms", f"{1e9 * curve.beta:.3g} ns"
        return rf"$\alpha$ = {alpha}, $\beta$ = {beta}, {error}"
    if isinstance(curve, Sorting):
        gamma, fixed = f"{curve.gamma:.3g} s", f"{1e3 * curve.fixed:.3g} ms"
        return rf"$\gamma$ = {gamma}, fixed {fixed}, {error}"
    return f"through the medians, {error}"


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="png")
