"""All rows of a bench in one picture and one trace, on a common scale."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.files import replacing
from wingbeat.observe import trace
from wingbeat.observe.events import COLLECTIVES, Event
from wingbeat.observe.exposed import Interval, clip, iterations, union
from wingbeat.observe.timeline import COLOURS, blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WAIT: dict[str, Any] = {"facecolor": "#fbdad6", "edgecolor": "#c8281e", "hatch": "//////"}
_ORDER = ("forward", "backward", "encode", "update", *COLLECTIVES)


def draw_png(
    names: Sequence[str],
    events: Sequence[Sequence[Event]],
    path: Path,
    *,
    title: str,
    last: int = 2,
) -> None:
    """Draw worker 0's ``last`` iterations of each row, one row below the other.

    UsageError if matplotlib is missing, or the file cannot be written.
    """
    figure = blank("timeline", (13, 1.9 + 1.25 * len(names)), 130)
    axes = figure.add_subplot()
    widest = 0.0
    for row, (name, own) in enumerate(zip(names, events, strict=True)):
        widest = max(widest, _draw_row(axes, row, name, own, last))
    _finish(axes, len(names), widest)
    axes.set_title(f"{title}: {last} iterations of worker 0", loc="left", fontweight="bold", pad=30)
    _legend(axes, {event.what for own in events for event in own})
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format="png")


def write_trace(names: Sequence[str], events: Sequence[Sequence[Event]], path: Path) -> None:
    """Write every row's workers as processes of one Perfetto trace; all rows start at zero."""
    workers = 1 + max((event.worker for own in events for event in own), default=0)
    joined = []
    for row, own in enumerate(events):
        zero = min((event.begin_ns for event in own), default=0)
        joined += [
            replace(
                event,
                worker=row * workers + event.worker,
                begin_ns=event.begin_ns - zero,
                end_ns=event.end_ns - zero,
            )
            for event in own
        ]
    trace.write_perfetto(joined, path)
    written = json.loads(path.read_text(encoding="utf-8"))
    for entry in written["traceEvents"]:
        if entry["ph"] == "M" and entry["name"] == "process_name":
            row, worker = divmod(entry["pid"], workers)
            entry["args"]["name"] = f"{names[row]}, worker {worker}"
    with replacing(path) as file:
        file.write(json.dumps(written).encode())


def _draw_row(axes: Axes, row: int, name: str, events: Sequence[Event], last: int) -> float:
    """Draw one strategy; return the length in milliseconds."""
    own = [event for event in events if event.worker == 0]
    shown = iterations(own)[-last:]
    if not shown:
        return 0.0
    window = (shown[0][0], shown[-1][1])
    top = row * 3.0
    for what in ("forward", "backward", "encode", "update"):
        _bars(axes, _spans(own, what), window, top, 0.95, facecolor=COLOURS[what])
    waits = union(_spans(own, "wait"))
    _bars(axes, waits, window, top, 0.95, linewidth=0.6, zorder=4, **_WAIT)
    for what in COLLECTIVES:
        low, height = top + 1.05, 0.95
        style = {"facecolor": COLOURS[what], "edgecolor": "white", "linewidth": 0.5, "alpha": 0.85}
        _bars(axes, union(_spans(own, what)), window, low, height, **style)
    for _, end in shown:
        at = (end - window[0]) / 1e6
        axes.plot([at, at], [top - 0.1, top + 2.1], color="#2b2f36", linewidth=1)
    exposed = sum(end - begin for begin, end in clip(waits, window))
    length = window[1] - window[0]
    axes.text(
        (length / 1e6) * 1.008,
        top + 1,
        f"{length / len(shown) / 1e6:.0f} ms\n{100 * exposed / length:.0f}% exposed",
        va="center",
        fontsize=9,
    )
    axes.text(-0.012, top + 1, name, va="center", ha="right", fontweight="bold", **_beside(axes))
    return length / 1e6


def _beside(axes: Axes) -> dict[str, Any]:
    """Write text left of the axes, at a height in data units."""
    return {"transform": axes.get_yaxis_transform(), "fontsize": 10}


def _spans(events: Sequence[Event], what: str) -> list[Interval]:
    return [(event.begin_ns, event.end_ns) for event in events if event.what == what]


def _bars(
    axes: Axes,
    spans: Sequence[Interval],
    window: Interval,
    low: float,
    height: float,
    **style: Any,
) -> None:
    bars = [((b - window[0]) / 1e6, (e - b) / 1e6) for b, e in clip(spans, window)]
    axes.broken_barh(bars, (low, height), **{"linewidth": 0, "zorder": 3, **style})


def _finish(axes: Axes, rows: int, widest: float) -> None:
    axes.set_xlim(0, widest * 1.12 or 1.0)
    axes.set_ylim(rows * 3.0 - 0.7, -0.3)
    axes.set_yticks([])
    axes.grid(axis="x", color="#dfe2e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("milliseconds   (upper bar: computation; lower bar: the network)")


def _legend(axes: Axes, seen: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=COLOURS[what], label=what.replace("_", "-"))
        for what in _ORDER
        if what in seen
    ]
    if "wait" in seen:
        handles.append(Patch(label="exposed: waiting for the network", **_WAIT))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        frameon=False,
    )
