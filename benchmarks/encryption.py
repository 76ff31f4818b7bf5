"""What encrypting the connections of collectives costs: CPU time, and time of an iteration.

    python benchmarks/encryption.py --json out/encryption.json
    python benchmarks/encryption.py --labs star:4@10gbit --model paced:resnet50@0.2

First, messages over a loopback connection whose two ends are in this process, plain and encrypted
in turn: CPU seconds of all threads for each gigabyte, sent and received. Then iterations of a paced
model in a lab, with plain and with encrypted connections in turn. The rate of a lab's links scales
with the model, as in ``wingbeat bench``.

Rule: encrypted connections take at most 0.55 CPU seconds a gigabyte, and an iteration at most 1.03
of the time of a plain one (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import at_least_one, run_and_judge, show, write

from wingbeat import _native
from wingbeat.transport.encryption import VARIABLE
from wingbeat_lab.bench import runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.table import Printed

MOST_CPU_S_PER_GB, MOST_ITERATION = 0.55, 1.03
KINDS = {"plain": "0", "encrypted": "1"}
"""The compared connections, and the environment variable of each."""


def connected(kind: str) -> Callable[[torch.Tensor, torch.Tensor, int], None]:
    """Connect two ends over loopback; the function sends a tensor into another with a tag."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keys = b"" if kind == "plain" else bytes(range(32))
    sender, receiver = _native.Nic("lo"), _native.Nic("lo")
    sender.add(1, one.detach(), keys)
    receiver.add(0, other.detach(), keys[16:] + keys[:16])
    outgoing, incoming = _native.Group(sender, 0, [1]), _native.Group(receiver, 0, [0])

    def move(source: torch.Tensor, target: torch.Tensor, tag: int) -> None:
        coming = incoming.receive(target, target.data_ptr(), target.nbytes, 0, 0, tag)
        outgoing.send(source, source.data_ptr(), source.nbytes, 0, 0, tag).wait(60.0)
        coming.wait(60.0)

    return move


def of_connections(args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds a gigabyte, of each kind in each round."""
    source, target = torch.ones(args.mb << 18), torch.zeros(args.mb << 18)
    moves = {kind: connected(kind) for kind in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(args.turns + 1):  # the first one warms up
        for kind, move in moves.items():
            before = time.process_time()
            for number in range(args.count):
                move(source, target, turn * args.count + number)
            if turn > 0:
                found[kind].append(
                    (time.process_time() - before) / (args.count * source.nbytes / 1e9)
                )
    return found


def bench_of(args: argparse.Namespace, lab: str) -> BenchConfig:
    """Return the checked description of a run."""
    bench = BenchConfig(
        lab=lab,
        model=args.model,
        strategies=(args.strategy,),
        iterations=args.iterations,
        rounds=1,
        warmup=4,
        measure=False,
    )
    bench.check()
    return bench


def of_iterations(bench: BenchConfig, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Median time of an iteration and mean CPU time of a worker in it, of each kind and round."""
    found: dict[str, dict[str, list[float]]] = {kind: {"s": [], "cpu_s": []} for kind in KINDS}
    for _ in range(rounds):
        for kind, value in KINDS.items():
            os.environ[VARIABLE] = value
            (run,) = runner.run(bench, command=sys.argv).report.runs
            found[kind]["s"].append(run.iteration_s.median)
            found[kind]["cpu_s"].append(statistics.fmean(run.cpu_s_per_iteration["worker"]))
    return found


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report; return the missed limits."""
    out, benches = [], {lab: bench_of(args, lab) for lab in args.labs}
    report["cpu_s_per_gb"] = found = of_connections(args)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    cells = [[kind, f"{min(found[kind]):.2f}", f"{medians[kind]:.2f}"] for kind in KINDS]
    columns = ["connection", "CPU s a GB, least", "median"]
    notes = [f"both ends together, messages of {args.mb} MB over loopback, {args.turns} rounds"]
    show(report, Printed.of("CPU time of a connection", columns, cells, notes))
    write(args.json, report)
    if medians["encrypted"] > MOST_CPU_S_PER_GB:
        out.append(f"{medians['encrypted']:.2f} CPU s a GB; limit {MOST_CPU_S_PER_GB}")
    for lab, bench in benches.items():
        rows = report.setdefault("labs", {})[lab] = of_iterations(bench, args.rounds)
        ratio = statistics.median(
            encrypted / plain
            for plain, encrypted in zip(rows["plain"]["s"], rows["encrypted"]["s"], strict=True)
        )
        cells = [
            [kind, *(f"{statistics.median(rows[kind][key]) * 1e3:.1f}" for key in ("s", "cpu_s"))]
            for kind in KINDS
        ]
        notes = [f"encrypted, of plain: {ratio:.3f}, the median of {args.rounds} pairs"]
        columns = ["connections", "iteration, ms", "CPU of a worker, ms"]
        show(report, Printed.of(f"{args.strategy} on {lab}", columns, cells, notes))
        write(args.json, report)
        if ratio > MOST_ITERATION:
            out.append(f"{lab}: {ratio:.3f} of a plain iteration; limit {MOST_ITERATION}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=at_least_one, default=32, help="size of a message (32)")
    parser.add_argument("--count", type=at_least_one, default=4, help="messages in a turn (4)")
    parser.add_argument("--turns", type=at_least_one, default=40, help="of each connection (40)")
    parser.add_argument("--labs", nargs="*", default=["star:4@10gbit"], metavar="LAB")
    parser.add_argument("--model", default="paced:resnet50@0.2", help="(paced:resnet50@0.2)")
    parser.add_argument("--strategy", default="allreduce", help="(allreduce)")
    parser.add_argument("--iterations", type=at_least_one, default=20, help="timed in a run (20)")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="runs of each kind (5)")
    parser.add_argument("--json", type=Path, default=Path("out/encryption.json"))
    args = parser.parse_args()
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
