"""Geryon on its four models, beside its baselines: the paper's Tables II, III and IV.

    python benchmarks/geryon.py --json out/geryon.json
    python benchmarks/geryon.py --rates 10 --models vgg19 resnet50 --iterations 6
    python benchmarks/geryon.py --slices 1048576 524288 262144      (Table IV: beside TICTAC and P3)

Each model is one ``wingbeat bench``: the rows take turns on one lab, whose switches have two
strict-priority classes. Times are paced (a K40's); bytes, servers, queues and links are real. Eight
workers with a server beside each, as in the paper. Its networks are 10 and 40 GbE; the model's
scale shrinks bytes and rates together, and the stretch slows computation and links down together,
until two cores can do the traffic of eight hosts. What a message costs at least is the two cores',
and neither shrinks nor stretches.

``efficiency`` is the time of computation alone over that of an iteration. ``bound`` is the best
that any order could reach. Rows do not encrypt, as the paper does not. Exit code 1 if a limit is
missed: Geryon's efficiency below the paper's or below 0.95 of the bound, or Geryon slower than
partition and slicing with pulls at the same time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import GERYON_TABLES as PAPER
from common import end_as_by_ctrl_c, write

from wingbeat.bench import estimate, machine, runner
from wingbeat.bench.config import BenchConfig
from wingbeat.bench.results import Report
from wingbeat.cli.bench import check_writable
from wingbeat.errors import UsageError, WingbeatError

MODELS = ("alexnet", "vgg19", "resnet50", "yolo")
VANILLA, SLICED, GERYON = "vanillaps", "partitionedps:pull=start", "geryon:pull=start"
ROWS = (VANILLA, SLICED, GERYON, "geryon", "allreduce", "dear:plan=fixed")
OF_BOUND = 0.95
STRETCH = {10.0: 4.0, 40.0: 8.0}


def main() -> int:
    """Measure what was asked for, print a table and judge it."""
    args = arguments()
    end_as_by_ctrl_c()
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    report["command"], report["rates"] = sys.argv, {}
    missed: list[str] = []
    try:
        check_writable(args.json)
        planned = {
            (rate, model): config(rate, model, args) for rate in args.rates for model in args.models
        }
        for each in planned.values():
            each.check()
        long = estimate.of_all(planned.values())
        print(f"takes about {estimate.about(long)}", file=sys.stderr, flush=True)
        for number, ((rate, model), made) in enumerate(planned.items(), start=1):
            print(f"{number}/{len(planned)}: {model}, {rate:g} Gbit/s", file=sys.stderr, flush=True)
            found = figures(made, runner.run(made, command=sys.argv).report)
            report["rates"].setdefault(f"{rate:g}", {})[model] = found
            write(args.json, report)
            show(rate, model, found)
            missed += judged(rate, model, found)
    except WingbeatError as err:
        print(f"geryon.py: {err}", file=sys.stderr)
        return 2 if isinstance(err, UsageError) else 1
    for line in missed:
        print(f"MISSED: {line}")
    return int(bool(missed))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rates", nargs="+", type=float, default=[10.0], metavar="GBIT")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="as for wingbeat bench")
    parser.add_argument(
        "--slices",
        nargs="+",
        type=int,
        metavar="ELEMENTS",
        help="rows of geryon, tictac and p3 with these slices instead",
    )
    parser.add_argument("--iterations", type=int, default=6, help="timed ones of each row")
    parser.add_argument("--rounds", type=int, default=2, help="how often the rows take turns")
    parser.add_argument("--warmup", type=int, default=2, help="untimed iterations of each turn")
    parser.add_argument("--workers", type=int, default=8, help="hosts of the lab (default: 8)")
    parser.add_argument("--scale", type=float, default=0.05, help="of the models")
    parser.add_argument("--stretch", type=float, help="slow motion (default: 4 at 10 Gbit/s, or 8)")
    parser.add_argument("--json", type=Path, default=Path("out/geryon.json"))
    return parser.parse_args()


def config(rate: float, model: str, args: argparse.Namespace) -> BenchConfig:
    """Return the bench of one model at one rate.

    Raises:
        UsageError: a value that cannot work.
    """
    rows = list(args.rows)
    if args.slices:
        # A slice shrinks with the model, so that there are as many.
        small = [max(1, round(args.scale * each)) for each in args.slices]
        rows = [
            f"{row},slice={n}" for n in small for row in (GERYON, "tictac:pull=start", "p3:mb=1")
        ]
    return BenchConfig(
        lab=f"star:{args.workers}@{rate:g}gbit,prio=2",
        model=f"paced:{model}_k40@{args.scale:g}",
        strategies=tuple(map(in_the_clear, rows)),
        iterations=args.iterations,
        rounds=min(args.rounds, args.iterations),
        warmup=args.warmup,
        stretch=args.stretch or STRETCH.get(rate, 8.0),
    )


def in_the_clear(row: str) -> str:
    """Switch encryption off in a row with servers.

    >>> in_the_clear("geryon:pull=start"), in_the_clear("p3"), in_the_clear("dear:mb=5")
    ('geryon:pull=start,encrypted=False', 'p3:encrypted=False', 'dear:mb=5')
    """
    name, _, options = row.partition(":")
    served = name in ("parameterserver", "geryon", "vanillaps", "partitionedps", "tictac", "p3")
    if not served or "encrypted" in options:
        return row
    return f"{name}:{options},encrypted=False" if options else f"{name}:encrypted=False"


def figures(made: BenchConfig, report: Report) -> dict[str, Any]:
    """What one bench says, in the paper's terms."""
    assert report.measured is not None
    compute = report.measured.t_ff_s + report.measured.t_bp_s
    rows = {
        run.strategy.replace(",encrypted=False", "").replace(":encrypted=False", ""): {
            "efficiency": compute / run.iteration_s.median,
            "of_bound": None if run.bound_s is None else run.bound_s / run.iteration_s.median,
            "bound": None if run.bound_s is None else compute / run.bound_s,
            "iteration_s": asdict(run.iteration_s),
            "exposed_s": run.exposed_s,
        }
        for run in report.runs
    }
    return {"rows": rows, "measured": asdict(report.measured), "config": asdict(made)}


