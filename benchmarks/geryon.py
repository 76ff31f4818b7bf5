"""Geryon on its four models, with its baselines: the paper's Tables II to IV, Figs. 7 to 9.

    python benchmarks/geryon.py --json out/geryon.json                  (Table II)
    python benchmarks/geryon.py --rates 40                              (Table III)
    python benchmarks/geryon.py --workers 2 4 --rows PAPER              (Fig. 8; --rates 40: Fig. 9)
    python benchmarks/geryon.py --compare senders --models vgg19        (Table IV)
    python benchmarks/geryon.py --compare slicing --models vgg19        (Fig. 7: two workers)
    python benchmarks/geryon.py --compare thresholds --models yolo      (four workers)
    python benchmarks/geryon.py --compare cross --models alexnet        (others use the network too)
    python benchmarks/geryon.py --rates 10 --models resnet50 --iterations 6 --rows ddp geryon

Each model is one ``wingbeat bench``: the rows take turns on one lab, whose switches have two
strict-priority classes. Times are paced (a K40's); bytes, servers, queues and links are real. Eight
workers with one server on each host, as in the paper. Its networks are 10 and 40 GbE; the model's
scale shrinks bytes and rates together, and slices and buckets with them; the stretch slows
computation and links down together, until two cores can carry the traffic of eight hosts. It is the
same for all models, rates and numbers of workers. The minimum cost of a message is that of the two
cores and does not scale, so figures of different stretches cannot be compared. Two timed iterations
have no spread: the minimum is three.

``cross``: a fat-tree of two leaf switches whose trunks are as fast as the link of one host, so
oversubscribed by the hosts of a leaf, and cross-traffic on them (``--cross-traffic``): best-effort
TCP between hosts that do not train. ``classes=1`` is Geryon without its classes, all else equal;
``threshold=0`` has all pulls but the last layer's in the urgent class.

``efficiency`` is the time of computation alone over that of the median iteration, ``p10 .. p90``
the same for the tenth and ninetieth percentile of efficiency; images/s are those of all workers
without the slow motion. ``of bound``: of the best that any order could reach. ``ef`` and ``be`` are
the share of a host's sent bytes in the urgent class and in the other, by the kernel's counters;
``simulated`` is the error of virtual time, with the same plan, schedule, partition and queues.
Rows do not encrypt, like the paper. The paper's partition and slicing is TensorFlow's, which
pulls in random order when an iteration starts (sections II-B and V-A):
``partitionedps:pull=start,order=random``; ours without ``order`` pulls in the order of forward.
``geryon`` sends sums back as soon as they are complete, ``geryon:pull=start`` is the paper's.

Exit code 1 if a limit is missed; ``cross`` has none. Tables II and III: the efficiency of
``geryon`` or of ``geryon:pull=start`` below the paper's, or either slower than the paper's
partition and slicing, or less than 1.05 times as fast on resnet50 at 10 Gbit/s; ``geryon`` below
0.95 of the bound, or more than 10% off in virtual time. Table IV: Geryon behind TICTAC or P3, or a
lead that does not grow as slices shrink. Thresholds: the tuned one, whose tuning takes 110
iterations or more before any row is timed, is more than 2% slower than the best of the others.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import GERYON_TABLES as PAPER
from common import run_and_judge, show, write

from wingbeat.errors import UsageError
from wingbeat_lab.bench import estimate, runner, simulated, traffic
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.results import Report
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab.spec import LabSpec

MODELS = ("alexnet", "vgg19", "resnet50", "yolo")
IMAGES = {"alexnet": 512, "vgg19": 64, "resnet50": 64, "yolo": 64}
"""Images that a worker computes in an iteration (section V-A)."""

VANILLA, SLICED, GERYON = "vanillaps", "partitionedps:pull=start,order=random", "geryon"
OF_PAPER = "geryon:pull=start"
PULLED, READY = f"{OF_PAPER},threshold", f"{GERYON}:threshold"
ROWS = (
    VANILLA,
    SLICED,
    "partitionedps:pull=start",
    OF_PAPER,
    "partitionedps",
    GERYON,
    "allreduce",
    "dear:plan=fixed",
)
IN_PAPER = (VANILLA, SLICED, OF_PAPER, GERYON)
"""The rows of ``--rows PAPER``: the paper's three, and Geryon with our defaults."""
CROSSED = (
    VANILLA,
    SLICED,
    f"{OF_PAPER},classes=1",
    OF_PAPER,
    f"{PULLED}=0",
    f"{GERYON}:classes=1",
    GERYON,
    f"{READY}=0",
)
"""With and without classes in the network, for pulls at an iteration's start and at once."""
WITHOUT = dict(zip((OF_PAPER, f"{PULLED}=0"), 2 * (f"{OF_PAPER},classes=1",), strict=True))
WITHOUT |= dict(zip((GERYON, f"{READY}=0"), 2 * (f"{GERYON}:classes=1",), strict=True))
"""By row with classes, the row that differs in nothing else."""
SENDERS = ((OF_PAPER, "tictac"), (GERYON, "p3"))
"""Geryon and the systems that pull at the same time: Table IV, and P3."""
SLICES = (1 << 20, 1 << 19, 1 << 18)
"""Elements, Table IV's."""
SLICING = (VANILLA, f"{SLICED},slice=0", "partitionedps:slice=0")
"""Fig. 7: nothing, partition; and slicing by several thresholds."""
THRESHOLDS = tuple(1 << power for power in (22, 21, 20, 19, 18, 16))
SWEPT = (0.97, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5, 0.3)
TUNED, OF_SWEEP = f"{PULLED}=tuned", 1.02
OF_BOUND = 0.95
OFF_SIMULATED = 0.1
LEAD = {("resnet50", 10.0): 1.05}
"""Minimum speed of Geryon over partition and slicing, by model and rate, where it is not 1. At 40
Gbit/s the paper's own is 1.02 times as fast on ResNet-50.
"""
WORKERS = {"systems": [8], "senders": [8], "slicing": [2], "thresholds": [4], "cross": [4]}
STRETCH = 4.0
LEAST = 3
"""Timed iterations of a row."""


