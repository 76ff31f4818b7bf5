"""Draws a timeline of iterations.

Each worker has a row for computation, with exposed communication hatched in red, a row per network
interface with its collectives, and a row for model averaging if it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.events import COLLECTIVES, Event
from wingbeat.observe.exposed import Interval, clip, exposed_per_iteration, iterations, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#8fb8de",
    "backward": "#34679a",
    "encode": "#5fb3b3",
    "update": "#6d7580",
    "reduce_scatter": "#e39b3b",
    "all_gather": "#58a273",
    "all_reduce": "#a577b8",
    "broadcast": "#c9b458",
    "take_over": "#9c6b4e",
    "group_wait": "#d9c7b8",
    "average": "#b5838d",
}
"""Fill colour by event; ``wait`` is hatched, and ``step`` is pale in the background."""

_BESIDE = (*COLLECTIVES, "group_wait", "average")
"""Events with rows below computation's."""

_STEP = "#d3d7dd"
_WAIT_FILL, _WAIT_EDGE = "#fbdad6", "#c8281e"
_INK, _FAINT, _BAND = "#2b2f36", "#9aa1ab", "#f4f5f7"
_ROW, _BAR, _GAP = 1.0, 0.78, 0.55
_MAX_SUBROWS = 4
_DPI = 150


def draw_png(
    events: Iterable[Event],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    last: int = 2,
) -> None:
    """Draw the ``last`` finished iterations of all workers in ``events`` as a PNG.

    The window is that of the lowest rank; times are milliseconds from its begin. Raises
    ``UsageError`` if there is nothing to draw, the file cannot be written, or matplotlib (the extra
    ``bench``) is missing.
    """
    if last < 1:
        raise UsageError(f"cannot draw the last {last} iterations; allowed: 1 or more")
    listed = list(events)
    if not listed:
        raise UsageError("no events to draw; was the stream started before the training loop?")
    by_worker = {
        worker: [event for event in listed if event.worker == worker]
        for worker in sorted({event.worker for event in listed})
    }
    shown = iterations(next(iter(by_worker.values())))[-last:]
    window = shown[0][0], shown[-1][1]
    figure, axes, height = _canvas(by_worker, title)
    top = 0.0
    labels: list[tuple[float, str]] = []
    for worker, own in by_worker.items():
        top = _draw_worker(axes, worker, own, window, last, top, labels)
    _finish(figure, axes, window, labels, height, listed)
    _save(figure, path)


def blank(what: str, size: tuple[float, float], dpi: int) -> Figure:
    """Return a white figure of ``size`` inches; ``what`` names it in errors.

    Raises:
        UsageError: matplotlib (the extra ``bench``) is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            f"drawing a {what} needs matplotlib; install it with: pip install 'wingbeat[bench]'"
        ) from None
    figure = Figure(figsize=size, dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _lanes(events: Iterable[Event]) -> list[str]:
    return sorted({event.lane for event in events if event.what in _BESIDE})


def _canvas(by_worker: dict[int, list[Event]], title: str) -> tuple[Figure, Axes, float]:
    """An empty figure, and the height of its rows in data units."""
    height = sum((1 + len(_lanes(own))) * _ROW + _GAP for own in by_worker.values()) - _GAP
    inches = 1.7 + 0.34 * height
    figure = blank("timeline", (13, inches), _DPI)
    axes = figure.add_axes((0.085, 0.6 / inches, 0.8, (inches - 1.55) / inches))
    heading = title or "Where the time of an iteration goes"
    figure.text(
        0.085, 1 - 0.38 / inches, heading, fontsize=13, fontweight="bold", color=_INK, va="center"
    )
    return figure, axes, height


def _draw_worker(
    axes: Axes,
    worker: int,
    events: list[Event],
    window: Interval,
    last: int,
    top: float,
    labels: list[tuple[float, str]],
) -> float:
    """Draw one worker's rows from ``top`` down; return where the next worker begins."""
    lanes = _lanes(events)
    bottom = top + (1 + len(lanes)) * _ROW
    axes.axhspan(top, bottom, color=_BAND, linewidth=0, zorder=0)
    for event in events:
        if event.what == "step" and window[0] < event.end_ns <= window[1]:
            at = (event.end_ns - window[0]) / 1e6
            axes.plot([at, at], [top, bottom], color=_FAINT, linewidth=1, linestyle=(0, (3, 2)))
    labels.append((top + _ROW / 2, f"worker {worker}"))
    _draw_compute(axes, events, window, top)
    for number, lane in enumerate(lanes, start=1):
        labels.append((top + (number + 0.5) * _ROW, lane))
        own = [event for event in events if event.lane == lane and event.what in _BESIDE]
        _draw_lane(axes, own, window, top + number * _ROW)
    shown, exposed = iterations(events)[-last:], exposed_per_iteration(events)[-last:]
    length = sum(end - begin for begin, end in shown)
    share = 100 * sum(exposed) / length if length else 0.0
    axes.annotate(
        f"{length / len(shown) / 1e6:.1f} ms / iteration\n{share:.0f}% exposed",
        xy=(1, (top + bottom) / 2), xycoords=("axes fraction", "data"),
        xytext=(10, 0), textcoords="offset points",
        va="center", fontsize=8.5, color=_INK, linespacing=1.4,
    )  # fmt: skip
    return bottom + _GAP


