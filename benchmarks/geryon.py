"""Geryon on its four models, beside its baselines: the paper's Tables II to IV, Figs. 7 to 9.

    python benchmarks/geryon.py --json out/geryon.json                  (Table II)
    python benchmarks/geryon.py --rates 40                              (Table III)
    python benchmarks/geryon.py --workers 2 4 8 --models vgg19          (Figs. 8 and 9)
    python benchmarks/geryon.py --compare senders --models vgg19        (Table IV)
    python benchmarks/geryon.py --compare slicing --models vgg19        (Fig. 7: two workers)
    python benchmarks/geryon.py --compare thresholds --models yolo      (four workers)
    python benchmarks/geryon.py --rates 10 --models resnet50 --iterations 6 --rows ddp geryon

Each model is one ``wingbeat bench``: the rows take turns on one lab, whose switches have two
strict-priority classes. Times are paced (a K40's); bytes, servers, queues and links are real. Eight
workers with a server beside each, as in the paper. Its networks are 10 and 40 GbE; the model's
scale shrinks bytes and rates together, and slices and buckets with them; the stretch slows
computation and links down together, until two cores can do the traffic of eight hosts. It is the
same for all four models. What a message costs at least is the two cores', and neither shrinks nor
stretches, so figures of different stretches are not to be compared. Two timed iterations have no
spread: three are the least.

``efficiency`` is the time of computation alone over that of an iteration, ``+-`` half the distance
between the tenth and the ninetieth percentile of its iterations; images/s are those of all
workers without the slow motion. ``bound`` is the best that any order could reach. ``ef`` and ``be``
are the share of what a host sends in the urgent class and in the other, by the kernel's counters;
``simulated`` is how far off virtual time is, with the same plan, schedule, partition and queues.
Rows do not encrypt, as the paper does not. The paper's partition and slicing is TensorFlow's, which
pulls in random order when an iteration starts (sections II-B and V-A):
``partitionedps:pull=start,order=random``; ours without ``order`` pulls in the order of forward.
``geryon`` sends sums back as soon as they are complete, ``geryon:pull=start`` is the paper's.

Exit code 1 if a limit is missed. Tables II and III: the efficiency of ``geryon`` below the paper's
or below 0.95 of the bound, or ``geryon`` slower than the paper's partition and slicing, or less
than 1.05 times as fast on resnet50 at 10 Gbit/s, or more than 10% off in virtual time. Table IV:
Geryon behind TICTAC or P3, or a lead that does not grow as slices shrink. Thresholds: the tuned
one, whose tuning takes 110 iterations or more before any row is timed, is more than 2% slower than
the best of the others.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import GERYON_TABLES as PAPER
from common import run_and_judge, write

from wingbeat.bench import estimate, runner, simulated
from wingbeat.bench.config import BenchConfig
from wingbeat.bench.results import Report
from wingbeat.errors import UsageError

MODELS = ("alexnet", "vgg19", "resnet50", "yolo")
IMAGES = {"alexnet": 512, "vgg19": 64, "resnet50": 64, "yolo": 64}
"""Images that a worker computes in an iteration (section V-A)."""

VANILLA, SLICED, GERYON = "vanillaps", "partitionedps:pull=start,order=random", "geryon"
PULLED = "geryon:pull=start,threshold"
ROWS = (
    VANILLA,
    SLICED,
    "partitionedps:pull=start",
    "geryon:pull=start",
    "partitionedps",
    GERYON,
    "allreduce",
    "dear:plan=fixed",
)
SENDERS = (("geryon:pull=start", "tictac"), ("geryon", "p3"))
"""Geryon and who it is compared with, which pulls at the same time: Table IV, and P3."""
SLICES = (1 << 20, 1 << 19, 1 << 18)
"""Elements, Table IV's."""
SLICING = (VANILLA, f"{SLICED},slice=0")
"""Fig. 7: nothing, partition; and slicing by several thresholds."""
THRESHOLDS = tuple(1 << power for power in (22, 21, 20, 19, 18, 16))
SWEPT = (0.97, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5, 0.3)
TUNED, OF_SWEEP = f"{PULLED}=tuned", 1.02
OF_BOUND = 0.95
OFF_SIMULATED = 0.1
LEAD = {("resnet50", 10.0): 1.05}
"""How much faster than partition and slicing Geryon has to be, by model and rate, where that is not
just no slower. At 40 Gbit/s the paper's own is 1.02 times as fast on ResNet-50."""
WORKERS = {"systems": [8], "senders": [8], "slicing": [2], "thresholds": [4]}
STRETCH = {10.0: 4.0, 40.0: 8.0}
"""Of eight workers, by rate in Gbit/s."""
LEAST = 3
"""Timed iterations of a row."""


