"""The CPU cost of a message between workers under bounded staleness.

    python benchmarks/message_cost.py --json out/message_cost.json
    python benchmarks/message_cost.py --workers 4 --colayers 4

Real workers in a lab train a small network with `Canary` and pause after each iteration, so no
message waits and none is long. Measured is the CPU time of each worker's communication thread for
each message that it sends or receives (in each round, for each other worker: a piece and a sum of
each colayer, both ways; the control colayer is one more), and of the whole process, computation
included. ``canary_beside.py --message`` takes the cost of a message.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import at_least_one, run_and_judge, show, write
from torch import nn

import wingbeat
from wingbeat.errors import LabError
from wingbeat_lab import lab
from wingbeat_lab.bench.table import Printed

FEATURES, BATCH = 128, 8
PAUSE_S = 0.25
"""Between two iterations."""


def main() -> int:
    """Measure in a lab, or be one of its workers."""
    args = arguments()
    if args.worker:
        return worker(args)
    return run_and_judge(args.json, functools.partial(fill, args))


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report and print it; there are no limits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = [sys.executable, __file__, "--worker", "--json", str(path)]
        words += ["--workers", str(args.workers), "--colayers", str(args.colayers)]
        words += ["--iterations", str(args.iterations)]
        spec = f"star:{args.workers}@1gbit"
        ended = lab.run(spec, words, on_line=lambda rank, line: print(f"[{rank}] {line}"))
        if ended.exit_code:
            raise LabError(f"{spec}: {ended.first_failure or ended.exit_code}")
        report.update(json.loads(path.read_text()))
    courier, whole = (report[name] for name in ("courier_s", "process_s"))
    cells = [
        (
            f"{args.workers} workers, {args.colayers} colayers",
            str(report["letters"]),
            f"{1e6 * statistics.median(courier) / report['letters']:.0f}",
            *(part for seconds in (courier, whole) for part in of_workers(seconds)),
        )
    ]
    show(report, Printed.of("processor time of letters, by workers", COLUMNS, cells))
    write(args.json, report)
    return []


COLUMNS = (
    "cluster",
    "letters a round",
    "us a letter",
    "courier, ms a round",
    "least .. largest, ms",
    "whole process, ms a round",
    "least .. largest of it, ms",
)


def of_workers(seconds: Sequence[float]) -> tuple[str, str]:
    """Return the median over workers and the range, in ms."""
    spread = f"{1e3 * min(seconds):.1f} .. {1e3 * max(seconds):.1f}"
    return f"{1e3 * statistics.median(seconds):.1f}", spread


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=at_least_one, default=9, help="2 or more (9)")
    parser.add_argument("--colayers", type=at_least_one, default=10, help="k (10)")
    parser.add_argument("--iterations", type=at_least_one, default=40, help="timed ones (40)")
    parser.add_argument("--json", type=Path, default=Path("out/message_cost.json"), metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workers < 2:
        parser.error("--workers 1: a letter takes two")
    return args


def worker(args: argparse.Namespace) -> int:
    """Train; rank 0 writes all results."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    layers = [nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(args.colayers)]
    model: Any = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    canary = wingbeat.Canary(s=2, colayers=args.colayers, encrypted=False)
    model, optimizer = wingbeat.distribute(model, optimizer, canary)
    x = torch.randn(BATCH, FEATURES)
    for _ in range(2):
        iterate(model, optimizer, x)
    clock = thread_clock()
    before, begin = clock(), time.process_time()
    for _ in range(args.iterations):
        iterate(model, optimizer, x)
    own = torch.tensor([clock() - before, time.process_time() - begin]) / args.iterations
    every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    if dist.get_rank() == 0:
        letters = 4 * (args.workers - 1) * (args.colayers + 1)
        courier_s, process_s = zip(*(each.tolist() for each in every), strict=True)
        found: dict[str, Any] = {"letters": letters, "courier_s": courier_s}
        args.json.write_text(json.dumps({**found, "process_s": process_s}))
    model.synchronize()
    wingbeat.shutdown()
    return 0


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train once, and pause."""
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    time.sleep(PAUSE_S)


def thread_clock() -> Any:
    """Return a clock of the processor time of this process's communication thread, in seconds."""
    (thread,) = (t for t in threading.enumerate() if t.name == "wingbeat-communication")
    assert thread.ident is not None, "it runs"
    return functools.partial(time.clock_gettime, time.pthread_getcpuclockid(thread.ident))


if __name__ == "__main__":
    sys.exit(main())
