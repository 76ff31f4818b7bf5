"""Servers with several network interfaces: an iteration over all NICs, and over the first.

    python benchmarks/server_interfaces.py --json out/server_interfaces.json
    python benchmarks/server_interfaces.py --lab star:2x2@1gbit --strategies geryon:update=server

Workers of a lab, each with one server on its host, train six layers of 1.4 million parameters each,
whose computation is short, so that the network is the limit. Bytes are the kernel's, by NIC.

Rule: with c NICs an iteration takes at most 1.15 / c of the time with one, and each NIC carries
its part of the bytes by its measured speed to 0.03 (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat.errors import LabError
from wingbeat_lab import baselines, lab
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab import counters

ROWS = ("geryon:encrypted=false", "geryon:encrypted=false,update=server")
WIDTH, LAYERS, WARMUP, STEPS = 1200, 6, 4, 8
LONGER, OFF = 1.15, 0.03


def work(row: str, first: str) -> None:
    """Train on one host, over all NICs or the first alone; print rank 0's measurements."""
    import torch

    import wingbeat

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=120, interfaces=["eth0"] if first else None)
    torch.manual_seed(0)
    plain: Any = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = wingbeat.distribute(plain, sgd, baselines.parse(row))
    x = torch.randn(4, WIDTH)

    def steps(count: int) -> list[int]:
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        model.synchronize()
        torch.distributed.barrier()
        now = counters.read()
        return [now[link.name].tx_bytes for link in world.links]

    before, begin = steps(WARMUP), time.monotonic()
    after = steps(STEPS)
    seconds = (time.monotonic() - begin) / STEPS
    if world.rank == 0:
        sent = [(b - a) / STEPS for a, b in zip(before, after, strict=True)]
        found = {"ms": 1e3 * seconds, "bytes": sent, "weights": world.weights}
        print("FOUND " + json.dumps(found), flush=True)


def measured(spec: str, row: str, first: str) -> dict[str, Any]:
    """Return the results of a lab's rank 0."""
    lines: list[str] = []
    ended = lab.run(
        spec,
        [sys.executable, __file__, "--work", row, first],
        on_line=lambda rank, line: lines.append(f"[{rank}] {line}"),
        timeout=600,
    )
    found = [line.partition("FOUND ")[2] for line in lines if "FOUND " in line]
    if ended.exit_code or not found:
        raise LabError(f"{spec}: the workers ended with {ended.exit_code}: {lines[-1:]}")
    return dict(json.loads(found[0]))


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Measure each strategy both ways; return the missed limits."""
    missed, cells = [], []
    for row in args.strategies:
        baselines.parse(row)  # fail before a lab is created
    report.update(lab=args.lab, rows={})
    for row in args.strategies:
        one, many = (measured(args.lab, row, first) for first in ("eth0", ""))
        report["rows"][row] = {"first": one, "all": many}
        cards, ratio = len(many["bytes"]), many["ms"] / one["ms"]
        parts = [each / sum(many["bytes"]) for each in many["bytes"]]
        cells.append(
            (
                row,
                f"{one['ms']:.0f}",
                f"{many['ms']:.0f}",
                f"{ratio:.2f}",
                ", ".join(f"{part:.3f}" for part in parts),
                ", ".join(f"{weight:.3f}" for weight in many["weights"]),
            )
        )
        write(args.json, report)
        if ratio > LONGER / cards:
            missed.append(f"{row}: {ratio:.2f} of the time of one card")
        pairs = zip(parts, many["weights"], strict=True)
        if any(abs(part - weight) > OFF for part, weight in pairs):
            missed.append(f"{row}: cards carry {parts}, and not {many['weights']}")
    show(report, Printed.of(f"servers over all cards of {args.lab}", COLUMNS, cells))
    write(args.json, report)
    return missed


COLUMNS = ("strategy", "one card, ms", "all, ms", "all / one", "part of each", "by its speed")


def main() -> int:
    """Read the command line, measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lab", default="star:4x2@200mbit")
    parser.add_argument("--strategies", nargs="+", default=ROWS)
    parser.add_argument("--json", type=Path, default=Path("out/server_interfaces.json"))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work)
        return 0
    return run_and_judge(args.json, lambda report: measure(args, report))


if __name__ == "__main__":
    sys.exit(main())
