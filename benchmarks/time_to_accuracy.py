"""Seconds of training to a predefined accuracy, end to end, in one run.

    python benchmarks/time_to_accuracy.py --json out/time_to_accuracy.json
    python benchmarks/time_to_accuracy.py --lab star:4@20mbit --strategies ddp ddp+bf16 omgs
    python benchmarks/time_to_accuracy.py --task text --seeds 0 1 2 3 4

Each row trains a real network on real data over the links of a lab; the clock starts before
`distribute`. The time includes all tuning of a row (links are measured, sizes tuned, codecs tried),
densities that still fall, and the synchronization before an evaluation (deferred work, the mean of
all models). It excludes the evaluations themselves, and what a process does once (a few iterations
of the first row, before the clock). Nothing is paced, scaled or in slow motion: links are as slow
as the network is small.

The scoring is MLPerf Training's. Rows take turns; each trains once for each seed, from the same
weights on the same batches, until held-out accuracy is at the target, or to the end. Of a row's
seconds the best and the worst are dropped, and the mean of the rest is its score; a training that
ends below the target counts as the worst, and the table has the number of these. Targets are in
this file (`TARGETS`), below DDP's final accuracy, and were chosen before a row was run.

Exit code 1 if a form of DDP reaches the target before the first of wingbeat's strategies.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accuracy
import hooks
import torch
import torch.distributed as dist
from common import run_and_judge, show, write

import wingbeat
from wingbeat.errors import LabError, UsageError
from wingbeat_lab import lab
from wingbeat_lab.bench import contenders
from wingbeat_lab.bench.table import Printed

TARGETS = {"digits": 97.0, "text": 56.0}
"""Percent of held-out data, of 2026-11-25."""
ROWS = (
    "ddp",
    "ddp+fp16",
    "ddp+bf16",
    "ddp+powersgd:rank=1",
    "ddp+powersgd:rank=4",
    "allreduce",
    "dear",
    "dear:plan=fixed,compression=sketch@4",
    "allreduce:compression=lowrank@4",
    "omgs",
    "localsgd:every=10",
    "diloco:every=30,compression=sketch@4",
)
LEAST = 3
"""Number of seeds: the best and the worst are dropped."""
FEW = 5
"""Iterations before the first clock."""


def score(seconds: Sequence[float | None]) -> float | None:
    """The mean without the best and the worst; None counts as the worst, and as many as remain.

    >>> score([3.0, 1.0, 2.0]), score([3.0, None, 2.0]), score([None, 1.0, None])
    (2.0, 3.0, None)
    """
    inner = sorted(math.inf if each is None else each for each in seconds)[1:-1]
    mean = statistics.fmean(inner)
    return mean if math.isfinite(mean) else None


def summary(runs: Sequence[dict[str, Any]], target: float) -> list[dict[str, Any]]:
    """A row for each strategy, in order, from all trainings."""
    rows = []
    for name in dict.fromkeys(run["strategy"] for run in runs):
        own = [run for run in runs if run["strategy"] == name]
        ends = [run["curve"][-1] for run in own]
        seconds = [end["s"] if end["accuracy"] >= target else None for end in ends]
        rows.append(
            {
                "strategy": name,
                "ddp": contenders.parse(name).ddp,
                "score_s": score(seconds),
                "seconds": seconds,
                "iterations": [end["iteration"] for end in ends],
                "accuracy": [end["accuracy"] for end in ends],
                "not_reached": seconds.count(None),
                "same_weights": all(run["same_weights"] for run in own),
            }
        )
    return rows


def differing(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Name the rows whose workers end with different weights."""
    return [
        f"{row['strategy']} leaves the workers with different weights"
        for row in rows
        if not row["same_weights"]
    ]


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Whether a form of DDP is first, and the rows whose workers end with different weights."""
    out = differing(rows)
    first = {}
    for ddp in (True, False):
        there = [row for row in rows if row["ddp"] == ddp and row["score_s"] is not None]
        first[ddp] = min(there, key=lambda row: row["score_s"], default=None)
    theirs, ours = first[True], first[False]
    if theirs and (ours is None or ours["score_s"] >= theirs["score_s"]):
        said = "nothing of wingbeat's is" if ours is None else _said(ours)
        out.append(f"{_said(theirs)} is there first; {said}")
    return out


def _said(row: dict[str, Any]) -> str:
    return f"{row['strategy']} ({row['score_s']:.1f} s)"


COLUMNS = (
    "strategy",
    "to the target, s",
    "least .. largest of seeds, s",
    "seeds that do not reach it",
    "iterations, median",
    "right in the end, %",
)


def table(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Printed:
    """Return the rows for printing; those that miss the target first, then the slowest."""
    cells = []
    for row in sorted(rows, key=lambda row: -(row["score_s"] or math.inf)):
        there = [each for each in row["seconds"] if each is not None]
        ends = row["accuracy"]
        cells.append(
            (
                row["strategy"],
                "" if row["score_s"] is None else f"{row['score_s']:.1f}",
                f"{min(there):.1f} .. {max(there):.1f}" if there else "",
                str(row["not_reached"]),
                f"{statistics.median(row['iterations']):g}",
                f"{min(ends):.2f} .. {max(ends):.2f}",
            )
        )
    title = (
        f"{options.task} to {options.target:g}%, on {options.lab}, real pace, "
        f"{len(options.seeds)} seeds"
    )
    notes = ["to the target: mean of the seeds without the best and the worst; one that does not "
             "reach it counts as the worst"]  # fmt: skip
    return Printed.of(title, COLUMNS, cells, [*missed(rows), *notes])


def worker(options: argparse.Namespace) -> None:
    """All trainings on this rank, rows taking turns within a seed; rank 0 writes a line each."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    task = accuracy.TASKS[options.task]()
    iterations = options.iterations or task.iterations
    accuracy.train(task, contenders.parse(options.strategies[0]), 0, FEW, 1)
    for seed, text in itertools.product(options.seeds, options.strategies):
        made = accuracy.train(
            task, contenders.parse(text), seed, iterations, options.evaluations, options.target
        )
        if dist.get_rank() == 0:
            with options.worker.open("a", encoding="utf-8") as file:
                print(json.dumps({"seed": seed, "strategy": text, **made}), file=file)
            end = made["curve"][-1]
            print(f"seed {seed} {text}: {end['accuracy']:.2f}% in {end['s']:.1f} s", flush=True)
        dist.barrier()
    wingbeat.shutdown()


