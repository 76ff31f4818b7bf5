"""DeAR's Fig. 6 with the paper's number of workers, in virtual time: no tensor fusion.

    python benchmarks/dear_virtual.py --json out/dear_virtual.json
    python benchmarks/dear_virtual.py --models resnet50 --latency-us 5 50
    python benchmarks/dear_virtual.py --gbit 100 --latency-us 1.5 5

Nothing is measured: `wingbeat.simulator` has 64 workers on 10GbE, or links of ``--gbit``, less
headers, in a ring, each tensor alone: DeAR over all-reduces under backward (WFBP), whose
collectives are those of DeAR, one half after the other, as in the paper (section VI-C). In the lab
two cores start each collective for all workers, which costs them more than DeAR hides. Here a start
costs nothing but the links' latency: the paper's Eqs. 3 and 4 have P - 1 of them in each half. The
paper does not state the latency, so there are several.

Exit code 1 if DeAR is slower than WFBP anywhere; the paper has 1.06 to 1.19.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import dear
from common import run_and_judge, show, write

from wingbeat import AllReduce, DeAR, simulator
from wingbeat.errors import UsageError
from wingbeat_lab import paced
from wingbeat_lab.bench.table import Printed

GOODPUT = 1448 / 1538
WORK = simulator.Work(
    chunk_s=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0, update_s_per_byte=0.0
)  # as on GPUs: the NICs copy, and add
WAYS = {"wfbp": AllReduce(plan="none"), "dear": DeAR(plan="none")}
ITERATIONS = 3


def seconds(model: str, way: str, workers: int, gbit: float, latency_s: float) -> float:
    """Return the median of an iteration."""
    links = simulator.Links(bytes_per_s=gbit * 1e9 / 8 * GOODPUT, latency_s=latency_s)
    run = simulator.simulate(
        paced.simulator_model(paced.load_profile(model)),
        WAYS[way],
        workers,
        links,
        work=WORK,
        iterations=ITERATIONS,
    )
    return run.median_s


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report; return where DeAR is slower."""
    if args.workers < 2 or min(args.latency_us) < 0 or min(args.gbit) <= 0:
        raise UsageError("allowed are --workers from 2, --latency-us from 0, --gbit above 0")
    missed = []
    report["models"] = {}
    for model in args.models:
        found = report["models"][model] = {}
        for gbit, latency in itertools.product(args.gbit, args.latency_us):
            both = {way: seconds(model, way, args.workers, gbit, 1e-6 * latency) for way in WAYS}
            faster, case = both["wfbp"] / both["dear"], f"{gbit:g} Gbit/s, {latency:g} us"
            found[case] = {**both, "faster": faster}
            if faster < 1:
                missed.append(f"6: {model}, {case}: DeAR is {faster:.3f} of WFBP")
        write(args.json, report)
    show(report, table(args, report["models"]))
    write(args.json, report)
    return missed


COLUMNS = ("model, rate, latency", "DeAR over WFBP", "WFBP, ms", "DeAR, ms")


def table(args: argparse.Namespace, models: dict[str, Any]) -> Printed:
    """Return Fig. 6 in virtual time for printing, the least gain first."""
    rows = [
        (each["faster"], f"{model}, {case}", each["wfbp"], each["dear"])
        for model, found in models.items()
        for case, each in found.items()
    ]
    cells = [
        (name, f"{faster:.3f}", f"{1e3 * wfbp:.1f}", f"{1e3 * dear_s:.1f}")
        for faster, name, wfbp, dear_s in sorted(rows)
    ]
    title = (
        f"Fig. 6 in virtual time: no tensor fusion, {args.workers} workers in a ring, real pace, "
        f"median of {ITERATIONS} iterations"
    )
    notes = [
        "no spread: nothing in virtual time is random",
        "the paper: DeAR 1.06 to 1.19 over WFBP",
    ]
    return Printed.of(title, COLUMNS, cells, notes)


def main() -> int:
    """Simulate the requested models, print a table and judge it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(dear.MODELS), metavar="NAME")
    parser.add_argument("--workers", type=int, default=64, help="(64)")
    parser.add_argument("--gbit", type=float, nargs="+", default=[10.0], help="of a link (10)")
    parser.add_argument(
        "--latency-us", type=float, nargs="+", default=[5.0, 20.0, 50.0], help="(5 20 50)"
    )
    parser.add_argument("--json", type=Path, default=Path("out/dear_virtual.json"), metavar="FILE")
    args = parser.parse_args()
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    sys.exit(main())
