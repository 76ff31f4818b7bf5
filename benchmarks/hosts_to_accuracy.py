"""Seconds to a predefined accuracy on hosts with several processes, against DDP with PowerSGD.

Two cores cannot compute for eight workers at a network's real size, so the seconds are a product of
two measurements on the same lab, and both are shown:

iterations  a real network learns real data on all workers with each row, from the same weights on
            the same batches, once for each seed, until held-out accuracy is at the target. Of the
            seeds the best and the worst are dropped and the mean of the rest counts; one that does
            not reach the target counts as the worst.
seconds     an iteration of a paced model under the same row, with the same options, as of
            `wingbeat bench`: links and computation scaled alike, codecs slowed with them. A row
            that decides how it trains, by pauses for measurements and by iterations of another
            length, has all of these seconds on the clock, in place of equally many iterations:
            those iterations train, in both measurements.

No row has a warm-up of its density, because its iterations differ in length. PowerSGD compresses
from the third iteration on, the earliest that its error feedback allows, in one bucket, as gloo
requires, with each of the stated ranks. The fastest of its rows is the baseline, and the fastest
row of each of our codecs is judged.

Exit code 1 if one of our codecs is not ahead of the fastest PowerSGD, or misses the target.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accuracy
import hooks
import torch
import torch.distributed as dist
from common import at_least_one, run_and_judge, show, write
from time_to_accuracy import LEAST, TARGETS, differing, score

import wingbeat
from wingbeat.errors import LabError, UsageError
from wingbeat_lab import lab
from wingbeat_lab.bench import contenders, estimate, runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.results import Deciding
from wingbeat_lab.bench.table import Printed

EXAMPLES = """examples:
  python benchmarks/hosts_to_accuracy.py --json out/hosts_to_accuracy.json
  python benchmarks/hosts_to_accuracy.py --lab star:4@200mbit --per-host 2 --model paced:vgg16@0.05
  python benchmarks/hosts_to_accuracy.py --rows ddp+powersgd:rank=2 omgs:warmup=0,density=0.01
  python benchmarks/hosts_to_accuracy.py --target 15 --length 60 --evaluations 6 --iterations 2 \\
      --rounds 1 --model paced:resnet50@0.02 --rows ddp+powersgd:rank=1 omgs:warmup=0
"""
BASELINE = "ddp+powersgd"
ROWS = (
    "ddp",
    "ddp+bf16",
    f"{BASELINE}:rank=1",
    f"{BASELINE}:rank=2",
    f"{BASELINE}:rank=4",
    "allreduce:compression=sketch@4:auto_disable=false",
    "dear:plan=fixed,compression=sketch@4:auto_disable=false",
    "allreduce:compression=lowrank@4:auto_disable=false",
    "omgs:warmup=0",
)


def main() -> int:
    options = arguments()
    if options.worker:
        work(options)
        return 0
    return run_and_judge(options.json, functools.partial(measure, options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lab", default="star:2@1gbit", help="hosts and links (star:2@1gbit)")
    add("--per-host", type=at_least_one, default=4, help="processes of a host (4)")
    add("--rows", nargs="+", default=list(ROWS), help="rows as of wingbeat bench")
    add("--task", choices=tuple(TARGETS), default="digits", help="as of accuracy.py (digits)")
    add("--target", type=float, help="percent of held-out data (as of time_to_accuracy.py)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help=f"{LEAST} or more (0 to 4)")
    add("--length", type=at_least_one, help="iterations at most of a training; the task's own")
    add("--evaluations", type=at_least_one, default=40, help="of a whole training (40)")
    add("--model", default="paced:resnet50@0.1", help="whose iterations are timed (%(default)s)")
    add("--iterations", type=at_least_one, default=12, help="timed ones of each row (12)")
    add("--rounds", type=at_least_one, default=3, help="how often rows take turns (3)")
    add("--json", type=Path, default=Path("out/hosts_to_accuracy.json"))
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def kind(row: str) -> str:
    """The codec of a row; without one, its strategy.

    >>> kind("dear:plan=fixed,compression=sketch@4:auto_disable=false"), kind("omgs:warmup=0")
    ('sketch@4', 'omgs')
    """
    _, given, codec = row.partition("compression=")
    return codec.partition(":")[0].partition(",")[0] if given else row.partition(":")[0]


def check(options: argparse.Namespace) -> BenchConfig:
    """Raise UsageError for invalid values; return the bench that times iterations."""
    if len(set(options.seeds)) < LEAST:
        raise UsageError(
            f"--seeds {' '.join(map(str, options.seeds))}: allowed are {LEAST} or more, each once: "
            "the best and the worst are dropped"
        )
    kinds = [kind(row) for row in options.rows]
    if BASELINE not in kinds or not any(judged(each) for each in kinds):
        raise UsageError(
            f"--rows {' '.join(options.rows)}: allowed are lists with {BASELINE} and a row of "
            "wingbeat's"
        )
    task = accuracy.TASKS[options.task]()
    options.length = options.length or task.iterations
    options.target = TARGETS[options.task] if options.target is None else options.target
    made = BenchConfig(
        lab=options.lab,
        model=options.model,
        strategies=tuple(options.rows),
        iterations=options.iterations,
        rounds=min(options.rounds, options.iterations),
        per_host=options.per_host,
        measure=False,
    )
    for row in made.check().rows:
        warm = getattr(contenders.parse(row.text).wire, "warmup", 0)
        if warm:
            raise UsageError(
                f"--rows {row.text}: its density falls over {warm} iterations, which a product "
                "cannot have; add warmup=0"
            )
    return made


def judged(kind_: str) -> bool:
    """Whether rows of this kind must be ahead of the baseline: all but DDP's."""
    return not kind_.startswith("ddp")


