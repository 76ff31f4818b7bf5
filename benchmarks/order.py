"""The effect of the order of pulls in Geryon's model, with its Fig. 4b and Tables II and III.

    python benchmarks/order.py --json out/order.json

Nothing is measured: `wingbeat_lab.pull_order` runs on the profiles of Geryon's networks at a K40's
and a V100's pace. Fig. 4b is one worker and one server, VGG-19: the speed-up of pulls in forward
order over reverse order. The tables are eight workers with one server on each host, so that 7/8 of
the bytes leave a host; efficiencies are computation over the iteration:

- reverse, random: pulls at the start in that order, random as the mean over seeds;
- conv first: two classes at the start, fully connected layers in the lower; reverse within a class;
- best two: the same with the best of all thresholds of urgency;
- forward: forward order at the start, which is the bound of all orders;
- ready: pulls when their pushes have ended, one class, slices of 4 MiB; at half the rate, because a
  NIC that carries pushes and answers in the same direction gives each at least half.

Exit code 1 if the speed-up at 8 Gbit/s on a K40 is more than 5 points off the paper's 31%, less
than the paper's 100 Gbit/s would do without scheduling, the V100 does not gain most at a higher
rate than the K40, or an order beats the bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from common import GERYON_TABLES as PAPER
from common import show, write

from wingbeat.errors import UsageError
from wingbeat.profiling.profile import FLOAT32_BYTES
from wingbeat_lab import pull_order
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.cli.bench import check_writable
from wingbeat_lab.layer_costs import LayerCosts
from wingbeat_lab.paced.profile import load_profile
from wingbeat_lab.pull_order import Rates, at_start, when_ready

GBIT = 1e9 / 8
DEVICES = {"K40": "vgg19_k40", "V100": "vgg19_v100"}
AT_GBIT, PAPER_SPEEDUP, PAPER_ENOUGH_GBIT, WITHIN = 8.0, 0.31, 100.0, 0.05
"""Section II-C: 31% at 8 Gbit/s with a K40; without scheduling more than 100 Gbit/s are needed."""
WORKERS = 8
SLICE = 4 << 20
OURS = ("reverse", "random", "conv first", "best two", "forward", "ready", "ready, half")


def network(name: str) -> tuple[list[LayerCosts], list[int]]:
    """A profile's layers, and their two classes: 1 for the fully connected."""
    layers = load_profile(name).layers
    rows = [
        LayerCosts(row.forward_ms / 1e3, row.backward_ms / 1e3, float(FLOAT32_BYTES * row.numel))
        for row in layers
    ]
    return rows, [int(row.kind == "linear") for row in layers]


def both(bytes_per_s: float) -> Rates:
    return Rates(push=bytes_per_s, pull=bytes_per_s)


def forward_s(layers: list[LayerCosts], rate: float) -> float:
    return at_start(layers, both(rate), pull_order.in_forward_order(len(layers))).seconds


def reverse_s(layers: list[LayerCosts], rate: float) -> float:
    return at_start(layers, both(rate), pull_order.in_reverse_order(len(layers))).seconds


# -- Fig. 4b ---------------------------------------------------------------------------------


def speedups(rates: list[float]) -> list[dict[str, Any]]:
    """Fig. 4b: for each device and rate, forward over reverse order."""
    rows = []
    for device, name in DEVICES.items():
        layers, _ = network(name)
        for gbit in rates:
            best, worst = forward_s(layers, gbit * GBIT), reverse_s(layers, gbit * GBIT)
            rows.append(
                {
                    "device": device,
                    "gbit": gbit,
                    "forward_s": best,
                    "reverse_s": worst,
                    "speedup": worst / best - 1.0,
                }
            )
    return rows


def enough_gbit(layers: list[LayerCosts], gbit: float, within: float) -> float:
    """Rate from which reverse order is as fast, within a share, as forward order at ``gbit``."""
    wanted = forward_s(layers, gbit * GBIT) * (1.0 + within)
    low, high = gbit, 1e6
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reverse_s(layers, middle * GBIT) <= wanted else (middle, high)
    return high