def main() -> int:
    """Measure the requested models, print a table and judge it."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return the missed limits."""
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
        show(report, table(where, found, paper(rate, workers, model)))
        write(args.json, report)
        if args.rows is None and args.compare == "senders":
            missed += judged_senders(where, found)
        elif args.rows is None and args.compare == "thresholds":
            missed += judged_thresholds(where, found)
        elif args.compare != "cross":
            missed += judged(where, model, rate, found, paper(rate, workers, model))
    return missed


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or other arguments."""
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
        "the tuned one and others; cross: priorities where others use the network too",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        help="other rows, as for wingbeat bench, or PAPER; slices are a whole model's",
    )
    parser.add_argument("--iterations", type=int, default=6, help="timed ones of each row")
    parser.add_argument("--rounds", type=int, default=2, help="how often the rows take turns")
    parser.add_argument("--warmup", type=int, default=2, help="untimed iterations of each turn")
    parser.add_argument(
        "--workers", type=int, nargs="+", metavar="N", help="hosts of the lab (8; slicing: 2)"
    )
    parser.add_argument("--scale", type=float, default=0.05, help="of the models")
    parser.add_argument("--stretch", type=float, default=STRETCH, help="slow motion (4)")
    parser.add_argument(
        "--cross-traffic", default="0.8", help="of a trunk each way, or a rate, in cross (0.8)"
    )
    parser.add_argument("--cross-flows", type=int, default=4, help="that it is in (4)")
    parser.add_argument("--json", type=Path, default=Path("out/geryon.json"))
    return parser.parse_args(given)


def config(rate: float, workers: int, model: str, args: argparse.Namespace) -> BenchConfig:
    """Return the bench of one model at one rate."""
    usual = {
        "systems": ROWS,
        "senders": tuple(sliced(row, n) for n in SLICES for pair in SENDERS for row in pair),
        "slicing": (*SLICING, *(sliced(SLICED, n) for n in THRESHOLDS), "partitionedps"),
        "thresholds": (TUNED, *(f"{PULLED}={value}" for value in SWEPT), f"{READY}=tuned", GERYON),
        "cross": CROSSED,
    }
    rows = IN_PAPER if args.rows == ["PAPER"] else args.rows or usual[args.compare]
    return BenchConfig(
        lab=cluster(rate, workers, args),
        model=f"paced:{model}_k40@{args.scale:g}",
        strategies=tuple(in_the_clear(row) for row in rows),
        iterations=args.iterations,
        rounds=min(args.rounds, args.iterations),
        warmup=args.warmup,
        stretch=args.stretch,
    )


def cluster(rate: float, workers: int, args: argparse.Namespace) -> str:
    """Return the lab; its links' rate is in Gbit/s."""
    if args.compare != "cross":
        return f"star:{workers}@{rate:g}gbit,prio=2"
    tree = f"fat-tree:{workers}/{max(1, workers // 2)}@{rate:g}gbit+{rate:g}gbit,prio=2"
    return str(LabSpec.parse(tree).with_cross(args.cross_traffic, args.cross_flows))


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
            found.append(simulated.iteration_s(checked, row))
        except UsageError:
            found.append(None)
    return found


def figures(
    made: BenchConfig, model: str, virtual: list[float | None], report: Report
) -> dict[str, Any]:
    """One bench's results, in the paper's terms."""
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
            "cross_traffic": run.cross_traffic and asdict(run.cross_traffic),
        }
    return {
        "rows": rows,
        "measured": asdict(report.measured),
        "config": asdict(made),
        "lab": report.lab,
    }