def _draw_compute(axes: Axes, events: list[Event], window: Interval, top: float) -> None:
    def bars(what: str, **style: Any) -> None:
        _bars(axes, clip(spans(events, what), window), window, top + 0.11, _BAR, **style)

    bars("step", facecolor=_STEP, zorder=2)
    for what in ("forward", "backward", "encode", "update", "take_over"):
        bars(what, facecolor=COLOURS[what])
    style: dict[str, Any] = {"facecolor": _WAIT_FILL, "edgecolor": _WAIT_EDGE, "hatch": "//////"}
    bars("wait", linewidth=0.7, zorder=4, **style)


def _draw_lane(axes: Axes, events: list[Event], window: Interval, top: float) -> None:
    """Draw one interface's collectives; overlapping ones share the row's height."""
    listed = sorted(events, key=lambda event: (event.begin_ns, event.end_ns))
    seen = [event for event in listed if clip([(event.begin_ns, event.end_ns)], window)]
    places, count = _subrows([(event.begin_ns, event.end_ns) for event in seen])
    height = _BAR / count
    for event, place in zip(seen, places, strict=True):
        [span] = clip([(event.begin_ns, event.end_ns)], window)
        low = top + 0.11 + place * height
        _bars(
            axes, [span], window, low, height,
            facecolor=COLOURS[event.what], edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        wide = (span[1] - span[0]) / (window[1] - window[0])
        text = str(event.bucket) if event.bucket >= 0 else " ".join(map(str, event.group))
        if text and count <= 2 and wide > 0.009 * len(text):
            middle = (span[0] + span[1]) / 2 - window[0]
            axes.text(
                middle / 1e6, low + height / 2, text,
                ha="center", va="center", fontsize=7.5 if count == 1 else 6, color="white",
                zorder=5,
            )  # fmt: skip


def _subrows(placed: Sequence[Interval]) -> tuple[list[int], int]:
    """Return a subrow for each span, ordered by begin, and the number of subrows.

    Overlapping spans get different subrows, up to ``_MAX_SUBROWS``; further ones share.

    >>> _subrows([(0, 4), (2, 6), (4, 8)])
    ([0, 1, 0], 2)
    """
    ends: list[int] = []
    places: list[int] = []
    for begin, end in placed:
        free = next((i for i, busy in enumerate(ends) if busy <= begin), None)
        if free is None and len(ends) < _MAX_SUBROWS:
            free = len(ends)
            ends.append(end)
        elif free is None:
            free = min(range(len(ends)), key=ends.__getitem__)
        ends[free] = max(end, ends[free])
        places.append(free)
    return places, max(1, len(ends))


def _bars(
    axes: Axes, drawn: list[Interval], window: Interval, low: float, height: float, **style: Any
) -> None:
    scaled = [((begin - window[0]) / 1e6, (end - begin) / 1e6) for begin, end in drawn]
    axes.broken_barh(scaled, (low, height), **{"linewidth": 0, "zorder": 3, **style})


def _finish(
    figure: Figure,
    axes: Axes,
    window: Interval,
    labels: list[tuple[float, str]],
    height: float,
    events: list[Event],
) -> None:
    axes.set_xlim(0, max((window[1] - window[0]) / 1e6, 1e-6))
    axes.set_ylim(height, 0)
    axes.set_yticks([at for at, _ in labels], [text for _, text in labels])
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("worker") else "normal")
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_INK)
    axes.tick_params(axis="x", labelsize=9, color=_FAINT, labelcolor=_INK)
    axes.grid(axis="x", color="#dfe2e6", linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.set_xlabel("milliseconds", fontsize=9.5, color=_INK)
    _legend(figure, {event.what for event in events})


def _legend(figure: Figure, seen: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=colour, label=what.replace("_", "-"))
        for what, colour in COLOURS.items()
        if what in seen
    ]
    if "wait" in seen:
        wait = Patch(facecolor=_WAIT_FILL, edgecolor=_WAIT_EDGE, hatch="//////")
        wait.set_label("exposed: waiting for the network")
        handles.append(wait)
    if "step" in seen:
        handles.append(Patch(facecolor=_STEP, label="rest of step()"))
        dashes = Line2D([], [], color=_FAINT, linewidth=1, linestyle=(0, (3, 2)))
        dashes.set_label("end of iteration")
        handles.append(dashes)
    if handles:
        inches = figure.get_size_inches()[1]
        figure.legend(
            handles=handles, loc="center left", bbox_to_anchor=(0.085, 1 - 0.72 / inches),
            borderpad=0, borderaxespad=0,
            ncols=len(handles), frameon=False, fontsize=9, handlelength=1.4, columnspacing=1.5,
            handletextpad=0.5, labelcolor=_INK,
        )  # fmt: skip


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="png")