def peak_gbit(device: str) -> float:
    """The rate from 1 to 100 Gbit/s, in steps of 1, with the largest effect of order."""
    layers, _ = network(DEVICES[device])

    def speedup(gbit: float) -> float:
        return reverse_s(layers, gbit * GBIT) / forward_s(layers, gbit * GBIT)

    return max(map(float, range(1, 101)), key=speedup)


def points() -> dict[str, float]:
    """The paper's statements about Fig. 4b, by our model."""
    layers, _ = network(DEVICES["K40"])
    ours = reverse_s(layers, AT_GBIT * GBIT) / forward_s(layers, AT_GBIT * GBIT) - 1.0
    pull_s = sum(layer.nbytes for layer in layers) / (AT_GBIT * GBIT)
    return {
        "speedup": ours,
        "paper_speedup": PAPER_SPEEDUP,
        "images_per_s": load_profile(DEVICES["K40"]).samples_per_second,
        # The pull is fully exposed in reverse order, and almost hidden in forward order.
        "images_per_s_of_paper": load_profile(DEVICES["K40"]).batch_size * PAPER_SPEEDUP / pull_s,
        "enough_gbit_1_percent": enough_gbit(layers, AT_GBIT, 0.01),
        "enough_gbit_2_percent": enough_gbit(layers, AT_GBIT, 0.02),
        "enough_gbit_5_percent": enough_gbit(layers, AT_GBIT, 0.05),
        "paper_enough_gbit": PAPER_ENOUGH_GBIT,
        "peak_gbit_k40": peak_gbit("K40"),
        "peak_gbit_v100": peak_gbit("V100"),
    }


# -- Tables II and III -----------------------------------------------------------------------


def efficiencies(model: str, gbit: float, seeds: int) -> dict[str, Any]:
    """One row of Table II or III: computation over the iteration, for each way to pull."""
    layers, kinds = network(f"{model}_k40")
    count = len(layers)
    links = both(gbit * GBIT * WORKERS / (WORKERS - 1))
    half = both(links.push / 2)
    reverse = pull_order.in_reverse_order(count)

    def classed(classes: list[int]) -> float:
        return at_start(layers, links, reverse, classes).seconds

    limits = [number / count for number in range(count + 1)]
    swept = {limit: classed(pull_order.classes_by_urgency(count, [limit])) for limit in limits}
    shuffled = [pull_order.in_random_order(count, seed) for seed in range(seeds)]
    seconds = {
        "reverse": at_start(layers, links, reverse).seconds,
        "random": statistics.fmean(at_start(layers, links, some).seconds for some in shuffled),
        "conv first": classed(kinds),
        "best two": min(swept.values()),
        "forward": at_start(layers, links, pull_order.in_forward_order(count)).seconds,
        "ready": when_ready(layers, links, slice_bytes=SLICE).seconds,
        "ready, half": when_ready(layers, half, slice_bytes=SLICE).seconds,
    }
    alone = sum(layer.forward_s + layer.backward_s for layer in layers)
    return {
        "model": model,
        "gbit": gbit,
        "paper": dict(zip(("vanilla", "slicing", "geryon"), PAPER[gbit][model], strict=True)),
        "efficiency": {name: alone / seconds[name] for name in OURS},
        "threshold": min(swept, key=lambda limit: swept[limit]),
        "bound_s": pull_order.floor_at_start(layers, links),
        "seconds": seconds,
    }


# -- results ---------------------------------------------------------------------------------


