"""What ``wingbeat demo`` measures and shows: real training, and the speed of a larger network.

A network for 8 x 8 images is too small for its gradients to fill a link. A paced ResNet-50
therefore shows the strategies' speed; the digits show their *correctness*.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from wingbeat_lab.bench import estimate
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.machine import disturbed
from wingbeat_lab.bench.results import Report
from wingbeat_lab.bench.table import MISSING, Printed, megabytes, milliseconds
from wingbeat_lab.lab.spec import LabSpec

ROWS = ("ddp", "allreduce", "dear")
"""The compared rows; the first is the reference."""

PACED_ROWS = (*ROWS[:-1], f"{ROWS[-1]}:plan=fixed")
"""Those of the paced model: to tune buckets would take longer than the rest of the demo."""

SCALE = 0.25
"""Of the paced ResNet-50: its links are scaled as well, and equal 1 Gbit/s."""

EPOCH = 11
"""Iterations of four workers that cover all training images."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The demo's two benches, and why links are unshaped (None if they are shaped)."""

    digits: BenchConfig
    paced: BenchConfig
    unshaped: str | None


def plan(unshaped: str | None, *, quick: bool = False) -> Plan:
    """Plan the benches; ``unshaped`` is from ``lab.available()``, ``quick`` is a smoke test."""
    on = "loopback:4" if unshaped else "star:4@1gbit"
    before_scaling = "loopback:4" if unshaped else "star:4@4gbit"
    digits = BenchConfig(
        lab=on,
        model="digits",
        strategies=ROWS,
        iterations=(2 if quick else 14) * EPOCH,
        rounds=1,  # accuracy needs one complete training for each row
        measure=False,
    )
    paced = BenchConfig(
        lab=before_scaling,
        model=f"paced:resnet50@{SCALE}",
        strategies=PACED_ROWS,
        iterations=2 if quick else 24,
        rounds=1 if quick else 3,
        warmup=2,
        trace=True,
        measure=False,
    )
    return Plan(digits, paced, unshaped)


def about(demo: Plan) -> list[str]:
    """Describe the run in advance, as lines of text."""
    if demo.unshaped:
        where = [
            "Four workers on this machine's loopback. LINKS ARE UNSHAPED: they are as fast as",
            "memory, so the times below do not describe a network. For emulated hosts and links:",
            f"  {demo.unshaped}",
        ]
    else:
        where = ["Four emulated hosts on this machine, joined by 1 Gbit/s links."]
    return [
        *where,
        "1. digits: a small network learns scikit-learn's handwritten digits, for real.",
        f"2. resnet50: ResNet-50's layers at {SCALE:g} of their size and an RTX 2080 Ti's pace",
        "   (emulated: it does not learn), whose gradients keep the links busy. It has the ratio",
        "   of communication to computation of the whole ResNet-50 on 4 Gbit/s links.",
        f"Both take about {estimate.about(estimate.of_all([demo.digits, demo.paced]))}.",
    ]


_COLUMNS = (
    "model",
    "strategy",
    "ms per iteration",
    "ratio to DDP",
    "MB sent",
    "accuracy",
)


def printed(digits: Report, paced: Report) -> Printed:
    """Return both benches in one table, for the documentation."""
    rows = [
        (
            label,
            run.strategy,
            milliseconds(run.iteration_s.median),
            f"{run.ratio:.2f}",
            megabytes(run.bytes_per_iteration),
            MISSING if run.accuracy is None else f"{run.accuracy:.1%}",
        )
        for label, report in (("digits (real)", digits), ("resnet50 (paced)", paced))
        for run in report.runs
    ]
    notes = [
        "ratio below 1: faster than DDP",
        "MB sent: by one worker in an iteration, by the kernel's counters",
        "accuracy: on test images",
        "real: trains on data; paced: real bytes, emulated computation, cannot learn",
    ]
    notes += disturbed(digits.machine, paced.machine)
    return Printed.of("Measured in this run", _COLUMNS, rows, notes)


def render(made: Printed) -> Table:
    """Return the table for a terminal."""
    table = Table(title=made.title, title_justify="left", title_style="bold")
    for name in made.columns:
        left = name in ("model", "strategy")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for model, rows in itertools.groupby(made.rows, key=operator.itemgetter(0)):
        for number, row in enumerate(rows):
            table.add_row("" if number else model, *row[1:])
        table.add_section()
    table.caption = "\n".join(made.notes)
    return table


def to_json(demo: Plan, digits: Report, paced: Report) -> dict[str, Any]:
    """Return the demo's results as plain values."""
    return {
        "links": "unshaped" if demo.unshaped else "shaped",
        "unshaped_because": demo.unshaped,
        "stands_for": str(LabSpec.parse(demo.paced.lab)),
        "benches": [digits.to_json(), paced.to_json()],
        "tables": [printed(digits, paced).to_json()],
    }
