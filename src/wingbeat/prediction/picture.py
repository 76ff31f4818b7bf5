"""A ranking as horizontal bars."""

from __future__ import annotations

from pathlib import Path

from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat.prediction.predict import ASYNCHRONOUS, EXACT, FEEDBACK, LOCAL_STEPS, LOSSY, Ranking

FORMATS = (".svg", ".png")

_COLOURS = {
    EXACT: "#2a6f97",
    LOSSY: "#e9a23b",
    FEEDBACK: "#d1793a",
    LOCAL_STEPS: "#7a9e5b",
    ASYNCHRONOUS: "#8d5a97",
}
_BASELINE, _INK, _GRID = "#9aa1ab", "#2b2f36", "#e4e7eb"
_DPI = 130


def check_picture(path: Path) -> None:
    """Raise a `UsageError` for a name that is no picture's."""
    if path.suffix not in FORMATS:
        raise UsageError(f"--picture {str(path)!r}: the name has to end in .svg or .png")


def draw(ranking: Ranking, baselines: frozenset[str], title: str, path: Path) -> None:
    """Draw the time of each strategy with its interval, the fastest on top.

    Args:
        ranking: what is drawn.
        baselines: names of rows in grey.
        title: above the bars.
        path: file, in the format of its ending.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    from matplotlib.patches import Patch

    rows = list(ranking.predictions.items())
    figure = blank("plan", (11, 1.6 + 0.34 * len(rows)), _DPI)
    axes = figure.add_subplot()
    for at, (name, each) in enumerate(rows):
        colour = _BASELINE if name in baselines else _COLOURS[each.convergence]
        middle, low, high = (1e3 * s for s in (each.iteration_s, each.low_s, each.high_s))
        axes.barh(at, middle, 0.7, color=colour)
        axes.errorbar(
            middle, at, xerr=[[middle - low], [high - middle]], color=_INK, linewidth=1, capsize=2
        )
        axes.text(high, at, f"  {middle:.4g}", va="center", fontsize=8.5, color=_INK)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.12e3 * max(each.high_s for _, each in rows))
    axes.set_xlabel("milliseconds of an iteration, predicted, with the error of the prediction")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    used = {each.convergence for name, each in rows if name not in baselines}
    handles = [Patch(color=_COLOURS[what], label=what) for what in _COLOURS if what in used]
    handles.append(Patch(color=_BASELINE, label="PyTorch's own"))
    axes.legend(handles=handles, fontsize=8.5, frameon=False, loc="lower right")
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:])