def main() -> int:
    """Measure what was asked for, print a table and judge it."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return which limits are missed."""
    if args.iterations < LEAST:
        raise UsageError(
            f"--iterations {args.iterations}: allowed are {LEAST} or more, as two have no spread"
        )
    report["found"] = []
    missed: list[str] = []
    planned = {
        (rate, workers, model): config(rate, workers, model, args)
        for rate in args.rates
        for workers in args.workers or WORKERS[args.compare]
        for model in args.models
    }
    for each in planned.values():
        each.check()
    write(args.json, report)
    long = estimate.of_all(planned.values())
    print(f"takes about {estimate.about(long)}", file=sys.stderr, flush=True)
    for number, ((rate, workers, model), made) in enumerate(planned.items(), start=1):
        where = f"{model}, {rate:g} Gbit/s, {workers} workers"
        print(f"{number}/{len(planned)}: {where}", file=sys.stderr, flush=True)
        virtual = simulations(made)
        found = figures(made, model, virtual, runner.run(made, command=sys.argv).report)
        report["found"].append({"rate": rate, "workers": workers, "model": model, **found})
        write(args.json, report)
        show(where, found, paper(rate, workers, model))
        if args.rows is None and args.compare == "senders":
            missed += judged_senders(where, found)
        elif args.rows is None and args.compare == "thresholds":
            missed += judged_thresholds(where, found)
        else:
            missed += judged(where, model, rate, found, paper(rate, workers, model))
    return missed


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rates", nargs="+", type=float, default=[10.0], metavar="GBIT")
    parser.add_argument(
        "--compare",
        choices=WORKERS,
        default="systems",
        help="systems: Tables II and III; senders: Geryon, TICTAC and P3 with three sizes of "
        "slices (Table IV); slicing: what partition and slicing gain (Fig. 7); thresholds: "
        "the tuned one and others",
    )
    parser.add_argument(
        "--rows", nargs="+", help="other rows, as for wingbeat bench; slices are a whole model's"
    )
    parser.add_argument("--iterations", type=int, default=6, help="timed ones of each row")
    parser.add_argument("--rounds", type=int, default=2, help="how often the rows take turns")
    parser.add_argument("--warmup", type=int, default=2, help="untimed iterations of each turn")
    parser.add_argument(
        "--workers", type=int, nargs="+", metavar="N", help="hosts of the lab (8; slicing: 2)"
    )
    parser.add_argument("--scale", type=float, default=0.05, help="of the models")
    parser.add_argument("--stretch", type=float, help="slow motion (default: what two cores need)")
    parser.add_argument("--json", type=Path, default=Path("out/geryon.json"))
    return parser.parse_args()


def config(rate: float, workers: int, model: str, args: argparse.Namespace) -> BenchConfig:
    """Return the bench of one model at one rate.

    Raises:
        UsageError: a value that cannot work.
    """
    usual = {
        "systems": ROWS,
        "senders": tuple(sliced(row, n) for n in SLICES for pair in SENDERS for row in pair),
        "slicing": SLICING + tuple(sliced(SLICED, n) for n in THRESHOLDS),
        "thresholds": (TUNED, *(f"{PULLED}={threshold}" for threshold in SWEPT)),
    }
    return BenchConfig(
        lab=f"star:{workers}@{rate:g}gbit,prio=2",
        model=f"paced:{model}_k40@{args.scale:g}",
        strategies=tuple(in_the_clear(row) for row in args.rows or usual[args.compare]),
        iterations=args.iterations,
        rounds=min(args.rounds, args.iterations),
        warmup=args.warmup,
        stretch=args.stretch or slow_motion(rate, workers),
    )


def slow_motion(rate: float, workers: int) -> float:
    """Return the stretch that two cores need: they do the work of all workers.

    >>> slow_motion(10, 8), slow_motion(40, 8), slow_motion(10, 2)
    (4.0, 8.0, 1.0)
    """
    return max(1.0, STRETCH.get(rate, 8.0) * workers / 8)


def sliced(row: str, elements: int) -> str:
    """Add a size of slices to a row.

    >>> sliced("p3", 9), sliced("p3:mb=1", 9)
    ('p3:slice=9', 'p3:mb=1,slice=9')
    """
    return f"{row}{',' if ':' in row else ':'}slice={elements}"


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


def simulations(made: BenchConfig) -> list[float | None]:
    """Seconds of each row's iteration in virtual time; None where that is not possible."""
    checked = made.check()
    found: list[float | None] = []
    for row in checked.rows:
        try:
            found.append(simulated.median_s(checked, row))
        except UsageError:
            found.append(None)
    return found


