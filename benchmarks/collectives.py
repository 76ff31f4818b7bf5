"""Reduce-scatter and all-gather against the line rate, on an emulated cluster.

    python benchmarks/collectives.py --lab star:4@1gbit --json out/collectives.json

For each bucket size, collectives run one after another, in two ways: ``queued``, as in training
(the next begins when this one has sent its last chunk), and ``awaited``, each waited for before the
next is called. Both are timed over many collectives, in rounds that take turns; the figure is the
median over rounds of

    bytes that a ring must send, (P-1)/P of the bucket  /  seconds  /  line rate.

TCP over Ethernet cannot exceed 1448/1514 = 0.956 of the line rate with 1,500 byte frames.
Exit code 1 if a figure is below its limit (0.92 for 5 MB, 0.88 for 1 MB).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

LIMITS = {5.0: 0.92, 1.0: 0.88}
TCP_BOUND = 1448 / 1514
COLLECTIVES = ("reduce_scatter", "all_gather")


def worker(args: argparse.Namespace) -> None:
    """Time every case on this rank; rank 0 writes the report."""
    import torch

    import wingbeat
    from wingbeat.collectives import Collectives

    world = wingbeat.init(timeout=60)
    collectives = Collectives(world, args.topology)

    def run(what: str, buffer: torch.Tensor, count: int, awaited: bool) -> float:
        start = getattr(collectives, what)
        start(buffer).wait()
        torch.distributed.barrier()
        begin = time.perf_counter()
        if awaited:
            for _ in range(count):
                start(buffer).wait()
        else:
            for handle in [start(buffer) for _ in range(count)]:
                handle.wait()
        buffer.fill_(1)
        return time.perf_counter() - begin

    cases = [(mb, what, way) for mb in args.mb for what in COLLECTIVES for way in (False, True)]
    samples: dict[Any, list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for mb, what, awaited in cases:
            buffer = torch.ones(int(mb * 2**20) // 4)
            count = max(8, int(args.seconds * args.line_rate / (mb * 2**20)))
            sent = count * buffer.numel() * 4 * (world.size - 1) / world.size
            seconds = run(what, buffer, count, awaited)
            samples[mb, what, awaited].append(sent / seconds / args.line_rate)
    if world.rank == 0:
        Path(args.json).write_text(json.dumps([_row(k, v) for k, v in samples.items()], indent=1))
    wingbeat.shutdown()


def _row(case: tuple[float, str, bool], values: list[float]) -> dict[str, Any]:
    mb, what, awaited = case
    return {
        "collective": what,
        "mb": mb,
        "way": "awaited" if awaited else "queued",
        "of_line_rate": round(statistics.median(values), 4),
        "of_tcp_bound": round(statistics.median(values) / TCP_BOUND, 4),
        "rounds": [round(v, 4) for v in values],
    }


def launch(args: argparse.Namespace) -> int:
    """Run the workers on the lab, print a table, and judge it."""
    from common import show, write

    from wingbeat_lab import lab
    from wingbeat_lab.bench import machine
    from wingbeat_lab.bench.table import Printed

    spec = lab.LabSpec.parse(args.lab)
    args.line_rate = spec.rate / 8 * spec.rails
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "--worker", "--line-rate", str(args.line_rate)]
    words += ["--topology", args.topology, "--json", str(Path(args.json).resolve())]
    words += ["--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    words += ["--mb", *map(str, args.mb)]
    result = lab.run(spec, words, on_line=lambda rank, line: print(f"[{rank}] {line}"))
    if result.exit_code:
        return result.exit_code
    rows = json.loads(Path(args.json).read_text())
    report = {
        "lab": args.lab,
        "topology": args.topology,
        "tcp_bound": round(TCP_BOUND, 4),
        "machine": machine.describe(),
        "rows": rows,
    }
    missed = [
        f"{case(row)}: {row['of_line_rate']:.3f} of the line rate; limit {LIMITS[row['mb']]}"
        for row in rows
        if row["of_line_rate"] < LIMITS.get(row["mb"], 0.0)
    ]
    cells = [
        (
            case(row),
            f"{row['of_line_rate']:.3f}",
            f"{min(row['rounds']):.3f} .. {max(row['rounds']):.3f}",
            f"{row['of_tcp_bound']:.3f}",
        )
        for row in rows
    ]
    show(
        report,
        Printed.of(
            f"collectives on {args.lab}, {args.topology}",
            ("collective", "of line rate", "least .. largest", "of TCP's bound"),
            cells,
            [f"median of {args.rounds} rounds", *(f"missed: {line}" for line in missed)],
        ),
    )
    write(Path(args.json), report)
    return int(bool(missed))


def case(row: dict[str, Any]) -> str:
    """The name of a row."""
    return f"{row['collective']}, {row['mb']:g} MB, {row['way']}"


def main() -> int:
    """Parse the command line; inside the lab, act as a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lab", default="star:4@1gbit")
    parser.add_argument("--topology", default="ring", choices=("ring", "mesh"))
    parser.add_argument("--mb", type=float, nargs="+", default=[5.0, 1.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of line rate, per case")
    parser.add_argument("--json", default="out/collectives.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--line-rate", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