def trainings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on the lab; return every training's curve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        words = [sys.executable, __file__, *sys.argv[1:], "--worker", str(path)]
        words += ["--target", str(options.target)]
        ended = lab.run(lab.LabSpec.parse(options.lab), words, on_line=hooks.progress)
        if ended.exit_code:
            raise LabError(f"{options.lab}: {ended.first_failure or ended.exit_code}")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measure(options: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, and return the missed limits."""
    check(options)
    report |= {"lab": options.lab, "task": options.task, "target": options.target}
    write(options.json, report)
    report["runs"] = trainings(options)
    report["rows"] = summary(report["runs"], options.target)
    show(report, table(options, report["rows"]))
    write(options.json, report)
    return missed(report["rows"])


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for invalid values, before anything starts."""
    if len(set(options.seeds)) < LEAST:
        raise UsageError(
            f"--seeds {' '.join(map(str, options.seeds))}: allowed are {LEAST} or more, each once: "
            "the best and the worst are dropped"
        )
    lab.LabSpec.parse(options.lab)
    for text in options.strategies:
        contenders.parse(text)
    if options.target is None:
        options.target = TARGETS[options.task]
    accuracy.check_numbers(argparse.Namespace(**{**vars(options), "tasks": [options.task]}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--strategies", nargs="+", default=list(ROWS), help="rows as of wingbeat bench")
    add("--task", choices=tuple(TARGETS), default="digits", help="as of accuracy.py (digits)")
    add("--lab", default="star:4@100mbit", help="(star:4@100mbit)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help=f"{LEAST} or more (0 1 2)")
    add("--target", type=float, help="percent of held-out data (what stands in this file)")
    add("--iterations", type=int, help="of a training that does not get there; the task's own")
    add("--evaluations", type=int, default=40, help="of a whole training (40)")
    add("--json", type=Path, default=Path("out/time_to_accuracy.json"))
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Train and time each row, print a table and judge it."""
    options = arguments()
    if options.worker:
        worker(options)
        return 0
    return run_and_judge(options.json, functools.partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
