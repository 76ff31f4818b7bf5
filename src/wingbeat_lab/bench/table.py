"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from wingbeat.cli.tables import titled
from wingbeat.planning.bucket_size import format_mb
from wingbeat.planning.thresholds import format_thresholds
from wingbeat_lab.bench import bound, models, results, traffic
from wingbeat_lab.bench.config import LOSSES
from wingbeat_lab.bench.machine import disturbed
from wingbeat_lab.bench.measure import Measured
from wingbeat_lab.bench.results import CORES_FULL, Prices, Report, Run
from wingbeat_lab.bench.traffic import WINDOW_S
from wingbeat_lab.lab.spec import LabSpec


@dataclass(frozen=True, slots=True)
class Printed:
    """A table with text cells.

    Attributes:
        title: what is compared, and where.
        columns: one label for each column, with the unit. The first column names the row.
        rows: one cell for each column. An empty cell has no figure.
        notes: lines below the table: the meaning of the figures, and what disturbed them.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        notes: Iterable[str] = (),
    ) -> Printed:
        """Build a table from any sequences; ValueError if a row has the wrong number of cells."""
        made = tuple(tuple(row) for row in rows)
        for row in made:
            if len(row) != len(columns):
                raise ValueError(f"{title}: row {row} has {len(row)} cells, not {len(columns)}")
        return cls(title, tuple(columns), made, tuple(notes))

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Printed:
        """Build a table from the result of `to_json`.

        Raises:
            ValueError: a row has the wrong number of cells.
            KeyError: a part is missing.
        """
        return cls.of(kept["title"], kept["columns"], kept["rows"], kept.get("notes", ()))

    def to_json(self) -> dict[str, Any]:
        """Return the table for JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return the table for a terminal: the first column is left-aligned, others right-aligned.

        >>> print(Printed.of("codecs", ("codec", "ms"), [("sketch", "9.1"), ("none", "12")]).text())
        codecs
        codec    ms
        sketch  9.1
        none     12
        """
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *shown, *self.notes])

    def markdown(self) -> str:
        r"""Return the table in Markdown, below its title.

        >>> print(Printed.of("codecs", ("codec", "ms"), [("sketch|8", "9.1")]).markdown())
        codecs
        <BLANKLINE>
        | codec | ms |
        |---|---|
        | sketch\|8 | 9.1 |
        """
        head = [_line(self.columns), "|" + "---|" * len(self.columns)]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([self.title, "", *head, *map(_line, self.rows), *notes])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


NOTES = {
    "iteration_s": (
        "seconds from the moment the last worker starts an iteration until the last worker starts"
        " the next, so what is put off into the next forward counts; over all timed iterations"
    ),
    "typical_s": (
        "seconds of an iteration: the median, and for strategies without lockstep the mean, as"
        " several may come at once after a long wait; what follows is made from it"
    ),
    "ratio": "iteration time over the first row's; below 1 is faster",
    "ratio_to_best_ddp": (
        "iteration time over that of the fastest row of DistributedDataParallel, whatever"
        " its hook, as fp32 DDP alone is a weak opponent; null without such a row. The fastest may"
        " be one that is not exact: see exact"
    ),
    "samples_by_rank_s": (
        "seconds of each worker's timed iterations by its own clock, from its start of one to its"
        " start of the next"
    ),
    "iterations_per_s": (
        "by_rank: a worker's timed iterations over the seconds that it took for them; total: their"
        " sum. Without lockstep (canary) an iteration is as many gradients as all workers make in"
        " one, once they are applied. Where models are averaged (ripples, adpsgd, localsgd, diloco)"
        " an iteration is over when all workers together have made as many steps as there are"
        " workers, of any worker: fast ones continue, and a turn ends when there are enough. All"
        " ranks then have the same times; see steps_by_rank"
    ),
    "steps_by_rank": (
        "where models are averaged: how many of the steps in the timed iterations each worker has"
        " made; null for other rows. A step counts when the optimizer's step has returned, so with"
        " the wait for its average where it has one"
    ),
    "fired_by_rank": (
        "under bounded staleness (canary): how often the bound has acted on each worker in timed"
        " iterations: iterations dropped before all of their colayers were sent, and parameters"
        " pulled from another worker in place of rounds that were let go; null for other rows"
    ),
    "cpu_s_per_iteration": (
        "by role of a process and in it by rank: CPU seconds of all its threads, in user mode and"
        " in the kernel, over the timed iterations, for each of them; server: all parameter servers"
        " that the worker has started"
    ),
    "cores_share": (
        "CPU seconds of all processes of the row over the timed iterations / (machine.cores x"
        " seconds from the first worker's start to the last one's end). What the kernel does for"
        " the links outside of any process is not in it"
    ),
    "limited_by_cores": (
        f"cores_share is {results.CORES_FULL:g} or more: the row waits for this machine's cores,"
        " and hosts of their own would be faster"
    ),
    "bytes_per_iteration": (
        "bytes one worker puts on its interfaces in an iteration, by the kernel's counters, which"
        " count the headers of each piece of up to 64 KB that TCP hands down, and all processes of"
        " a host whatever their role; mean over workers. Where models are averaged, without what it"
        " takes to make them equal at the end of a turn"
    ),
    "class_bytes_per_iteration": (
        "the same by priority class of the lab's links (ef: DSCP 46; be: best effort), as on the"
        " wire, the headers of every segment included; empty without classes"
    ),
    "traffic": (
        "with --traffic: what hosts send as a share of their links' rates, by the kernel's counters"
        f" in windows of {WINDOW_S:g} s without slow motion (windows_s with it): mean over all of"
        " the timed iterations, peak of the busiest window of any host, series: mean over hosts"
    ),
    "cross_traffic": (
        "with cross-traffic on the lab's trunks (--cross-traffic, or cross= in its line): what"
        " the hosts it flows to have received in the row's timed iterations, by the kernel's"
        " counters (bytes, all together), what one direction of one trunk carried of it in each"
        " iteration (bit_per_s; headers of each piece of up to 64 KB once), and how many cores its"
        " generators used in user and kernel mode; null without"
    ),
    "exposed_s": (
        "median iteration time minus the time to compute: forward + backward of a paced model,"
        " the row 'single' for a real one (null without that row)"
    ),
    "bound_s": "no schedule of the row's kind can be faster; formula in the run; " + bound.TERMS,
    "fraction_of_bound": "bound_s / median iteration time; 1 is perfect",
    "measured": (
        "in this run, once a round: t_ff_s, t_bp_s of the model alone (no optimizer, all workers at"
        " once, the slowest one's median); t_rs_s, t_ag_s of all gradients handed over at once with"
        " nothing else running (until the last worker has its result; as one buffer or in buckets,"
        " whichever median is less); bound_s = max(t_ff, t_ag) + max(t_bp, t_rs);"
        " s_max = P (t_ff + t_bp) / bound_s: DeAR (Zhang et al., 2023), Eq. 6"
    ),
    "speedup": "P (t_ff + t_bp) / median iteration time, P workers against one; S in Table II",
    "bound_measured_s": "measured.bound_s, the same for all rows; null for 'single'",
    "fraction_of_s_max": (
        "speedup / s_max = bound_measured_s / median iteration time. A row that sends less than"
        " every gradient in full may exceed 1; null for 'single', which exchanges nothing"
    ),
    "breakdown": (
        "with --breakdown: 'whole' is the iteration of median length of a few recorded after the"
        " timed ones, mean over workers; *_s are its parts and add up to it. Waiting counts as"
        " reduce_scatter_s while one of the worker's reduce-scatters is under way, else as"
        " all_gather_s (all_reduce_s where gradients travel in all-reduces). 'RS-only' and"
        " 'AG-only' leave the other half of the exchange out, for timing only: DeAR, Fig. 8"
    ),
    "codec": (
        "whether gradients went through the row's codec: 'off' where the trial before the timed"
        " iterations found that it is not faster; null without one"
    ),
    "codec_prices": (
        "where a paced model's codec work is prolonged: what it was found to cost on one core"
        " before the row was timed, by function: fixed_s for each call (of low rank: for each"
        " matrix) and s_per_byte for each byte of float32. A call takes as long as that, with the"
        " bytes of the whole model, in slow motion as many times; a sleep makes up the difference."
        " pack and unpack: chunks in the extension; null where nothing is prolonged"
    ),
    "merge": (
        "the description of the row's plan of merged gradients on rank 0, in the first round that"
        " has one: its kind, the number of buckets and tensors, the predicted seconds of an"
        " iteration and of its parts, the costs they come from, what was measured (measured_s)"
        " and which plans a trial has compared (tried, the chosen first); null where nothing is"
        " planned"
    ),
    "deciding": (
        "what it took until a row that tunes, tries or plans had decided how it trains: iterations,"
        " their seconds by rank 0's clock, and the decision; null for other rows. It is done once,"
        " on a model of its own before the row's first turn. All rounds begin with the decision and"
        " from the same weights as any other row, and no other figure contains any of it. Plans of"
        " merged gradients are kept until times drift. bucket_bytes: of the model as it is scaled"
    ),
    "normal_iteration_s": (
        "with --slow, of the report: what a slow worker sleeps a multiple of, between two"
        " iterations, before its forward and in addition to its work (Ripples, Luo et al., 2019,"
        " section 7.4). It is the computation alone, forward + backward, and not what the row would"
        " take without slow workers: so it is the same for all rows and known before. A paced model"
        " states it; a real one's is measured once, with all workers at once, the slowest one's"
        " median. Without a range, warm-up and deciding are slowed too. Bounds and measured times"
        " know nothing of slow workers. What these cost is part of exposed_s, unless against"
        " the row 'single', which is slowed as well"
    ),
    "time_to_loss": (
        f"with --target-loss: seconds of training until the mean loss of the last {LOSSES}"
        " iterations, mean over workers, is below the target. Warm-up and timed iterations both"
        " count, each worker's by its own clock, until the last worker is there; deciding does not,"
        " nor the pause in which bytes are counted. Each round trains from the start: seconds is"
        " the median over the rounds, null unless the target was reached in all of them"
    ),
    "final_loss": "loss of the last timed iteration, mean over workers",
}
"""The description of each field of a run."""


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
    table = titled(made.title)
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
            f"codecs of workers: a byte of float32 takes {factor:g} times as long as measured "
            f"here, as on the whole model, and the fixed time of a call {stretch:g} times; those "
            "of servers take their own time"
        )
        lines += [
            f"{run.strategy}: {priced(run.codec_prices)}" for run in report.runs if run.codec_prices
        ]
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
    lines += traffic.notes(
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
    return lines + disturbed(report.machine)


def decided(decision: dict[str, Any]) -> str:
    """Describe the decisions of a row.

    >>> decided({"codec": "off", "bucket_bytes": 2_726_297})
    'codec off, buckets of 2.6 MB'
    """
    parts = []
    if "strategy" in decision:
        parts.append(decision["strategy"])
    if "codec" in decision:
        parts.append(f"codec {decision['codec']}")
    if "bucket_bytes" in decision:
        parts.append(f"buckets of {format_mb(decision['bucket_bytes'])} MB")
    if "buckets" in decision:
        of = f" ({' = '.join(decision['rules'])})" if decision.get("rules") else ""
        parts.append(f"layers merged into {decision['buckets']} buckets{of}")
    if "thresholds" in decision:
        parts.append(f"thresholds {format_thresholds(tuple(decision['thresholds']))}")
    return ", ".join(parts)


def priced(prices: Prices) -> str:
    """Describe what the codec work of a row was found to cost, before it was timed.

    >>> priced({"pack": {"fixed_s": 38e-6, "s_per_byte": 0.48e-9}})
    'measured pack 38 us + 0.48 ns/B'
    """
    each = (
        f"{name} {1e6 * price['fixed_s']:.0f} us + {1e9 * price['s_per_byte']:.2g} ns/B"
        for name, price in prices.items()
    )
    return f"measured {', '.join(each)}"


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