def paper(rate: float, workers: int, model: str) -> dict[str, float]:
    """The figures of Tables II and III, by row; they are of eight workers."""
    known = PAPER.get(rate, {}).get(model, ()) if workers == 8 else ()
    found = dict(zip((VANILLA, SLICED, GERYON), known, strict=False))
    return found | ({OF_PAPER: found[GERYON]} if found else {})


def judged(
    where: str, model: str, rate: float, found: dict[str, Any], papers: dict[str, float]
) -> list[str]:
    """Return the missed limits where systems are compared."""
    rows, missed = found["rows"], []
    partitioned = rows.get(SLICED)
    for name in (OF_PAPER, GERYON):
        own = rows.get(name)
        if not papers or own is None:
            continue
        if own["efficiency"] < papers[name]:
            said = f"efficiency {own['efficiency']:.3f}; the paper's is {papers[name]}"
            missed.append(f"{where}: {name}: {said}")
        if partitioned is not None:
            lead = own["efficiency"] / partitioned["efficiency"]
            asked = LEAD.get((model, rate), 1.0)
            if lead < asked:
                said = f"{lead:.3f} of partition and slicing; limit {asked}"
                missed.append(f"{where}: {name}: {said}")
    best = rows.get(GERYON)
    if best is None:
        return missed
    if best["of_bound"] is not None and best["of_bound"] < OF_BOUND:
        missed.append(f"{where}: {best['of_bound']:.3f} of the bound; limit {OF_BOUND}")
    if best["simulated_off"] is not None and abs(best["simulated_off"]) > OFF_SIMULATED:
        missed.append(f"{where}: virtual time is {best['simulated_off']:+.1%} off")
    return missed


def judged_senders(where: str, found: dict[str, Any]) -> list[str]:
    """Return the missed limits where Geryon is compared with TICTAC and P3."""
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
    rows = {row: made for row, made in found["rows"].items() if row.startswith(PULLED)}
    seconds = {row: made["iteration_s"]["median"] for row, made in rows.items()}
    off = seconds[TUNED] / min(seconds.values())
    best = min(seconds, key=seconds.__getitem__)
    return [f"{where}: tuned takes {off:.3f} of {best}'s time"] if off > OF_SWEEP else []


def spread(made: dict[str, Any]) -> tuple[float, float]:
    """Return the efficiencies of the slow and the fast iterations: tenth, ninetieth percentile.

    >>> spread({"efficiency": 0.5, "iteration_s": {"median": 2.0, "p10": 1.25, "p90": 4.0}})
    (0.25, 0.8)
    """
    compute = made["efficiency"] * made["iteration_s"]["median"]
    low, high = (compute / made["iteration_s"][tenth] for tenth in ("p90", "p10"))
    return low, high


COLUMNS = ("row", "efficiency", "p10 .. p90", "the paper's", "of bound", "simulated, %", "images/s")


def table(where: str, found: dict[str, Any], papers: dict[str, float]) -> Printed:
    """Return one bench's rows, with the paper's."""
    rows, settings = found["rows"], found["config"]
    classes = list(next(iter(rows.values()))["share_by_class"])
    cells = []
    for row, made in rows.items():
        low, high = spread(made)
        off, of_bound = made["simulated_off"], made["of_bound"]
        line = [row, f"{made['efficiency']:.3f}", f"{low:.3f} .. {high:.3f}"]
        line += [f"{papers[row]:.3f}" if row in papers else ""]
        line += ["" if of_bound is None else f"{of_bound:.3f}"]
        line += ["" if off is None else f"{100 * off:+.1f}", f"{made['images_per_s']:.1f}"]
        cells.append(line + [f"{100 * made['share_by_class'][name]:.0f}" for name in classes])
    columns = (*COLUMNS, *(f"{name}, %" for name in classes))
    return Printed.of(f"{where}, stretch {settings['stretch']:g}", columns, cells, notes(found))


def notes(found: dict[str, Any]) -> list[str]:
    """Return notes about the rows, such as the gain of classes in the network."""
    rows, settings = found["rows"], found["config"]
    lines = [
        f"scale {settings['model'].partition('@')[2]}, {settings['iterations']} iterations of each "
        f"row in {settings['rounds']} turns; lab {found['lab']}"
    ]
    full = [row for row, made in rows.items() if made["limited_by_cores"]]
    lines += [f"limited by this machine's cores: {', '.join(full)}"] if full else []
    for named, without in WITHOUT.items():
        if named in rows and without in rows:
            times = rows[named]["efficiency"] / rows[without]["efficiency"]
            lines.append(f"{named}: {times:.3f} times as fast as without classes")
    met = {row: made.get("cross_traffic") for row, made in rows.items()}
    crossed = [(row, traffic.CrossTraffic(**own)) for row, own in met.items() if own]
    return lines + traffic.notes(LabSpec.parse(found["lab"]), crossed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