def measure(options: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, and return the missed limits."""
    made = check(options)
    report |= {"lab": options.lab, "task": options.task, "target": options.target}
    write(options.json, report)
    print(f"iterations: {len(options.seeds) * len(options.rows)} trainings", file=sys.stderr)
    report["runs"] = trainings(options)
    write(options.json, report)
    long = estimate.about(estimate.of_all([made]))
    print(f"seconds: takes about {long}", file=sys.stderr, flush=True)
    benched = runner.run(made, command=sys.argv).report
    report["bench"] = benched.to_json()
    report["config"] = asdict(made)
    timed = {run.strategy: run for run in benched.runs}
    report["rows"] = summary(report["runs"], timed, options.target)
    report["missed"] = missed(report["rows"])
    show(report, table(options, report))
    write(options.json, report)
    return list(report["missed"])


def trainings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on the lab; return every training's curve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        words = [sys.executable, __file__, "--worker", str(path), "--task", options.task]
        words += ["--target", str(options.target), "--length", str(options.length)]
        words += ["--evaluations", str(options.evaluations), "--rows", *options.rows]
        words += ["--seeds", *map(str, options.seeds)]
        ended = lab.run(options.lab, words, per_host=options.per_host, on_line=hooks.progress)
        if ended.exit_code:
            raise LabError(f"{options.lab}: {ended.first_failure or ended.exit_code}")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def work(options: argparse.Namespace) -> None:
    """All trainings on this rank; rank 0 writes a line each."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    task = accuracy.TASKS[options.task]()
    for seed, text in itertools.product(options.seeds, options.rows):
        made = accuracy.train(
            task,
            contenders.parse(text),
            seed,
            options.length,
            options.evaluations,
            options.target,
        )
        if dist.get_rank() == 0:
            with options.worker.open("a", encoding="utf-8") as file:
                print(json.dumps({"seed": seed, "strategy": text, **made}), file=file)
            end = made["curve"][-1]
            print(f"seed {seed} {text}: {end['accuracy']:.2f}%, {end['iteration']} iterations",
                  flush=True)  # fmt: skip
        dist.barrier()
    wingbeat.shutdown()


def summary(
    runs: list[dict[str, Any]], timed: dict[str, Any], target: float
) -> list[dict[str, Any]]:
    """A row for each strategy: iterations, seconds of one, and their product.

    Args:
        runs: all trainings.
        timed: the bench's figures by row.
        target: percent.
    """
    rows = []
    for name in dict.fromkeys(run["strategy"] for run in runs):
        own = [run for run in runs if run["strategy"] == name]
        ends = [run["curve"][-1] for run in own]
        counts = [end["iteration"] if end["accuracy"] >= target else None for end in ends]
        there = [count for count in counts if count is not None]
        each, deciding = timed[name].iteration_s, timed[name].deciding
        iterations = score(counts)
        rows.append(
            {
                "strategy": name,
                "kind": kind(name),
                "iterations": iterations,
                "counts": counts,
                "accuracy": [end["accuracy"] for end in ends],
                "not_reached": counts.count(None),
                "same_weights": all(run["same_weights"] for run in own),
                "iteration_s": each.median,
                "spread_s": [each.p10, each.p90],
                "deciding_s": deciding.seconds if deciding else 0.0,
                "deciding_iterations": deciding.iterations if deciding else 0,
                "bytes_per_iteration": timed[name].bytes_per_iteration,
                "seconds": None
                if iterations is None
                else total_s(iterations, each.median, deciding),
                "range_s": [
                    total_s(min(there), each.p10, deciding),
                    total_s(max(there), each.p90, deciding),
                ]
                if there
                else None,
            }
        )
    return rows


def total_s(iterations: float, each_s: float, deciding: Deciding | None) -> float:
    """Seconds of so many iterations, the first of which are those in which a row decides.

    All seconds of deciding count, even if the target is reached before its end.
    """
    if deciding is None:
        return iterations * each_s
    return deciding.seconds + max(0.0, iterations - deciding.iterations) * each_s


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The kinds whose fastest row is not ahead of the baseline's, and rows that fell apart."""
    out = differing(rows)
    kinds = dict.fromkeys(row["kind"] for row in rows)
    first = {
        each: min((row for row in rows if row["kind"] == each), key=_seconds) for each in kinds
    }
    for each, row in first.items():
        if judged(each) and _seconds(row) >= _seconds(first[BASELINE]):
            out.append(f"{_said(row)} is not ahead of {_said(first[BASELINE])}")
    return out


def _seconds(row: dict[str, Any]) -> float:
    return math.inf if row["seconds"] is None else float(row["seconds"])


def _said(row: dict[str, Any]) -> str:
    what = "target not reached" if row["seconds"] is None else f"{row['seconds']:.1f} s"
    return f"{row['strategy']} ({what})"


COLUMNS = (
    "strategy",
    "to the target, s",
    "least .. largest, s",
    "iterations",
    "least .. largest of seeds",
    "an iteration, ms",
    "p10 .. p90",
    "deciding, s",
    "deciding, iterations",
    "MB a process",
    "seeds that do not reach it",
    "right in the end, %",
)


def table(options: argparse.Namespace, report: dict[str, Any]) -> Printed:
    """Return the rows for printing; those that miss the target first, then the slowest."""
    cells = []
    for row in sorted(report["rows"], key=lambda row: -_seconds(row)):
        there = [count for count in row["counts"] if count is not None]
        cells.append(
            (
                row["strategy"],
                "" if row["seconds"] is None else f"{row['seconds']:.1f}",
                "{:.1f} .. {:.1f}".format(*row["range_s"]) if there else "",
                "" if row["iterations"] is None else f"{row['iterations']:.0f}",
                f"{min(there)} .. {max(there)}" if there else "",
                f"{1e3 * row['iteration_s']:.0f}",
                "{:.0f} .. {:.0f}".format(*(1e3 * s for s in row["spread_s"])),
                f"{row['deciding_s']:.1f}",
                str(row["deciding_iterations"]),
                f"{row['bytes_per_iteration'] / 1e6:.3f}",
                str(row["not_reached"]),
                f"{min(row['accuracy']):.2f} .. {max(row['accuracy']):.2f}",
            )
        )
    title = (
        f"{options.task} to {options.target:g}%, iterations of {options.model}, on {options.lab} "
        f"with {options.per_host} processes a host, {len(options.seeds)} seeds"
    )
    notes = [
        "to the target: iterations of a real training times the seconds of a paced iteration; "
        "the first ones take the seconds of deciding, pauses included; two measurements, which no "
        "single run has made",
        "iterations: mean of the seeds without the best and the worst; one that does not reach the "
        "target counts as the worst",
    ]
    limited = [str(run["strategy"]) for run in report["bench"]["runs"] if run["limited_by_cores"]]
    notes += [f"limited by this machine's cores: {', '.join(limited)}"] if limited else []
    median = statistics.median(len(run["curve"]) for run in report["runs"])
    notes.append(f"evaluated {median:g} times, median of trainings")
    return Printed.of(title, COLUMNS, cells, [*(f"MISSED: {m}" for m in report["missed"]), *notes])


if __name__ == "__main__":
    sys.exit(main())
