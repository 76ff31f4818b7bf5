"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from wingbeat.planning.bucket_size import format_mb
from wingbeat.planning.thresholds import format_thresholds
from wingbeat_lab.bench import cross, models
from wingbeat_lab.bench.clocks import CORES_FULL
from wingbeat_lab.bench.machine import disturbed
from wingbeat_lab.bench.printed import Printed
from wingbeat_lab.bench.results import Report, Run
from wingbeat_lab.bench.speedup import Measured
from wingbeat_lab.lab.spec import LabSpec

MISSING = "-"
"""The cell of a missing figure; the JSON has the reason."""

_COLUMNS = (
    "strategy",
    "time, ms",
    "p10 .. p90, ms",
    "ratio",
    "of best DDP",
    "sent, MB",
    "exposed, ms",
    "bound, ms",
    "of bound",
    "of S_max",
    "final loss",
)


def render(report: Report) -> Table:
    """One row for each run, in the report's order, for a terminal."""
    made = printed(report)
    table = Table(
        title=made.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, name in enumerate(made.columns):
        table.add_column("\n".join(name.rsplit(", ", 1)), justify="right" if number else "left")
    for row in made.rows:
        table.add_row(*row)
    table.caption = "\n".join(made.notes)
    table.caption_justify = "left"
    return table


def printed(report: Report) -> Printed:
    """One row for each run, in the report's order, with the conditions as title and notes."""
    compute = report.compute_s
    times = (
        f"; compute {1e3 * compute['forward']:.0f} + {1e3 * compute['backward']:.0f} ms"
        if compute
        else ""
    )
    timed = [run.time_to_loss for run in report.runs if run.time_to_loss is not None]
    classes = report.runs[0].class_bytes_per_iteration if report.runs else {}
    columns = [*_COLUMNS, *(f"to loss {each.target:g}, s" for each in timed[:1])]
    columns += [f"{name}, MB" for name in classes]
    rows = [
        [*cells(run), *(megabytes(run.class_bytes_per_iteration[name]) for name in classes)]
        for run in report.runs
    ]
    title = f"{report.model} on {report.lab}, {report.workers} workers{times}"
    return Printed.of(title, columns, rows, _caption(report))


def _caption(report: Report) -> list[str]:
    """The meaning of the figures, and warnings about them."""
    lines = [
        "time: of an iteration, the median; the mean of strategies without lockstep; sent: by one "
        "worker in an iteration"
    ]
    classes = report.runs[0].class_bytes_per_iteration if report.runs else {}
    if classes:
        lines.append(f"{', '.join(classes)}: what it sent by class, as on the wire")
    stretch = float(report.config.get("stretch", 1.0))
    if stretch != 1:
        lines.append(
            f"slow motion: links and computation {stretch:g} times as slow"
            if stretch > 1
            else f"fast motion: links and computation {1 / stretch:g} times as fast"
        )
    factor = models.parse(report.model, stretch=stretch).codec_factor
    if factor > 1 and any(not run.exact for run in report.runs):
        lines.append(
            f"codecs of workers: what grows with the model takes {factor:g} times as long as "
            f"measured here, as on the whole model, the rest {stretch:g} times; those of servers "
            "do not"
        )
    if factor < 1:
        lines.append("codecs have more than their share: they run at the processor's pace")
    if report.normal_iteration_s is not None:
        lines.append(
            f"slow workers: {', '.join(report.config['slow'])}, where a normal iteration is "
            f"{milliseconds(report.normal_iteration_s)} ms of computation"
        )
    if report.measured is not None:
        lines.append(s_max(report.measured))
    lines += [
        f"{run.strategy}: decided before it was timed, in {run.deciding.iterations} iterations "
        f"({run.deciding.seconds:.1f} s): {decided(run.deciding.decision)}"
        for run in report.runs
        if run.deciding is not None
    ]
    lines += cross.notes(
        LabSpec.parse(report.lab),
        [(r.strategy, r.cross_traffic) for r in report.runs if r.cross_traffic is not None],
    )
    full = f"limited by this machine's cores ({CORES_FULL:.0%} or more of their time in use)"
    lines += [
        f"{run.strategy}: the staleness bound {acted(run.fired_by_rank)}"
        for run in report.runs
        if run.fired_by_rank is not None
    ]
    listed = {
        "codec switched off, as it was not faster here": [
            run.codec == "off" for run in report.runs
        ],
        "not exact (other weights than DDP's)": [not run.exact for run in report.runs],
        full: [run.limited_by_cores for run in report.runs],
    }
    for what, flags in listed.items():
        if names := sorted({r.strategy for r, so in zip(report.runs, flags, strict=True) if so}):
            lines.append(f"{what}: {', '.join(names)}")
    if spoiled := disturbed(report.machine):
        lines.append(spoiled)
    return lines


def decided(decision: dict[str, Any]) -> str:
    """Describe the decisions of a row.

    >>> decided({"codec": "off", "bucket_bytes": 2_726_297})
    'codec off, buckets of 2.6 MB'
    """
    said = []
    if "codec" in decision:
        said.append(f"codec {decision['codec']}")
    if "bucket_bytes" in decision:
        said.append(f"buckets of {format_mb(decision['bucket_bytes'])} MB")
    if "buckets" in decision:
        of = f" ({' = '.join(decision['rules'])})" if decision.get("rules") else ""
        said.append(f"layers merged into {decision['buckets']} buckets{of}")
    if "thresholds" in decision:
        said.append(f"thresholds {format_thresholds(tuple(decision['thresholds']))}")
    return ", ".join(said)


def acted(by_rank: Sequence[Mapping[str, int]]) -> str:
    """Describe how often the bound of staleness has acted, and on how many workers.

    >>> acted([{"dropped": 0, "pulled": 0}, {"dropped": 3, "pulled": 1}])
    'dropped 3 iterations of 1 worker; parameters pulled: 1'
    """
    dropped = [fired["dropped"] for fired in by_rank]
    workers = sum(map(bool, dropped))
    pulled = sum(fired["pulled"] for fired in by_rank)
    of = f" of {workers} worker{'s' * (workers != 1)}" if workers else ""
    return f"dropped {sum(dropped)} iterations{of}; parameters pulled: {pulled}"


def s_max(measured: Measured) -> str:
    """The maximum speed-up, and the measured times that it derives from."""
    times = {
        "forward": measured.t_ff_s,
        "backward": measured.t_bp_s,
        "reduce-scatter": measured.t_rs_s,
        "all-gather": measured.t_ag_s,
    }
    listed = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in times.items())
    return f"S_max {measured.s_max:.2f} of {measured.workers}; each alone, in ms: {listed}"


def cells(run: Run) -> list[str]:
    """The run as text, one string for each column."""
    times = run.iteration_s
    shown = [
        run.strategy,
        milliseconds(run.typical_s),
        f"{milliseconds(times.p10)} .. {milliseconds(times.p90)}",
        f"{run.ratio:.3f}",
        fraction(run.ratio_to_best_ddp),
        megabytes(run.bytes_per_iteration),
        milliseconds(run.exposed_s),
        milliseconds(run.bound_s),
        fraction(run.fraction_of_bound),
        fraction(run.fraction_of_s_max),
        f"{run.final_loss:.5g}",
    ]
    if run.time_to_loss is not None:
        seconds = run.time_to_loss.seconds
        shown.append(MISSING if seconds is None else f"{seconds:.3g}")
    return shown


def fraction(value: float | None) -> str:
    """A share or a ratio with three decimals."""
    return MISSING if value is None else f"{value:.3f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds: one decimal under 100, none above."""
    if seconds is None:
        return MISSING
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def megabytes(count: float) -> str:
    """Bytes as MB (10**6), with a suitable number of decimals."""
    value = count / 1e6
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"
