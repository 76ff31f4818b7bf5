"""Averages of models over one network interface per host and over two: bytes by NIC, and time.

    python benchmarks/average_interfaces.py --json out/average_interfaces.json

Real processes, two on each host of a lab, average a model after each step, without computation. The
kernel's counters of each NIC give the bytes that a host sends, which are divided by its workers and
steps; traffic between workers of one host uses no NIC. Each row runs with both NICs and with the
first alone, one after the other, in each round.

Limit: with two NICs each sends at least a third of the bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat.errors import LabError
from wingbeat_lab import baselines, lab
from wingbeat_lab.bench.table import Printed

CARDS = ("eth0", "eth1")
ROWS = (
    "ripples:policy=static",
    "ripples:policy=smart",
    "localsgd:every=1",
    "diloco:every=1",
    "adpsgd:overlap=false",
)
LEAST = 1 / 3
"""Share of the bytes that each of two NICs must send."""
PATIENCE_S = 120.0


def main() -> int:
    """Run all rows, and print one table."""
    args = arguments()

    def measure(report: dict[str, Any]) -> list[str]:
        for row in args.rows:
            baselines.parse(row)
        for each, row in itertools.product(range(args.rounds), args.rows):
            for number in (2, 1):
                rows = report.setdefault("rows", {})
                rows.setdefault(row, {}).setdefault(str(number), []).append(
                    run(args.lab, row, number, args.per_host, args.steps, args.mb)
                )
            print(f"round {each + 1} of {args.rounds}: {row}", file=sys.stderr)
        show(report, table(report, args.lab))
        write(args.json, report)
        return judged(report)

    return run_and_judge(args.json, measure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="star:4x2@200mbit", help="(star:4x2@200mbit)")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW")
    parser.add_argument("--per-host", type=int, default=2, help="workers (2)")
    parser.add_argument("--steps", type=int, default=20, help="of each worker (20)")
    parser.add_argument("--mb", type=float, default=4.0, help="of the model (4)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    parser.add_argument(
        "--json", type=Path, default=Path("out/average_interfaces.json"), metavar="FILE"
    )
    return parser.parse_args()


def run(spec: str, row: str, cards: int, per_host: int, steps: int, mb: float) -> dict[str, Any]:
    """Return the seconds of a step, and the MB that a worker sends in it, by NIC."""
    lines: list[str] = []
    words = ["--work", row, str(cards), str(steps), str(mb)]
    ended = lab.run(
        spec,
        [sys.executable, __file__, *words],
        per_host=per_host,
        env={"WINGBEAT_TOP": "off"},
        on_line=lambda _, line: lines.append(line),
        timeout=2 * PATIENCE_S,
    )
    found = [json.loads(line) for line in lines if line.startswith("{")]
    if ended.exit_code or not found:
        print("\n".join(lines[-20:]), file=sys.stderr)
        raise LabError(f"{spec}: {row}: {ended.first_failure or ended.exit_code}")
    sent = {
        card: statistics.fmean(each["sent"][card] for each in found if each["sent"]) / per_host
        for card in CARDS
    }
    return {
        "seconds": max(each["seconds"] for each in found) / steps,
        "mb": {card: value / steps / 1e6 for card, value in sent.items()},
    }


COLUMNS = (
    "strategy",
    *(f"{card}, MB a step" for card in CARDS),
    *(f"{part}, ms" for n in ("two cards", "one card") for part in (n, f"{n}, least .. largest")),
    "one / two",
)


def table(report: dict[str, Any], spec: str) -> Printed:
    """Return a row for each strategy."""
    cells = []
    for row, found in report["rows"].items():
        mb = [statistics.fmean(each["mb"][card] for each in found["2"]) for card in CARDS]
        ms = {n: [1e3 * each["seconds"] for each in found[n]] for n in ("2", "1")}
        means = {n: statistics.fmean(values) for n, values in ms.items()}
        times = []
        for n, values in ms.items():
            times += [f"{means[n]:.1f}", f"{min(values):.1f} .. {max(values):.1f}"]
        ratio = means["1"] / means["2"]
        cells.append((row, *(f"{each:.3f}" for each in mb), *times, f"{ratio:.2f}"))
    return Printed.of(f"averages over one card and over two of {spec}", COLUMNS, cells)


def judged(report: dict[str, Any]) -> list[str]:
    """Return the missed limits."""
    missed = []
    for row, found in report["rows"].items():
        for each in found["2"]:
            least = min(each["mb"].values()) / sum(each["mb"].values())
            if least < LEAST:
                missed.append(f"{row}: a card has {least:.2f} of the bytes; limit {LEAST:.2f}")
    return missed


# -- on a host of the lab --------------------------------------------------------------------


def work(row: str, cards: int, steps: int, mb: float) -> None:
    """Run steps; report their time and the bytes sent by the host's NICs."""
    import os
    import time

    import torch

    import wingbeat
    from wingbeat_lab.lab import counters

    def sent() -> dict[str, int]:
        return {card: counters.read()[card].tx_bytes for card in CARDS}

    torch.set_num_threads(1)
    wingbeat.init(timeout=PATIENCE_S, interfaces=list(CARDS[:cards]))
    model = torch.nn.Linear(1000, max(1, round(mb * 250)), bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = wingbeat.distribute(model, optimizer, baselines.parse(row))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()  # creates connections
    wingbeat.synchronize(model)
    before, begin = sent(), time.monotonic()
    for _ in range(steps):
        optimizer.step()
    seconds = time.monotonic() - begin
    # A worker that is ahead sends only averages; bytes of synchronize() are not counted.
    after = sent()
    wingbeat.synchronize(model)
    first = int(os.environ["LOCAL_RANK"]) == 0
    moved = {card: after[card] - before[card] for card in CARDS} if first else None
    print(json.dumps({"seconds": seconds, "sent": moved}), flush=True)
    wingbeat.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
        sys.exit()
    sys.exit(main())
