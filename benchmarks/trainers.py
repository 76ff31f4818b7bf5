"""Trainers of other libraries with their own DDP and with wingbeat, on one real model in the lab.

    python benchmarks/trainers.py --json out/trainers.json

A small transformer, computed for real, is trained by each library with its own DDP, then with
wingbeat's AllReduce and DeAR in its place: by turns, ``--rounds`` times. First a forward is timed,
with as many workers at a time as train later; the links' rate follows from it, so that exchanging
all gradients takes ``--ratio`` times a forward at the line rate.

The table has for each row: milliseconds per iteration (the median of all workers' and rounds',
without the first few), its speed relative to DDP, the distance of the weights from those that the
library's DDP trained, and the number of lines that a user changes. Limits: DeAR is at least 1.15
times as fast, AllReduce takes at most 1.02 of DDP's time, weights are within 1e-5, two lines at
most.

What each library does is in ``trainer_rows/``; a library's module defines what its rows need.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import run_and_judge, show, write
from trainer_rows import NAMES

from wingbeat.errors import LabError
from wingbeat_lab import lab
from wingbeat_lab.bench.table import Printed

STRATEGIES = ("ddp", "allreduce", "dear")
WORKER = Path(__file__).parent / "trainer_rows" / "worker.py"

FASTER = 1.15
"""Minimum speed of DeAR over DDP."""
SLOWER = 1.02
"""Maximum iteration time of AllReduce over DDP's."""
DISTANCE = 1e-5
LINES = 2


# -- a run --------------------------------------------------------------------------------


def run(args: argparse.Namespace, spec: str, library: str, strategy: str, folder: Path) -> None:
    """Run the workers of one row in a lab; they write files to ``folder``."""
    keys = ("iterations", "mb", "batch", "width", "layers")
    options = json.dumps({key: getattr(args, key) for key in keys})
    words = [sys.executable, str(WORKER), str(folder), library, strategy, options]
    said: list[str] = []
    ended = lab.run(
        spec,
        words,
        timeout=args.timeout,
        on_line=lambda rank, line: said.append(f"[{rank}] {line}"),
    )
    if ended.exit_code:
        print("\n".join(said[-40:]), file=sys.stderr)
        raise LabError(f"{library}, {strategy}: {ended.first_failure or ended.exit_code}")


def forward_of(args: argparse.Namespace) -> float:
    """Return the seconds of a forward, of workers that compute at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        run(args, f"star:{args.hosts}@1gbit", "none", "none", Path(folder))
        found = [json.loads(each.read_text()) for each in Path(folder).glob("forward-*.json")]
    return statistics.fmean(found)


def rate_of(args: argparse.Namespace, forward: float) -> int:
    """Return Mbit/s at which an all-reduce of all gradients takes ``--ratio`` forwards."""
    bits = 2 * (args.hosts - 1) / args.hosts * 8 * megabytes(args) * 1e6
    return max(1, round(float(bits / (args.ratio * forward) / 1e6)))


def megabytes(args: argparse.Namespace) -> float:
    """Return the size of all gradients, in MB of 10**6 bytes."""
    from trainer_rows.task import Transformer

    model = Transformer(args.width, args.layers)
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6


def intervals(folder: Path, warm: int) -> list[float]:
    """Return the seconds of all workers' iterations after the first ``warm``."""
    found: list[float] = []
    for path in folder.glob("ticks-*.json"):
        ticks = json.loads(path.read_text())[warm:]
        found += [b - a for a, b in itertools.pairwise(ticks)]
    return found


# -- a row --------------------------------------------------------------------------------


def lines_changed(before: str, after: str) -> int:
    """Return how many lines of ``after`` are not in ``before``, or differ."""
    changes = difflib.ndiff(before.strip().splitlines(), after.strip().splitlines())
    marks = [line[0] for line in changes]
    return max(marks.count("+"), marks.count("-"))


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any weight."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return max(float((a[key] - b[key]).abs().max()) for key in a)