def missed(said: dict[str, float], tables: list[dict[str, Any]]) -> list[str]:
    """One line for each contradiction of the paper or of the bound."""
    lines = []
    if abs(said["speedup"] - PAPER_SPEEDUP) > WITHIN:
        lines.append(f"K40, {AT_GBIT:g} Gbit/s: {said['speedup']:.1%}, not {PAPER_SPEEDUP:.0%}")
    if said["enough_gbit_2_percent"] <= PAPER_ENOUGH_GBIT:
        lines.append(f"{said['enough_gbit_2_percent']:.0f} Gbit/s do without scheduling")
    if said["peak_gbit_v100"] <= said["peak_gbit_k40"]:
        lines.append("the V100 gains most at no higher rate than the K40")
    for row in tables:
        for name in OURS[: OURS.index("ready")]:
            if row["seconds"][name] < row["bound_s"] * (1 - 1e-9):
                lines.append(f"{row['model']} at {row['gbit']:g} Gbit/s: {name} beats the bound")
    return lines


def figure_table(rows: list[dict[str, Any]], said: dict[str, float]) -> Printed:
    """Return Fig. 4b, and the paper's statements about it."""
    found = {(row["device"], row["gbit"]): row["speedup"] for row in rows}
    cells = [
        (f"{gbit:g}", *(f"{found[device, gbit]:.1%}" for device in DEVICES))
        for gbit in dict.fromkeys(row["gbit"] for row in rows)
    ]
    enough = (f"{said[f'enough_gbit_{p}_percent']:.0f} Gbit/s within {p}%" for p in (1, 2, 5))
    notes = [
        f"K40 at {AT_GBIT:g} Gbit/s: {said['speedup']:.1%}, the paper {PAPER_SPEEDUP:.0%}; theirs "
        f"is {said['images_per_s_of_paper']:.1f} images/s, ours {said['images_per_s']:.1f}",
        f"without scheduling the same takes {', '.join(enough)}; the paper: beyond "
        f"{PAPER_ENOUGH_GBIT:g} Gbit/s",
        f"order matters most at {said['peak_gbit_k40']:g} Gbit/s with K40, at "
        f"{said['peak_gbit_v100']:g} with V100",
    ]
    title = "VGG-19: forward over reverse order (Fig. 4b)"
    return Printed.of(title, ("Gbit/s", *DEVICES), cells, notes)


def efficiency_table(rows: list[dict[str, Any]], seeds: int) -> Printed:
    """Return Tables II and III, with the model's figures."""
    cells = [
        (
            f"{row['gbit']:g} Gbit/s, {row['model']}",
            *(f"{100 * each:.1f}" for each in row["paper"].values()),
            *(f"{100 * each:.1f}" for each in row["efficiency"].values()),
        )
        for row in rows
    ]
    theirs = ("paper: vanilla", "paper: slicing", "paper: Geryon")
    title = f"efficiency in %, {WORKERS} K40 (Tables II and III, then the model)"
    return Printed.of(title, ("network", *theirs, *OURS), cells, [f"random: {seeds} orders"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write all figures")
    parser.add_argument(
        "--gbit", nargs="+", type=float, metavar="RATE", help="of Fig. 4b (1 to 100)",
        default=[1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 16.0, 25.0, 40.0, 64.0, 100.0],
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1000, help="random orders (1000)")
    args = parser.parse_args()
    if args.seeds < 1 or not all(0 < gbit < float("inf") for gbit in args.gbit):
        parser.error("--seeds must be at least 1, and --gbit above 0")
    return args


def run(args: argparse.Namespace) -> int:
    """Compute, print, write, and judge."""
    if args.json:
        check_writable(args.json)
    figure, said = speedups(args.gbit), points()
    tables = [efficiencies(model, gbit, args.seeds) for gbit, row in PAPER.items() for model in row]
    lines = missed(said, tables)
    report: dict[str, Any] = {"command": sys.argv, "versions": machine.versions(), "missed": lines}
    report |= {"figure_4b": figure, "points": said, "efficiencies": tables}
    show(report, figure_table(figure, said))
    show(report, efficiency_table(tables, args.seeds))
    if args.json:
        write(args.json, report)
    for line in lines:
        print(f"MISSED: {line}")
    return int(bool(lines))


def main() -> int:
    """Run; print a user error as one line."""
    try:
        return run(arguments())
    except UsageError as error:
        print(f"order.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
