"""What 20,000 averages in groups leave behind: memory, threads and sockets.

    python benchmarks/averages.py --json out/averages.json
    python benchmarks/averages.py --workers 4 --averages 2000 --row ripples:policy=smart

Real processes train a small model. After each step a worker averages with a group that it
requested (`Ripples`, random groups of 3, which change with each step, so that no connection is
kept for long). Each worker samples its own process repeatedly, and rank 0 the generator's process.

Limit: the maximum of each in the second half is at most 1.05 times the maximum in the first, plus
three; the first tenth of the first half is left out, because libraries and thread pools are still
being loaded (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from common import run_and_judge, show, write

import wingbeat
from wingbeat.errors import LabError, UsageError
from wingbeat_lab import lab
from wingbeat_lab.bench import contenders
from wingbeat_lab.bench.attach import attached
from wingbeat_lab.bench.table import Printed

LOOKS = 60
"""Number of samples of each process."""
GROWTH, MORE = 1.05, 3
KINDS = {"mb": "MB", "threads": "threads", "sockets": "sockets"}
"""What is sampled, and its unit."""


def look(process: psutil.Process) -> dict[str, float]:
    """Resident memory in MB, threads, and sockets of a process."""
    links = [_link(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {
        "mb": process.memory_info().rss / 1e6,
        "threads": process.num_threads(),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def _link(handle: Path) -> str:
    """The target of an open file, which may be closed meanwhile."""
    try:
        return str(handle.readlink())
    except OSError:
        return ""


def worker(args: argparse.Namespace) -> None:
    """Train; save the samples."""
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=120.0)
    torch.manual_seed(world.rank)
    steps = max(LOOKS, args.averages // world.size)
    every = steps // LOOKS
    seen: dict[str, list[dict[str, float]]] = {f"rank {world.rank}": []}
    own = psutil.Process()
    begin = time.monotonic()
    network = torch.nn.Linear(args.width, args.width)
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    with attached(contenders.parse(args.row), network, sgd) as made:
        for step in range(steps):
            made.optimizer.zero_grad()
            made.model(torch.randn(4, args.width)).square().mean().backward()
            made.optimizer.step()
            if step % every == 0:
                seen[f"rank {world.rank}"].append(look(own))
                for child in own.children() if world.rank == 0 else ():
                    seen.setdefault(f"process {child.pid} of rank 0", []).append(look(child))
        seconds = time.monotonic() - begin
    kept = {"seen": seen, "steps": steps, "s": seconds}
    (args.json.parent / f"rank-{world.rank}").write_text(json.dumps(kept))
    wingbeat.shutdown()


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Train once; return the missed limits."""
    if not contenders.parse(args.row).averages:
        raise UsageError(f"--row {args.row}: no models are averaged in groups; take ripples")
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--worker", "--json", f"{folder}/found"]
        for key in ("averages", "row", "width"):
            words += [f"--{key}", str(getattr(args, key))]
        spec = f"loopback:{args.workers}"
        ended = lab.run(spec, words, on_line=lambda rank, line: print(f"[{rank}] {line}"))
        if ended.exit_code:
            raise LabError(f"{spec}: {ended.first_failure or ended.exit_code}")
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*"))]
    seen = {name: looks for each in found for name, looks in each["seen"].items()}
    report["averages"] = sum(each["steps"] for each in found)
    report["s"] = max(each["s"] for each in found)
    report["seen"] = seen
    show(report, table(report, args.row))
    write(args.json, report)
    return missed(seen)


def halves(looks: list[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The maximum of each kind in the first half, without its first tenth, and in the second."""
    begin, middle = -(-len(looks) // 10), len(looks) // 2
    parts = looks[begin:middle] or looks[:1], looks[middle:]
    first, second = ({kind: max(each[kind] for each in part) for kind in KINDS} for part in parts)
    return first, second


COLUMNS = (
    "process",
    *(f"{half} half: {unit}" for half in ("first", "second") for unit in KINDS.values()),
)


def table(report: dict[str, Any], row: str) -> Printed:
    """Return the maximum of each kind in each half for printing."""
    cells = [
        (name, *(f"{half[kind]:.{int(kind == 'mb')}f}" for half in halves(looks) for kind in KINDS))
        for name, looks in report["seen"].items()
    ]
    title = f"{row}: {report['averages']:,} steps, each with an average, in {report['s']:.0f} s"
    return Printed.of(title, COLUMNS, cells)


def missed(seen: dict[str, list[dict[str, float]]]) -> list[str]:
    """A line for each quantity that has grown."""
    out = []
    for name, looks in seen.items():
        first, second = halves(looks)
        out += [
            f"{name}: {kind} {second[kind]:g}, {first[kind]:g} in the first half; limit {GROWTH} "
            f"times and {MORE}"
            for kind in KINDS
            if second[kind] > GROWTH * first[kind] + MORE
        ]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8, help="(8)")
    parser.add_argument("--averages", type=int, default=20_000, help="of all workers (20000)")
    parser.add_argument("--row", default="ripples:policy=random", help="(ripples:policy=random)")
    parser.add_argument("--width", type=int, default=64, help="of the layer that is trained (64)")
    parser.add_argument("--json", type=Path, default=Path("out/averages.json"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    sys.exit(main())
