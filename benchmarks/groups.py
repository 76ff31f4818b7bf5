"""Ripples in virtual time, with all-reduce and servers: time per iteration (Figs. 17 and 19).

    python benchmarks/groups.py --json out/groups.json
    python benchmarks/groups.py --rates 1gbit 10gbit --compute-ms 60
    python benchmarks/groups.py --thresholds 2 4 8 16 64 0
    python benchmarks/groups.py --hosts 250 --iterations 10 --rates 10gbit

16 workers on 4 hosts, whose NICs they share, train VGG-16 for CIFAR-10 in the paper's 9.23 MB. All
workers are equal, or the iterations of one have 2 or 5 times the computation added. Groups are
those of each step of the ablation (section 5), the paper's smart groups (`paper`; `+ filter` is
ours, with three additions), and the static schedule. All-reduce overlaps backward, in buckets;
averages are made after the step. `mixing` is the spectral gap of an iteration of all workers.
Losses are not simulated: the paper's "overall" speed-ups need training.

With `--thresholds` C_thres, for which the paper has no value, is swept instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import refuse_unwritable, show, write

from wingbeat.methods.model_averaging.rules import ABLATION, Rules, count_components, spectral_gap
from wingbeat.simulator import Links, Model, TimedLayer, simulate, simulate_groups
from wingbeat.types import Layout, TensorSpec
from wingbeat_lab import baselines
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.simulated import GOODPUT
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab.spec import parse_rate

NBYTES = 9.23e6
"""Of the model's parameters (section 7.1.2)."""
CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
SIDES = (32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2)
BASELINES = {"PS": "vanillaps", "All-Reduce": "allreduce"}
SLOWED = {"none": 1.0, "+2x": 3.0, "+5x": 6.0}
PAPER = {
    "PS": {"none": 1.0},
    "All-Reduce": {"none": 4.27, "+2x": 1.66},
    "static": {"none": 5.01, "+2x": 2.47},
    "random": {"none": 3.03, "+2x": 2.13},
    "paper": {"none": 5.26, "+2x": 4.23},
}
"""Section 7.4: over PS in time to a loss, which is not time per iteration."""


def main() -> int:
    args = arguments()
    refuse_unwritable(args.json)
    report: dict[str, Any] = {"machine": machine.describe(), "command": sys.argv, "rows": []}
    layout, model = Layout.even(args.hosts, args.workers), vgg16(args.compute_ms / 1e3)
    for rate in args.rates:
        links = Links(bytes_per_s=parse_rate(rate) / 8 * GOODPUT)
        for value in args.thresholds:
            for slowed in SLOWED:
                rules = Rules(threshold=value or None)
                row = grouped(model, rules, layout, links, slowed, args)
                keep(report, rate, f"C_thres={value or 'none'}", slowed, row)
        for slowed in SLOWED if not args.thresholds else ():
            for name, text in BASELINES.items() if layout.workers <= 64 else ():
                keep(report, rate, name, slowed, baseline(model, text, layout, links, slowed))
            steps: dict[str, Rules | None] = {"static": None, **ABLATION, "paper": Rules.paper()}
            for name, step in steps.items():
                row = grouped(model, step, layout, links, slowed, args)
                keep(report, rate, name, slowed, row)
        title = f"{layout.workers} workers on {args.hosts} hosts at {rate}, in virtual time"
        show(report, table([row for row in report["rows"] if row["rate"] == rate], title))
        write(args.json, report)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of a host's card")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4, help="of a host (4)")
    parser.add_argument("--compute-ms", type=float, default=60.0, help="of an iteration (60)")
    parser.add_argument("--iterations", type=int, default=60, help="of each worker (60)")
    parser.add_argument("--jitter", type=float, default=0.02, help="of computation (0.02)")
    parser.add_argument(
        "--thresholds", nargs="+", type=int, default=[], help="values of C_thres; 0: no filter"
    )
    parser.add_argument("--json", type=Path, default=Path("out/groups.json"))
    return parser.parse_args()


