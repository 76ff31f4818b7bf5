"""Servers in virtual time, beside Geryon's Table II.

    python benchmarks/served.py --json out/served.json

No run and no clock: `wingbeat.simulator` with eight workers at a K40's pace and a server beside
each, on 10GbE less headers, nothing encrypted. Gradients are copied and parameters updated on
other devices than those that communicate, as there; messages and sums cost what `Work` says.
Efficiency is computation over the median iteration.

- vanilla: whole tensors on one server each, pulled at the start in random order;
- slicing: shards and slices, pulled at the start in random order;
- Geryon: the same in two classes of flows, pulled in forward order;
- ready: wingbeat's default, where a sum comes back when it is complete, beside the paper's Geryon.

Exit code 1 if they are not in the paper's order, or Geryon's efficiency is below the paper's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common import GERYON_TABLES, write

from wingbeat import paced, simulator, strategies
from wingbeat.bench import machine
from wingbeat.cli.bench import check_writable
from wingbeat.errors import UsageError

GOODPUT = 1448 / 1538
WORKERS = 8
ROWS = {
    "vanilla": "vanillaps:encrypted=false",
    "slicing": "partitionedps:pull=start,order=random,encrypted=false",
    "geryon": "geryon:pull=start,encrypted=false",
    "ready": "geryon:encrypted=false",
}
PAPER = GERYON_TABLES[10.0]


def efficiencies(name: str, iterations: int) -> dict[str, float]:
    model = simulator.of_profile(paced.load_profile(f"{name}_k40"))
    alone = sum(layer.forward_s + layer.backward_s for layer in model.layers)
    links = simulator.Links(bytes_per_s=10e9 / 8 * GOODPUT)
    work = simulator.Work(fill_s_per_byte=0.0, update_s_per_byte=0.0)
    found = {}
    for row, text in ROWS.items():
        choices = strategies.parse(text).choices()
        run = simulator.simulate(model, choices, WORKERS, links, work=work, iterations=iterations)
        found[row] = alone / run.median_s
    return found


def missed(model: str, ours: dict[str, float]) -> list[str]:
    lines = []
    if not ours["vanilla"] < ours["slicing"] < ours["geryon"]:
        lines.append(f"{model}: vanilla, slicing and Geryon are not in the paper's order")
    if ours["geryon"] < PAPER[model][-1]:
        lines.append(f"{model}: Geryon {ours['geryon']:.1%}, the paper {PAPER[model][-1]:.1%}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(PAPER), choices=PAPER, metavar="MODEL")
    parser.add_argument("--iterations", type=int, default=6, help="the first does not count (6)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write all figures")
    args = parser.parse_args()
    report: dict[str, Any] = {"command": sys.argv, "versions": machine.versions(), "models": {}}
    lines = []
    try:
        if args.json:
            check_writable(args.json)
        for model in args.models:
            ours = efficiencies(model, args.iterations)
            report["models"][model] = {"ours": ours, "paper": PAPER[model]}
            lines += missed(model, ours)
            for (row, value), paper in zip(
                ours.items(), (*PAPER[model], PAPER[model][-1]), strict=True
            ):
                print(f"{model:9} {row:8} {value:6.1%}   the paper {paper:6.1%}", flush=True)
    except UsageError as error:
        print(f"served.py: {error}", file=sys.stderr)
        return 2
    report["missed"] = lines
    if args.json:
        write(args.json, report)
    for line in lines:
        print(f"MISSED: {line}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