def figures(
    made: BenchConfig, model: str, virtual: list[float | None], report: Report
) -> dict[str, Any]:
    """What one bench says, in the paper's terms."""
    assert report.measured is not None
    compute = report.measured.t_ff_s + report.measured.t_bp_s
    rows = {}
    for run, virtual_s in zip(report.runs, virtual, strict=True):
        median, sent = run.iteration_s.median, run.class_bytes_per_iteration
        images = report.workers * IMAGES[model] * made.stretch
        rows[run.strategy.replace(",encrypted=False", "").replace(":encrypted=False", "")] = {
            "efficiency": compute / median,
            "images_per_s": images / median,
            "of_bound": None if run.bound_s is None else run.bound_s / median,
            "bound": None if run.bound_s is None else compute / run.bound_s,
            "iteration_s": asdict(run.iteration_s),
            "simulated_s": virtual_s,
            "simulated_off": None if virtual_s is None else virtual_s / median - 1,
            "exposed_s": run.exposed_s,
            "bytes_per_iteration": run.bytes_per_iteration,
            "class_bytes_per_iteration": sent,
            "share_by_class": {name: n / sum(sent.values()) for name, n in sent.items()},
            "cores_share": run.cores_share,
            "limited_by_cores": run.limited_by_cores,
        }
    return {"rows": rows, "measured": asdict(report.measured), "config": asdict(made)}


def paper(rate: float, workers: int, model: str) -> dict[str, float]:
    """What Tables II and III have for it, by row; they are of eight workers."""
    known = PAPER.get(rate, {}).get(model, ()) if workers == 8 else ()
    return dict(zip((VANILLA, SLICED, GERYON), known, strict=False))


def judged(
    where: str, model: str, rate: float, found: dict[str, Any], papers: dict[str, float]
) -> list[str]:
    """Return which limits are missed where systems are compared."""
    rows, missed = found["rows"], []
    best, partitioned = rows.get(GERYON), rows.get(SLICED)
    if best is None:
        return []
    if papers and best["efficiency"] < papers[GERYON]:
        share, theirs = best["efficiency"], papers[GERYON]
        missed.append(f"{where}: efficiency {share:.3f}; the paper's is {theirs}")
    if best["of_bound"] is not None and best["of_bound"] < OF_BOUND:
        missed.append(f"{where}: {best['of_bound']:.3f} of the bound; limit {OF_BOUND}")
    if best["simulated_off"] is not None and abs(best["simulated_off"]) > OFF_SIMULATED:
        missed.append(f"{where}: virtual time is {best['simulated_off']:+.1%} off")
    if papers and partitioned:
        lead, asked = best["efficiency"] / partitioned["efficiency"], LEAD.get((model, rate), 1.0)
        if lead < asked:
            missed.append(f"{where}: {lead:.3f} of partition and slicing; limit {asked}")
    return missed


def judged_senders(where: str, found: dict[str, Any]) -> list[str]:
    """Return which limits are missed where Geryon is compared with TICTAC and P3."""
    rows, missed = found["rows"], []
    for ours, other in SENDERS:
        speeds = [[rows[sliced(row, n)]["images_per_s"] for row in (ours, other)] for n in SLICES]
        leads = [ahead / behind for ahead, behind in speeds]
        if min(leads) < 1 or sorted(leads) != leads:
            listed = ", ".join(f"{lead:.3f}" for lead in leads)
            missed.append(f"{where}: {listed} of {other}; to be above 1 and to rise")
    return missed


def judged_thresholds(where: str, found: dict[str, Any]) -> list[str]:
    """Return whether the tuned threshold is too far from the best."""
    seconds = {row: made["iteration_s"]["median"] for row, made in found["rows"].items()}
    off = seconds[TUNED] / min(seconds.values())
    best = min(seconds, key=seconds.__getitem__)
    return [f"{where}: tuned takes {off:.3f} of {best}'s time"] if off > OF_SWEEP else []


def spread(made: dict[str, Any]) -> float:
    """Return half of the distance between the efficiencies of the fast and the slow iterations."""
    compute = made["efficiency"] * made["iteration_s"]["median"]
    low, high = (compute / made["iteration_s"][tenth] for tenth in ("p90", "p10"))
    return float(high - low) / 2


def show(where: str, found: dict[str, Any], papers: dict[str, float]) -> None:
    """Print one bench's rows, beside the paper's."""
    classes = list(next(iter(found["rows"].values()))["share_by_class"])
    print(f"\n{where}")
    columns = ("efficiency", "+-", "paper", "of bound", "simulated", "images/s", *classes)
    widths = (10, 6, 6, 9, 9, 9, *(5 for _ in classes))
    heads = (f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    print(f"{'row':42}", *heads)
    for row, made in found["rows"].items():
        of_bound = "" if made["of_bound"] is None else f"{made['of_bound']:9.3f}"
        theirs = f"{papers[row]:6.3f}" if row in papers else " " * 6
        off = "" if made["simulated_off"] is None else f"{made['simulated_off']:+.1%}"
        line = f"{row:42} {made['efficiency']:10.3f} {spread(made):6.3f} {theirs} {of_bound:>9} "
        line += f"{off:>9}"
        shares = "".join(f"{made['share_by_class'][name]:6.0%}" for name in classes)
        full = "  limited by this machine's cores" if made["limited_by_cores"] else ""
        print(f"{line} {made['images_per_s']:9.1f}{shares}{full}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