def vgg16(compute_s: float) -> Model:
    """Return VGG-16's convolutions, narrowed to the paper's size; time follows multiplications."""
    full = [9 * a * b for a, b in zip((3, *CHANNELS), CHANNELS, strict=False)]
    numels = [max(1, round(n * NBYTES / 4 / sum(full))) for n in full]
    products = [n * side**2 for n, side in zip(numels, SIDES, strict=True)]
    layers = [compute_s * p / sum(products) for p in products]
    return Model(
        tuple(TimedLayer(s / 3, 2 * s / 3, (number,)) for number, s in enumerate(layers)),
        tuple(TensorSpec(f"conv{i}", (n,), "float32", 4) for i, n in enumerate(numels)),
    )


def slow_of(layout: Layout, slowed: str) -> Mapping[int, float]:
    """Return the slow worker, in the middle of a host, so that the static schedule includes it."""
    return {min(5, layout.workers - 1): SLOWED[slowed]} if slowed != "none" else {}


def baseline(model: Model, text: str, layout: Layout, links: Links, slowed: str) -> dict[str, Any]:
    run = simulate(
        model,
        baselines.parse(text),
        layout.workers,
        links,
        layout=layout,
        slow=slow_of(layout, slowed),
    )
    return {"iteration_s": run.median_s}


def grouped(
    model: Model,
    rules: Rules | None,
    layout: Layout,
    links: Links,
    slowed: str,
    args: argparse.Namespace,
) -> dict[str, Any]:
    run = simulate_groups(
        model,
        rules,
        layout,
        links,
        slow=slow_of(layout, slowed),
        iterations=args.iterations,
        jitter=args.jitter,
    )
    groups, workers = run.groups, layout.workers
    each = len(groups) * workers / sum(run.steps)
    return {
        "iteration_s": run.iteration_s,
        "waited": run.waited,
        "averages": run.averages,
        "mixing": spectral_gap(groups, workers) * each if workers <= 256 else None,
        "parts": count_components(groups, workers),
        "steps_of_slow": run.steps[min(5, workers - 1)] / max(run.steps),
    }


def keep(report: dict[str, Any], rate: str, name: str, slowed: str, row: dict[str, Any]) -> None:
    """Add a row, relative to its own speed and to PS's without slow workers."""
    before = report["rows"]
    first = next((r for r in before if (r["rate"], r["name"]) == (rate, "PS")), None)
    alike = next((r for r in before if (r["rate"], r["name"]) == (rate, name)), row)
    row |= {"rate": rate, "name": name, "slowed": slowed}
    row["kept"] = alike["iteration_s"] / row["iteration_s"]
    row["over_ps"] = first["iteration_s"] / row["iteration_s"] if first else None
    before.append(row)


COLUMNS = (
    "groups, one worker slowed",
    "iteration, ms",
    "kept",
    "over PS",
    "paper, to a loss",
    "waits",
    "averages",
    "mixing",
)


def table(rows: Sequence[dict[str, Any]], title: str) -> Printed:
    """Return rows with PS and the paper, for printing."""
    cells = [
        (
            f"{row['name']}, {row['slowed']}",
            f"{1e3 * row['iteration_s']:.1f}",
            f"{row['kept']:.0%}",
            said(row["over_ps"], ".2f"),
            said(PAPER.get(row["name"], {}).get(row["slowed"]), ".2f"),
            said(row.get("waited"), ".0%"),
            said(row.get("averages"), ".2f"),
            said(row.get("mixing"), ".3f"),
        )
        for row in rows
    ]
    notes = ["kept: of the speed with nobody slow; over PS: of PS with nobody slow, by iteration"]
    return Printed.of(title, COLUMNS, cells, notes)


def said(value: float | None, form: str) -> str:
    """Format a figure; None is empty."""
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
