"""Time and CPU time of small all-reduces, beside gloo's and those of plain sockets.

    python benchmarks/latency.py --json out/latency.json
    python benchmarks/latency.py --labs loopback:2 star:4@1gbit --kb 4 64

Each all-reduce is awaited before the next one. Rounds of wingbeat, of ``torch.distributed`` (gloo)
and, with two workers, of processes that exchange the bytes over a plain socket and add them with
numpy, take turns. The CPU time is that of all threads of rank 0, by the kernel's accounting.
"""

from __future__ import annotations

import argparse
import functools
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wingbeat.errors import WingbeatError

LABS = ("loopback:2", "star:4@1gbit")


def plain_sockets(rank: int, size: int, exchange: Callable[..., Any]) -> socket.socket | None:
    """Connect the two ranks of a host; None with more ranks."""
    if size != 2:
        return None
    listener = socket.create_server(("127.0.0.1", 0))
    ports = exchange("plain", listener.getsockname()[1])
    address = "127.0.0.1", ports[0]
    made = listener.accept()[0] if rank == 0 else socket.create_connection(address)
    listener.close()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def sum_over(plain: socket.socket, own: Any, other: Any) -> None:
    """Exchange the bytes of ``own`` and add those of the other rank."""
    plain.sendall(memoryview(own).cast("B"))
    into, at = memoryview(other).cast("B"), 0
    while at < len(into):
        at += plain.recv_into(into[at:])
    own += other


def worker(args: argparse.Namespace) -> None:
    """Time every case on this rank; rank 0 writes the report."""
    import numpy as np
    import torch
    import torch.distributed as dist

    import wingbeat
    from wingbeat.collectives import Collectives

    world = wingbeat.init(timeout=60)
    collectives = Collectives(world)
    plain = plain_sockets(world.rank, world.size, world.exchange) if args.plain else None
    rows: dict[tuple[str, float], dict[str, list[float]]] = {}
    for kb in args.kb:
        buffer = torch.ones(int(kb * 256))
        own, other = buffer.numpy(), np.zeros(int(kb * 256), dtype=np.float32)

        def ours(buffer: torch.Tensor = buffer) -> None:
            collectives.all_reduce(buffer).wait()

        ways: dict[str, Callable[[], Any]] = {
            "wingbeat": ours,
            "gloo": functools.partial(dist.all_reduce, buffer),
        }
        if plain is not None:
            ways["plain sockets"] = functools.partial(sum_over, plain, own, other)
        for turn in range(args.rounds + 1):  # the first one warms up
            for name, once in ways.items():
                dist.barrier()
                times, before = [], time.process_time()
                for _ in range(args.count):
                    begin = time.perf_counter()
                    once()
                    times.append(time.perf_counter() - begin)
                used = (time.process_time() - before) / args.count
                buffer.fill_(0.0)
                if turn:
                    row = rows.setdefault((name, kb), {"ms": [], "cpu_ms": []})
                    row["ms"].append(1e3 * statistics.median(times))
                    row["cpu_ms"].append(1e3 * used)
    if world.rank == 0:
        found = [{"way": way, "kb": kb, **row} for (way, kb), row in rows.items()]
        Path(args.json).write_text(json.dumps(found, indent=1))
    wingbeat.shutdown()


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Run the workers on each lab, and print a table; there are no limits to miss."""
    from common import show, write

    from wingbeat_lab import lab
    from wingbeat_lab.bench.table import Printed

    path = Path(args.json)
    report["labs"] = {}
    for spec in [lab.LabSpec.parse(name) for name in args.labs]:
        words = [sys.executable, __file__, "--worker", "--json", str(path.resolve())]
        words += ["--rounds", str(args.rounds), "--count", str(args.count)]
        words += ["--kb", *map(str, args.kb)]
        words += ["--plain"] * str(spec).startswith("loopback")
        path.parent.mkdir(parents=True, exist_ok=True)
        result = lab.run(spec, words, on_line=lambda rank, line: print(f"[{rank}] {line}"))
        if result.exit_code:
            raise WingbeatError(f"the workers on {spec} ended with status {result.exit_code}")
        rows = report["labs"][str(spec)] = json.loads(path.read_text())
        cells = [
            (
                f"{row['way']}, {row['kb']:g} KB",
                f"{statistics.median(row['ms']):.3f}",
                f"{min(row['ms']):.3f} .. {max(row['ms']):.3f}",
                f"{statistics.median(row['cpu_ms']):.3f}",
            )
            for row in rows
        ]
        columns = ("all-reduce", "ms", "least .. largest", "CPU ms")
        notes = [f"medians of {args.rounds} rounds of {args.count}, each awaited"]
        show(report, Printed.of(f"small all-reduces on {spec}", columns, cells, notes))
        write(path, report)
    return []


def main() -> int:
    """Parse the command line; inside the lab, act as a worker."""
    from common import at_least_one, run_and_judge

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labs", nargs="+", default=list(LABS))
    parser.add_argument("--kb", type=kilobytes, nargs="+", default=[4.0, 64.0, 1024.0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--count", type=at_least_one, default=200, help="all-reduces in a round")
    parser.add_argument("--json", default="out/latency.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    return run_and_judge(Path(args.json), functools.partial(measure, args))


def kilobytes(text: str) -> float:
    """Parse the size of a buffer of at least one element."""
    found = float(text)
    if not 1 / 256 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are kilobytes from 1/256 on")
    return found


if __name__ == "__main__":
    sys.exit(main())
