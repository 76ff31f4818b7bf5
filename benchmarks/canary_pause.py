"""A worker under bounded staleness that pauses during an iteration, while the others train.

    python benchmarks/canary_pause.py --json out/canary_pause.json

Real processes in a lab train a network of random weights on random numbers with `Canary`. After
some iterations the last rank's training sleeps between forward and backward, as on a slow disk or a
machine that swaps; its process still receives messages. It sleeps until the fastest worker is a
given number of iterations ahead, so that a busy machine gives the same result as an idle one. Each
worker samples, twenty times a second, its number of waiting rounds and its memory.

Limits: the waiting rounds of the paused worker stay within their bound
(`StalenessBound.max_buffered`, and the rounds that the others have not applied yet); it drops an
iteration and pulls parameters once; its memory grows by no more than these rounds and two copies of
the model; all end with equal weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import at_least_one, run_and_judge, show, write

from wingbeat.errors import LabError
from wingbeat_lab import baselines, lab
from wingbeat_lab.bench.table import Printed

LOOK_S = 0.05
AFTER = 20
"""Iterations before the pause."""
UNSAFE = 4
"""Rounds above the bound: those in flight, or not yet applied by the others."""


def main() -> int:
    args = arguments()

    def measure(report: dict[str, Any]) -> list[str]:
        baselines.parse(args.row)
        with tempfile.TemporaryDirectory() as folder:
            report |= run(args, Path(folder))
        show(report, table(report))
        write(args.json, report)
        return judged(report)

    return run_and_judge(args.json, measure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="star:3@1gbit", help="(star:3@1gbit)")
    parser.add_argument(
        "--row", default="canary:s=2,p=2,compression=fp32,encrypted=False",
        help="(canary:s=2,p=2,compression=fp32,encrypted=False)",
    )  # fmt: skip
    parser.add_argument("--mb", type=float, default=8.3, help="of the model, 10**6 bytes (8.3)")
    parser.add_argument(
        "--ahead", type=at_least_one, default=94, help="iterations of the others (94)"
    )
    parser.add_argument("--json", type=Path, default=Path("out/canary_pause.json"), metavar="FILE")
    return parser.parse_args()


def run(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Train in a lab, with one pause."""
    lines: list[str] = []
    words = [str(home), args.row, str(args.mb), str(args.ahead)]
    ended = lab.run(
        args.lab,
        [sys.executable, __file__, "--work", *words],
        env={"WINGBEAT_TOP": "off"},
        on_line=lambda rank, line: lines.append(f"[{rank}] {line}"),
    )
    if ended.exit_code:
        print("\n".join(lines[-40:]))
        raise LabError(f"{args.lab}: {ended.first_failure or ended.exit_code}")
    return {
        "row": args.row,
        "mb": args.mb,
        "ahead": args.ahead,
        "workers": [json.loads(path.read_text()) for path in sorted(home.glob("rank-*"))],
    }


def judged(report: dict[str, Any]) -> list[str]:
    """Return the missed limits."""
    *_, late = report["workers"]
    missed = []
    most = late["keep"] + UNSAFE
    if late["waiting"] > most:
        missed.append(f"{late['waiting']} rounds waited; limit {most}")
    if not late["dropped"] or late["pulled"] != 1:
        missed.append(f"{late['dropped']} iterations dropped, {late['pulled']} pulls; 1 or more, 1")
    grown, limit = late["rss_mb"] - late["rss_before_mb"], (most + 2) * report["mb"]
    if grown > limit:
        missed.append(f"memory grew by {grown:.0f} MB; limit {limit:.0f} MB")
    if any(each["weights"] != late["weights"] for each in report["workers"]):
        missed.append("weights differ in the end")
    return missed


COLUMNS = ("worker", "rounds", "dropped", "pulled", "most waiting", "MB before", "MB at most")


def table(report: dict[str, Any]) -> Printed:
    """Return a row for each worker."""
    cells = [
        (
            f"rank {rank}",
            *(str(each[name]) for name in ("rounds", "dropped", "pulled", "waiting")),
            f"{each['rss_before_mb']:.0f}",
            f"{each['rss_mb']:.0f}",
        )
        for rank, each in enumerate(report["workers"])
    ]
    title = f"{report['row']}, {report['mb']:g} MB: the last rank stands still"
    notes = [f"until the fastest is {report['ahead']} iterations ahead"]
    return Printed.of(title, COLUMNS, cells, notes)


# -- on a host of the lab --------------------------------------------------------------------


class Watch(threading.Thread):
    """Samples this process and its waiting rounds.

    Attributes:
        waiting: maximum number of waiting rounds.
        rss_mb: maximum memory.
    """

    def __init__(self, machine: Any) -> None:
        super().__init__(daemon=True)
        self._machine, self.over = machine, threading.Event()
        self.waiting, self.rss_mb = 0, rss_mb()

    def run(self) -> None:
        """Sample until stopped."""
        while not self.over.wait(LOOK_S):
            self.waiting = max(self.waiting, self._machine.buffered_rounds)
            self.rss_mb = max(self.rss_mb, rss_mb())


def rss_mb() -> float:
    """Return this process's resident memory, in 10**6 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def work(home: Path, row: str, mb: float, ahead: int) -> None:
    """Train; the last rank pauses once, and all end some iterations after that."""
    import torch

    import wingbeat
    from wingbeat.methods.bounded_staleness.build import bounded_exchange

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=300.0)
    torch.manual_seed(0)
    width = int((mb * 1e6 / 4 / 8) ** 0.5)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = wingbeat.distribute(model, optimizer, baselines.parse(row))
    exchange = bounded_exchange(model)
    assert exchange is not None
    machine, watch = exchange.machine, Watch(exchange.machine)
    late = world.rank == world.size - 1
    begun, before, left = 0, 0.0, AFTER
    while left:
        loss = model(torch.randn(1, width)).square().mean()
        begun += 1
        if begun == AFTER:
            before = rss_mb()
            watch.start()
            while late and machine.zeta < begun + ahead:
                time.sleep(LOOK_S)
            if late:
                (home / "over").touch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left -= (home / "over").exists()
    wingbeat.synchronize(model)
    watch.over.set()
    watch.join()
    said = {
        "rounds": machine.applied,
        "dropped": machine.dropped,
        "pulled": machine.pulls,
        "keep": machine.bound.max_buffered,
        "waiting": watch.waiting,
        "rss_before_mb": before,
        "rss_mb": watch.rss_mb,
        "weights": [float(p.detach().double().abs().sum()) for p in model.parameters()],
    }
    (home / f"rank-{world.rank}").write_text(json.dumps(said))
    wingbeat.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
        sys.exit()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