def judged(rate: float, model: str, found: dict[str, Any]) -> list[str]:
    """Return which limits are missed."""
    rows, missed = found["rows"], []
    best = rows.get(GERYON)
    if best is None:
        return []
    where = f"{model} at {rate:g} Gbit/s"
    paper = PAPER.get(rate, {}).get(model)
    if paper and best["efficiency"] < paper[2]:
        missed.append(f"{where}: efficiency {best['efficiency']:.3f}; the paper's is {paper[2]}")
    if best["of_bound"] is not None and best["of_bound"] < OF_BOUND:
        missed.append(f"{where}: {best['of_bound']:.3f} of the bound; limit {OF_BOUND}")
    sliced = rows.get(SLICED)
    if sliced and best["efficiency"] < sliced["efficiency"]:
        missed.append(f"{where}: slower than partition and slicing")
    return missed


def show(rate: float, model: str, found: dict[str, Any]) -> None:
    """Print one model's rows, beside the paper's."""
    paper = dict(zip((VANILLA, SLICED, GERYON), PAPER.get(rate, {}).get(model, ()), strict=False))
    print(f"\n{model}, {rate:g} Gbit/s")
    print(f"{'row':42} {'efficiency':>10} {'paper':>6} {'of bound':>9}")
    for row, made in found["rows"].items():
        of_bound = "" if made["of_bound"] is None else f"{made['of_bound']:9.3f}"
        theirs = f"{paper[row]:6.3f}" if row in paper else " " * 6
        print(f"{row:42} {made['efficiency']:10.3f} {theirs} {of_bound:>9}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