def measured(args: argparse.Namespace, spec: str, library: str) -> list[dict[str, Any]]:
    """Return a library's rows, by turns for so many rounds."""
    module = importlib.import_module(f"trainer_rows.with_{library}")
    times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    weights: dict[str, Any] = {}
    for number in range(args.rounds):
        for name in STRATEGIES:
            with tempfile.TemporaryDirectory() as folder:
                run(args, spec, library, name, Path(folder))
                times[name] += intervals(Path(folder), args.warm)
                weights[name] = torch.load(Path(folder) / "weights.pt")
            now = statistics.median(times[name]) * 1e3
            print(f"  {library}, {name}, round {number + 1}: {now:.0f} ms", flush=True)
    ddp = statistics.median(times["ddp"])
    changed = lines_changed(module.BEFORE, module.AFTER)
    return [
        {
            "library": module.TITLE,
            "strategy": name,
            "iteration_ms": statistics.median(times[name]) * 1e3,
            "p10_ms": statistics.quantiles(times[name], n=10)[0] * 1e3,
            "p90_ms": statistics.quantiles(times[name], n=10)[-1] * 1e3,
            "speed": ddp / statistics.median(times[name]),
            "distance": distance(weights["ddp"], weights[name]),
            "lines": 0 if name == "ddp" else changed,
        }
        for name in STRATEGIES
    ]


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return the missed limits."""
    found = []
    for row in rows:
        who = f"{row['library']}, {row['strategy']}"
        if row["strategy"] == "dear" and row["speed"] < FASTER:
            found.append(f"{who}: {row['speed']:.3f} times DDP's speed, wanted {FASTER}")
        if row["strategy"] == "allreduce" and 1 / row["speed"] > SLOWER:
            found.append(f"{who}: {1 / row['speed']:.3f} of DDP's time, allowed {SLOWER}")
        if not row["distance"] <= DISTANCE:
            found.append(f"{who}: weights differ by {row['distance']:.2g}, allowed {DISTANCE:g}")
        if row["lines"] > LINES:
            found.append(f"{who}: {row['lines']} lines to change, allowed {LINES}")
    return found


COLUMNS = (
    "library, strategy",
    "iteration, ms",
    "p10 .. p90, ms",
    "times DDP's speed",
    "distance",
    "lines",
)


def table(rows: list[dict[str, Any]], spec: str) -> Printed:
    cells = [
        (
            f"{row['library']}, {row['strategy']}",
            f"{row['iteration_ms']:.0f}",
            f"{row['p10_ms']:.0f} .. {row['p90_ms']:.0f}",
            f"{row['speed']:.2f}",
            f"{row['distance']:.1e}",
            str(row["lines"]),
        )
        for row in rows
    ]
    notes = ["distance: largest difference of a weight from the library's DDP; lines: to change"]
    return Printed.of(f"trainers of other libraries on {spec}", COLUMNS, cells, notes)


# -- the program --------------------------------------------------------------------------


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report; return the missed limits."""
    forward = forward_of(args)
    mbit = rate_of(args, forward)
    spec = f"star:{args.hosts}@{mbit}mbit"
    report |= {"lab": spec, "forward_ms": forward * 1e3, "mb": megabytes(args), "rows": []}
    print(f"{report['mb']:.1f} MB of gradients, a forward takes {forward * 1e3:.0f} ms: {spec}")
    for library in args.libraries:
        report["rows"] += measured(args, spec, library)
        write(args.json, report)
    show(report, table(report["rows"], spec))
    write(args.json, report)
    return missed(report["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--libraries", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--hosts", type=int, default=2, help="workers, of a core each (2)")
    parser.add_argument("--ratio", type=float, default=4.0, help="all-reduce by forward (4)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each row (2)")
    parser.add_argument("--iterations", type=int, default=30, help="of each turn (30)")
    parser.add_argument("--warm", type=int, default=5, help="first ones left out (5)")
    parser.add_argument("--mb", type=float, default=5.0, help="all rows' bucket size (5)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a worker (16)")
    parser.add_argument("--width", type=int, default=256, help="of the transformer (256)")
    parser.add_argument("--layers", type=int, default=8, help="of the transformer (8)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a turn (600)")
    parser.add_argument("--json", type=Path, default=Path("out/trainers.json"))
    args = parser.parse_args()
    if reason := lab.available():
        print(f"trainers.py: {reason}", file=sys.stderr)
        return 2
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    sys.exit(main())
