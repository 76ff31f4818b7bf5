"""A report as a table for people."""

from __future__ import annotations

from rich import box
from rich.table import Table

from wingbeat.bench.machine import disturbed
from wingbeat.bench.results import Report, Run
from wingbeat.bench.speedup import Measured

MISSING = "-"
"""Stands where there is no figure; the JSON says why."""

_COLUMNS = (
    "strategy",
    "time\nms",
    "p10 .. p90\nms",
    "ratio",
    "sent\nMB",
    "exposed\nms",
    "bound\nms",
    "of\nbound",
    "of\nS_max",
    "final\nloss",
)


def render(report: Report) -> Table:
    """One row for each run, in the report's order."""
    compute = report.compute_s
    times = (
        f"; compute {1e3 * compute['forward']:.0f} + {1e3 * compute['backward']:.0f} ms"
        if compute
        else ""
    )
    table = Table(
        title=f"{report.model} on {report.lab}, {report.workers} workers{times}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for run in report.runs:
        table.add_row(*cells(run))
    table.caption = "time: median of an iteration; sent: by one worker in an iteration"
    table.caption_justify = "left"
    if report.measured is not None:
        table.caption += f"\n{s_max(report.measured)}"
    unpaid = sorted({run.strategy for run in report.runs if run.codec not in (None, "on")})
    if unpaid:
        table.caption += f"\ncodec switched off, as it was not faster here: {', '.join(unpaid)}"
    inexact = sorted({run.strategy for run in report.runs if not run.exact})
    if inexact:
        table.caption += f"\nnot exact (other weights than DDP's): {', '.join(inexact)}"
    if spoiled := disturbed(report.machine):
        table.caption += f"\n{spoiled}"
    return table


def s_max(measured: Measured) -> str:
    """The largest possible speed-up, and the measured times that it comes from."""
    times = {
        "forward": measured.t_ff_s,
        "backward": measured.t_bp_s,
        "reduce-scatter": measured.t_rs_s,
        "all-gather": measured.t_ag_s,
    }
    listed = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in times.items())
    return f"S_max {measured.s_max:.2f} of {measured.workers}; each alone, in ms: {listed}"


def cells(run: Run) -> list[str]:
    """The run as text, one string a column."""
    times = run.iteration_s
    return [
        run.strategy,
        milliseconds(times.median),
        f"{milliseconds(times.p10)} .. {milliseconds(times.p90)}",
        f"{run.ratio:.3f}",
        megabytes(run.bytes_per_iteration),
        milliseconds(run.exposed_s),
        milliseconds(run.bound_s),
        fraction(run.fraction_of_bound),
        fraction(run.fraction_of_s_max),
        f"{run.final_loss:.5g}",
    ]


def fraction(value: float | None) -> str:
    """A share of a bound with three decimals."""
    return MISSING if value is None else f"{value:.3f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds: one decimal under 100, none above."""
    if seconds is None:
        return MISSING
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def megabytes(count: float) -> str:
    """Bytes as MB (10**6), with as many decimals as make sense."""
    value = count / 1e6
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"
