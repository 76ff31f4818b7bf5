"""``wingbeat plan``: what tuning or measuring has found, in words and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from wingbeat.planning.plans.result import Result
    from wingbeat.planning.plans.thresholds.result import Result as Thresholds

HELP = """Show what a run has found out before it chose its plan: what was tried or measured.

\b
FILE is the plan_file that a run with DeAR(plan_file=...), OMGS(plan_file=...) or
Geryon(threshold="tuned", plan_file=...) has written.

\b
Examples:
  wingbeat plan plan.json                         DeAR: the trials as a table
  wingbeat plan plan.json --png out/plan.png      and as a picture
  wingbeat plan merged.json                       OMGS: backward, codec and links, with errors
  wingbeat plan merged.json --png out/merged.png  measured points and fits
  wingbeat plan urgent.json --png out/urgent.png  Geryon: iteration time by threshold
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan", help=HELP)(plan)


def plan(
    file: Annotated[Path, typer.Argument(help="The plan file.", show_default=False)],
    png: Annotated[Path | None, typer.Option(help="Draw what was found here.")] = None,
) -> None:
    """Show a plan file."""
    from wingbeat.planning.plans.planfile import MEASURED, THRESHOLDS, kind_of

    kind = kind_of(file)
    if kind is MEASURED:
        _show_measured(file, png)
    elif kind is THRESHOLDS:
        _show_thresholds(file, png)
    else:
        _show_tuned(file, png)
    if png is not None:
        print(f"picture: {png}")


def _show_measured(file: Path, png: Path | None) -> None:
    from wingbeat.planning.probe import picture, saved

    known = saved.load(file)
    for line in known.probe.explain():
        print(line)
    if png is not None:
        picture.draw_png(known.probe, png)


def _show_tuned(file: Path, png: Path | None) -> None:
    from rich.console import Console

    from wingbeat.planning.plans import picture, saved

    known = saved.load(file)
    if known.result.samples:
        console = Console(width=None if sys.stdout.isatty() else 100)
        console.print(render(known.result))
        print("expected: what all trials together make likely at that size")
    print(known.result.explain())
    print("tuned for " + ", ".join(f"{name} {value}" for name, value in known.key.items()))
    if png is not None:
        picture.draw_png(known.result, png)


def _show_thresholds(file: Path, png: Path | None) -> None:
    from rich.console import Console

    from wingbeat.planning.plans.thresholds import picture, saved

    known = saved.load(file)
    if known.result.samples:
        console = Console(width=None if sys.stdout.isatty() else 100)
        console.print(render_thresholds(known.result))
    print(known.result.explain())
    print("tuned for " + ", ".join(f"{name} {value}" for name, value in known.key.items()))
    if png is not None:
        picture.draw_png(known.result, png)


def render_thresholds(result: Thresholds) -> Table:
    """Return one row for each division that was tried, the fastest first; the chosen is bold."""
    from rich import box
    from rich.table import Table

    from wingbeat.planning.plans.thresholds.cuts import divided, levels_of
    from wingbeat.planning.plans.thresholds.result import written

    table = Table(
        title=f"Thresholds: {len(result.samples)} divisions of {result.layers} layers",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("threshold", "layers", "ms", "iterations", ""):
        table.add_column(name, justify="right")
    for sample in sorted(result.samples, key=lambda sample: sample.seconds):
        chosen = sample.cuts == result.chosen
        levels = levels_of(sample.cuts, result.layers, result.classes)
        table.add_row(
            written(levels) if sample.cuts else "one class",
            divided(sample.cuts, result.layers),
            f"{1e3 * sample.seconds:.4g}",
            str(sample.iterations),
            "chosen" if chosen else "",
            style="bold" if chosen else "",
        )
    return table


def render(result: Result) -> Table:
    """Return one row for each trial, in order; the chosen one is bold and marked."""
    from rich import box
    from rich.table import Table

    from wingbeat.planning.plans.result import as_mb, counted

    trials = counted(len(result.samples), "trial")
    table = Table(
        title=f"Bucket size: {trials} from {as_mb(result.low_bytes)} to "
        f"{as_mb(result.high_bytes)} MB ({result.search})",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("trial", "size\nMB", "iterations\nper s", "of the\nstart", "expected\nper s"):
        table.add_column(name, justify="right")
    table.add_column("")
    first = result.samples[0].throughput
    for index, (sample, expected) in enumerate(zip(result.samples, result.expected, strict=True)):
        chosen = index == result.chosen_index
        notes = [sample.topology] if sample.topology else []
        notes += [*(["start"] if index == 0 else []), *(["chosen"] if chosen else [])]
        table.add_row(
            str(index + 1),
            as_mb(sample.nbytes),
            f"{sample.throughput:.4g}",
            f"{sample.throughput / first:.3f}",
            f"{expected:.4g}",
            ", ".join(notes),
            style="bold" if chosen else "",
        )
    return table
