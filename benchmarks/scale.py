"""Processor time of the simulator: one prediction, and groups of many replicas.

    python benchmarks/scale.py --json out/scale.json
    python benchmarks/scale.py --replicas 100 1000 10000 --iterations 100

- prediction: `DeAR(plan="fixed")` on bert_large with 64 workers on 10GbE, the shortest of
  ``--repeats``, each with programs that are compiled anew;
- groups: smart groups (Ripples) of VGG-16 for CIFAR-10 on 10GbE, each replica on a host of its own,
  with the group generator's own state machine. ``iteration`` is in virtual time. Messages to and
  from the generator take its time one after the other, so from some number of replicas on the
  iteration grows with it.

Exit code 1 if a prediction takes 0.5 s of CPU time or more, or 10,000 replicas take 60 s or more
for 100 iterations.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import groups
from common import at_least_one, at_least_two, run_and_judge, show, write

from wingbeat import DeAR, simulator
from wingbeat.collectives.program import compile_collective
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.types import Layout
from wingbeat_lab import paced
from wingbeat_lab.bench.simulated import GOODPUT
from wingbeat_lab.bench.table import Printed

LINKS = simulator.Links(bytes_per_s=10e9 / 8 * GOODPUT)
PREDICTION_S = 0.5
GROUPS_S = 60.0
MANY = 10_000
ITERATIONS = 100
COMPUTE_S = 0.06


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bert_large", help="of the prediction (bert_large)")
    parser.add_argument("--workers", type=at_least_two, default=64, help="of the prediction (64)")
    parser.add_argument("--repeats", type=at_least_one, default=5, help="of the prediction (5)")
    parser.add_argument("--replicas", nargs="+", type=at_least_two, default=[100, 1000, MANY])
    parser.add_argument("--iterations", type=at_least_one, default=ITERATIONS, help="of groups")
    parser.add_argument("--json", type=Path, default=Path("out/scale.json"), metavar="FILE")
    args = parser.parse_args()
    return run_and_judge(args.json, functools.partial(measure, args))


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report; return the missed limits."""
    missed = []
    seconds = [predicted(args.model, args.workers) for _ in range(args.repeats)]
    report["prediction"] = {"model": args.model, "workers": args.workers, "cpu_s": seconds}
    write(args.json, report)
    usual = args.model == "bert_large" and args.workers == 64
    if usual and min(seconds) >= PREDICTION_S:
        missed.append(f"prediction: {min(seconds):.2f} s, wanted less than {PREDICTION_S} s")
    report["groups"] = []
    for replicas in args.replicas:
        row = averaged(replicas, args.iterations)
        report["groups"].append(row)
        write(args.json, report)
        if (replicas, args.iterations) == (MANY, ITERATIONS) and row["cpu_s"] >= GROUPS_S:
            missed.append(f"{replicas} replicas: {row['cpu_s']:.0f} s, wanted less than 60 s")
    show(report, table(report))
    write(args.json, report)
    return missed


def predicted(model: str, workers: int) -> float:
    """Return the CPU seconds of one prediction."""
    made = paced.simulator_model(paced.load_profile(model))
    compile_collective.cache_clear()
    begun = time.process_time()
    simulator.simulate(made, DeAR(plan="fixed"), workers, LINKS)
    return time.process_time() - begun


def averaged(replicas: int, iterations: int) -> dict[str, Any]:
    """Simulate smart groups of so many replicas."""
    layout, begun = Layout.even(replicas, 1), time.process_time()
    run = simulator.simulate_groups(
        groups.vgg16(COMPUTE_S), Rules(), layout, LINKS, iterations=iterations
    )
    return {
        "replicas": replicas,
        "iterations": iterations,
        "cpu_s": time.process_time() - begun,
        "iteration_s": run.iteration_s,
        "waited": run.waited,
    }


COLUMNS = ("what", "CPU, s", "iteration, ms", "waited")


def table(report: dict[str, Any]) -> Printed:
    """Return the processor times for printing."""
    one = report["prediction"]
    cells = [
        (f"DeAR on {one['model']}, {one['workers']} workers", f"{min(one['cpu_s']):.2f}", "", "")
    ]
    cells += [
        (
            f"smart groups, {row['replicas']:,} replicas, {row['iterations']} iterations",
            f"{row['cpu_s']:.1f}",
            f"{1e3 * row['iteration_s']:.1f}",
            f"{row['waited']:.0%}",
        )
        for row in report["groups"]
    ]
    return Printed.of("processor time of the simulator", COLUMNS, cells)


if __name__ == "__main__":
    sys.exit(main())
