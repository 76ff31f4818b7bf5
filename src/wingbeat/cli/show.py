"""``wingbeat show``: prints and draws the content of a plan file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wingbeat.cli.tables import titled
from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from wingbeat.planning.bucket_size import BucketSizeResult
    from wingbeat.planning.choice import StrategyResult
    from wingbeat.planning.thresholds import ThresholdResult

HELP = """Show what a run has measured and tried before it chose its plan.

\b
FILE is the plan_file that a run with Auto(plan_file=...), DeAR(plan_file=...),
OMGS(plan_file=...) or Geryon(threshold="tuned", plan_file=...) has written.

\b
Examples:
  wingbeat show plan.json                         DeAR: the trials as a table
  wingbeat show plan.json --png out/plan.png      and as a picture
  wingbeat show merged.json                       OMGS: backward, codec and links, with errors
  wingbeat show merged.json --png out/merged.png  measured points and fits
  wingbeat show urgent.json --png out/urgent.png  Geryon: iteration time by threshold
"""


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("show", help=HELP)(show)


def show(
    file: Annotated[Path, typer.Argument(help="The plan file.", show_default=False)],
    png: Annotated[Path | None, typer.Option(help="Draw what was found here.")] = None,
) -> None:
    """Show a plan file."""
    from wingbeat.planning import files
    from wingbeat.planning.bucket_size import BucketSizeResult
    from wingbeat.planning.choice import StrategyResult
    from wingbeat.planning.figures import draw_png
    from wingbeat.planning.probe import Probe
    from wingbeat.planning.thresholds import ThresholdResult

    records = {
        each.kind: each for each in (BucketSizeResult, Probe, StrategyResult, ThresholdResult)
    }
    saved = files.load(file, records.get(files.kind_of(file), BucketSizeResult))
    record: Any = saved.record
    if isinstance(record, Probe):
        print("\n".join(record.explain()))
    else:
        if isinstance(record, StrategyResult):
            _print_table(render_strategies(record))
        elif record.samples and isinstance(record, ThresholdResult):
            _print_table(render_thresholds(record))
        elif record.samples:
            _print_table(render_sizes(record))
            print("expected: predicted by all trials for that size")
        print(record.explain())
        print("tuned for " + ", ".join(f"{name} {value}" for name, value in saved.key.items()))
    if png is not None:
        if isinstance(record, StrategyResult):
            raise UsageError("--png: a choice of strategies has no picture; leave it out")
        draw_png(record, png)
        print(f"picture: {png}")


def _print_table(table: Table) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 100).print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = titled(title)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def render_thresholds(result: ThresholdResult) -> Table:
    """Return one row per measured division, fastest first, with the chosen one in bold."""
    from wingbeat.planning.thresholds import (
        format_division,
        format_thresholds,
        thresholds_from_cuts,
    )

    title = f"Thresholds: {len(result.samples)} divisions of {result.layers} layers"
    table = _table(title, ("threshold", "layers", "ms", "iterations", ""))
    for sample in sorted(result.samples, key=lambda sample: sample.seconds):
        chosen = sample.cuts == result.chosen
        levels = thresholds_from_cuts(sample.cuts, result.layers, result.classes)
        table.add_row(
            format_thresholds(levels) if sample.cuts else "one class",
            format_division(sample.cuts, result.layers),
            f"{1e3 * sample.seconds:.4g}",
            str(sample.iterations),
            "chosen" if chosen else "",
            style="bold" if chosen else "",
        )
    return table


def render_strategies(result: StrategyResult) -> Table:
    """Return one row per candidate, fastest first, with the chosen one in bold."""
    table = _table(f"Strategies: {len(result.tried)} tried", ("strategy", "ms", ""))
    for each in sorted(result.tried, key=lambda each: each.seconds):
        chosen = each.name == result.chosen
        ms, style = f"{1e3 * each.seconds:.4g}", "bold" if chosen else ""
        table.add_row(each.name, ms, "chosen" if chosen else "", style=style)
    return table


def render_sizes(result: BucketSizeResult) -> Table:
    """Return one row per trial, in order, with the chosen one in bold and marked."""
    from wingbeat.planning.bucket_size import counted, format_mb

    low, high = format_mb(result.low_bytes), format_mb(result.high_bytes)
    trials = counted(len(result.samples), "trial")
    table = _table(
        f"Bucket size: {trials} from {low} to {high} MB ({result.search})",
        ("trial", "size\nMB", "iterations\nper s", "of the\nstart", "expected\nper s"),
    )
    table.add_column("")
    first = result.samples[0].iterations_per_s
    for index, (sample, expected) in enumerate(zip(result.samples, result.expected, strict=True)):
        chosen = index == result.chosen_index
        notes = [sample.topology] if sample.topology else []
        notes += [*(["start"] if index == 0 else []), *(["chosen"] if chosen else [])]
        table.add_row(
            str(index + 1),
            format_mb(sample.bucket_bytes),
            f"{sample.iterations_per_s:.4g}",
            f"{sample.iterations_per_s / first:.3f}",
            f"{expected:.4g}",
            ", ".join(notes),
            style="bold" if chosen else "",
        )
    return table
