"""Requests that the group generator answers per second of CPU time.

    python benchmarks/generator.py --json out/generator.json
    python benchmarks/generator.py --workers 1000 --requests 200000

For each number of workers (4 a host), and each step of the paper's ablation (section 5): workers
send requests, all members acknowledge each running group, and released workers send the next
request, in random order, so that a part of them always computes. The calls are recorded first and
then replayed against the clock, so that the time is that of the generator alone. A request includes
its acknowledgements. The table also has the quality of averaging: the number of members of groups
with more than one worker, the share of requests that end alone, and the spectral gap of the mean
averaging matrix, times the groups of an iteration of all workers (up to `--gaps` of them).

Exit code 1 if a row of 1,000 workers has less than 100,000 requests per second.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from common import refuse_unwritable, show, write

from wingbeat.methods.model_averaging.generator import Generator, Run
from wingbeat.methods.model_averaging.rules import ABLATION, Rules, spectral_gap
from wingbeat.types import Layout
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed

PER_HOST = 4
LEAST = 100_000
"""Requests per CPU second at `AT` workers."""
AT = 1000

Call = tuple[int, int]
"""A worker, and the group that it acknowledges; -1 for a request."""


def main() -> int:
    args = arguments()
    refuse_unwritable(args.json)
    report: dict[str, Any] = {"machine": machine.describe(), "command": sys.argv, "rows": []}
    missed = []
    for workers in args.workers:
        for name, rules in ABLATION.items():
            row = measure(workers, name, rules, args)
            report["rows"].append(row)
            write(args.json, report)
            print(f"{workers} workers, {name}: done", file=sys.stderr, flush=True)
            if workers == AT and row["requests_per_s"] < LEAST:
                missed.append(f"{name} at {workers} workers: {row['requests_per_s']:,.0f} requests")
    show(report, table(report["rows"]))
    write(args.json, report)
    for line in missed:
        print(f"MISSED: {line} a second, {LEAST:,} are wanted")
    return int(bool(missed))


COLUMNS = (
    "workers, rules",
    "requests a CPU second",
    "least .. largest",
    "members",
    "alone",
    "spectral gap",
)


def table(rows: list[dict[str, Any]]) -> Printed:
    cells = []
    for row in rows:
        rates = [row["requests"] / seconds for seconds in row["cpu_s"]]
        gap = row["spectral_gap"]
        cells.append(
            (
                f"{row['workers']:,}, {row['rules']}",
                f"{row['requests_per_s']:,.0f}",
                f"{min(rates):,.0f} .. {max(rates):,.0f}",
                f"{row['members']:.2f}",
                f"{row['alone']:.1%}",
                "" if gap is None else f"{gap:.3f}",
            )
        )
    title = f"requests of groups, {PER_HOST} workers a host"
    return Printed.of(title, COLUMNS, cells, [f"median of {len(rows[0]['cpu_s'])} repeats"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", nargs="+", type=int, default=[4, 16, 64, 256, 1000, 4000, 10000]
    )
    parser.add_argument("--requests", type=int, default=100_000, help="of each row (100000)")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts (3)")
    parser.add_argument("--gaps", type=int, default=256, help="most workers to show a gap of (256)")
    parser.add_argument("--json", type=Path, default=Path("out/generator.json"))
    return parser.parse_args()


def measure(workers: int, name: str, rules: Rules, args: argparse.Namespace) -> dict[str, Any]:
    layout = Layout([worker // PER_HOST for worker in range(workers)])
    calls, runs = recorded(Generator(layout, rules), workers, args.requests)
    requests = sum(number < 0 for _, number in calls)
    seconds = [replayed(Generator(layout, rules), calls) for _ in range(args.repeats)]
    sizes = [len(run.members) for run in runs]
    together = [size for size in sizes if size > 1]
    gap = None
    if workers <= args.gaps:
        gap = spectral_gap([run.members for run in runs], workers) * len(runs) * workers / requests
    return {
        "workers": workers,
        "rules": name,
        "requests": requests,
        "calls": len(calls),
        "cpu_s": seconds,
        "requests_per_s": requests / statistics.median(seconds),
        "members": statistics.mean(together) if together else 1.0,
        "alone": (len(sizes) - len(together)) / requests,
        "spectral_gap": gap,
    }


def recorded(generator: Generator, workers: int, requests: int) -> tuple[list[Call], list[Run]]:
    """Simulate so many requests; return the calls, and the groups that ran."""
    chance = Random(1)
    calls: list[Call] = []
    runs: list[Run] = []
    due: list[Call] = [(worker, -1) for worker in range(workers)]
    while requests and due:
        place = int(chance.random() * len(due))
        due[place], due[-1] = due[-1], due[place]
        worker, number = call = due.pop()
        calls.append(call)
        if number < 0:
            requests -= 1
            now = generator.request(worker)
        else:
            now = generator.acknowledge(worker, number)
            if not generator.is_waiting(worker):
                due.append((worker, -1))
        runs += now
        due += [(member, run.number) for run in now for member in run.members]
    return calls, runs


def replayed(generator: Generator, calls: list[Call]) -> float:
    """Return the CPU seconds of a generator for the calls."""
    request, acknowledge = generator.request, generator.acknowledge
    gc.collect()
    begun = time.process_time()
    for worker, number in calls:
        if number < 0:
            request(worker)
        else:
            acknowledge(worker, number)
    return time.process_time() - begun


if __name__ == "__main__":
    sys.exit(main())
