"""The CPU cost of exchanging gradients: CPU seconds of all threads, by strategy and links.

    python benchmarks/cpu.py --json out/cpu.json
    python benchmarks/cpu.py --labs loopback:2 --rows ddp allreduce
    python benchmarks/cpu.py --labs star:4@10gbit star:4x2@10gbit --model paced:vgg16@0.1

Each lab is one ``wingbeat bench`` of a paced model, whose computation sleeps. A row's CPU time is
that of its worker processes, all their threads, by the kernel's accounting, less that of the row
``single``, which computes and updates alike and exchanges nothing. What ranks of a host exchange in
shared memory is not sent. Unlike in other benches links
have the rate that a lab names, whatever the model's scale. The table has CPU milliseconds of an
iteration's exchange, CPU seconds for each gigabyte of gradients, and for each that a worker sends.

Rule: on each lab strategies that exchange the gradients themselves take at most the CPU time that
DDP takes, the sketch at most 1.2 times that (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat.errors import UsageError
from wingbeat_lab.bench import config, contenders, estimate, runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.results import Run
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab.spec import LabSpec

LABS = ("loopback:2", "star:2@1gbit", "star:2@4gbit", "star:2@10gbit", "star:2x2@4gbit")
ROWS = (
    "single",
    "ddp",
    "ddp+bf16",
    "allreduce",
    "dear:plan=fixed",
    "dear:plan=fixed,compression=bf16",
    "allreduce:compression=sketch:auto_disable=false",
    "dear:plan=fixed,compression=sketch:auto_disable=false",
    "allreduce:compression=topk@0.01:auto_disable=false",
    "allreduce:compression=lowrank@4:auto_disable=false",
)
DENSE, SKETCH = 1.0, 1.2
"""Limit of a row's CPU time, as a multiple of DDP's."""


def as_named(lab: str, model: str) -> str:
    """The lab to request from a bench, which scales links with its model, to get ``lab``."""
    scale = float(model.partition("@")[2] or 1)
    return str(config.scaled(LabSpec.parse(lab), 1 / scale))


def configs(args: argparse.Namespace) -> dict[str, BenchConfig]:
    """One bench for each lab, checked."""
    if "single" not in args.rows or "ddp" not in args.rows:
        raise UsageError(
            f"--rows {' '.join(args.rows)}: single and ddp are what others are held to"
        )
    out = {}
    for lab in args.labs:
        out[lab] = BenchConfig(
            lab=as_named(lab, args.model),
            model=args.model,
            strategies=tuple(args.rows),
            iterations=args.iterations,
            rounds=args.rounds,
            warmup=4,
            measure=False,
        )
        out[lab].check()
    return out


def figures(run: Run, single: Run, gradients: float) -> dict[str, Any]:
    """One row: means over workers, minus the row ``single``."""
    took, alone = (_seconds(each) for each in (run, single))
    sent = run.bytes_per_iteration / 1e9
    return {
        "cpu_s": took - alone,
        "cpu_s_per_gb_of_gradients": (took - alone) / gradients,
        "cpu_s_per_gb_sent": (took - alone) / sent if sent > gradients / 100 else None,
        "gb_sent": sent,
        "iteration_s": dataclasses.asdict(run.iteration_s),
        "ddp": contenders.parse(run.strategy).ddp,
        "wire": str(contenders.parse(run.strategy).wire),
    }


def _seconds(run: Run) -> float:
    """CPU seconds of a worker in an iteration, mean over workers."""
    return statistics.fmean(run.cpu_s_per_iteration["worker"])


def missed(lab: str, rows: dict[str, Any]) -> list[str]:
    """A line for each row above its limit."""
    out = []
    for text, row in rows.items():
        wire = row["wire"]
        limit = SKETCH if "sketch" in wire.lower() else DENSE
        if row["ddp"] or text == "single" or not (limit == SKETCH or wire == ""):
            continue
        share = row["cpu_s"] / rows["ddp"]["cpu_s"]
        if share > limit:
            out.append(f"{lab}: {text} takes {share:.2f} of DDP's CPU time; limit {limit:g}")
    return out


COLUMNS = (
    "strategy",
    "CPU ms",
    "of DDP's",
    "CPU s a GB of gradients",
    "CPU s a GB sent",
    "iteration, ms",
)


def table(lab: str, rows: dict[str, Any]) -> Printed:
    """Return a lab's table for printing."""
    cells = []
    for text, row in rows.items():
        sent = row["cpu_s_per_gb_sent"]
        cells.append(
            (
                text,
                f"{row['cpu_s'] * 1e3:.1f}",
                f"{row['cpu_s'] / rows['ddp']['cpu_s']:.2f}",
                f"{row['cpu_s_per_gb_of_gradients']:.2f}",
                "" if sent is None else f"{sent:.2f}",
                f"{row['iteration_s']['median'] * 1e3:.0f}",
            )
        )
    notes = ["CPU time of one worker in one iteration, with all of its threads"]
    return Printed.of(f"CPU time on {lab}", COLUMNS, cells, notes)


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, lab by lab; return the missed limits."""
    benches, labs, out = configs(args), report.setdefault("labs", {}), []
    print(f"about {estimate.about(estimate.of_all(benches.values()))}", file=sys.stderr, flush=True)
    for lab, bench in benches.items():
        runs = {r.strategy: r for r in runner.run(bench, command=sys.argv).report.runs}
        gradients = estimate.gradient_bytes(bench.check()) / 1e9
        labs[lab] = {text: figures(r, runs["single"], gradients) for text, r in runs.items()}
        show(report, table(lab, labs[lab]))
        write(args.json, report)
        out += missed(lab, labs[lab])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--labs", nargs="+", default=list(LABS), metavar="LAB")
    parser.add_argument("--model", default="paced:resnet50@0.4", help="(paced:resnet50@0.4, 41 MB)")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="single and ddp among them")
    parser.add_argument("--iterations", type=int, default=12, help="timed ones of each row (12)")
    parser.add_argument("--rounds", type=int, default=3, help="how often rows take turns (3)")
    parser.add_argument("--json", type=Path, default=Path("out/cpu.json"))
    args = parser.parse_args()
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
