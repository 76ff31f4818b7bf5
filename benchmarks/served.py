"""Servers in virtual time, compared with Geryon's Table II.

    python benchmarks/served.py --json out/served.json

Nothing is measured: `wingbeat.simulator` has eight workers at a K40's pace and one server on each
host, on 10GbE less headers, nothing encrypted. Gradients are copied and parameters updated on
other devices than those that communicate, as in the paper; messages and sums cost what `Work`
defines. Efficiency is computation over the median iteration.

- vanilla: whole tensors on one server each, pulled at the start in random order;
- slicing: shards and slices, pulled at the start in random order;
- Geryon: the same in two classes of flows, pulled in forward order;
- ready: wingbeat's default, where a sum is returned when complete, next to the paper's Geryon;
- coarse: Geryon with fully connected layers in the second class;
- tuned: Geryon with the thresholds that the tuner of real runs finds, for 2, 3 and 4 classes.

VGG-19's throughput is the paper's; the three others are derived and accurate within a factor of two
(``docs/developers/paced-models.md``). So Geryon's efficiencies are an interval: the brackets have
those of a device that takes twice as long, and half as long.

Thresholds of two classes are swept as well. Exit code 1 if the rows are not in the paper's order,
Geryon's efficiency is below the paper's, as the preset is or as the paper has it (pulled at the
start, tuned with two classes), or the tuned threshold is more than 2% slower than the best of the
sweep.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common import GERYON_TABLES, show, write

from wingbeat import simulator
from wingbeat.errors import UsageError
from wingbeat_lab import baselines, paced
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.cli.bench import check_writable

GOODPUT = 1448 / 1538
WORKERS = 8
WORK = simulator.Work(fill_s_per_byte=0.0, update_s_per_byte=0.0)
ROWS = {
    "vanilla": "vanillaps:encrypted=false",
    "slicing": "partitionedps:pull=start,order=random,encrypted=false",
    "geryon": "geryon:pull=start,encrypted=false",
    "ready": "geryon:encrypted=false",
    "coarse": "geryon:pull=start,encrypted=false,threshold=coarse",
}
TUNED = "geryon:pull=start,encrypted=false,threshold=tuned,classes={}"
OFF_BEST = 1.02
PAPER = GERYON_TABLES[10.0]
DERIVED = ("alexnet", "resnet50", "yolo")
OFF_PACE = (2.0, 0.5)
"""Maximum error of the derived times, as a factor."""


@dataclass(frozen=True)
class Setting:
    """One of the paper's models on eight hosts and 10GbE, its times multiplied by ``pace``."""

    name: str
    iterations: int
    pace: float = 1.0

    @cached_property
    def model(self) -> simulator.Model:
        return paced.simulator_model(paced.load_profile(f"{self.name}_k40"), self.pace)

    @property
    def alone_s(self) -> float:
        return sum(layer.forward_s + layer.backward_s for layer in self.model.layers)

    @property
    def links(self) -> simulator.Links:
        return simulator.Links(bytes_per_s=10e9 / 8 * GOODPUT)

    def efficiency(self, text: str) -> float:
        strategy = baselines.parse(text)
        run = simulator.simulate(
            self.model, strategy, WORKERS, self.links, work=WORK, iterations=self.iterations
        )
        return self.alone_s / run.median_s

    def tuned(self, classes: int, points: int) -> dict[str, Any]:
        """The tuner's result and, for two classes, a sweep of thresholds and all its trials."""
        strategy = baselines.parse(TUNED.format(classes))
        thresholds = simulator.Thresholds(self.model, strategy, WORKERS, self.links, work=WORK)
        result = thresholds.tuned()
        seconds = result.seconds(result.chosen)
        found = {
            "thresholds": result.thresholds,
            "trials": len(result.samples),
            "efficiency": self.alone_s / seconds,
        }
        if classes == 2 and points:
            levels = thresholds.all_levels()
            last, count = len(levels) - 1, min(points, len(levels))
            some = {levels[round(i * last / max(count - 1, 1))] for i in range(count)}
            swept = thresholds.sweep(sorted(some, reverse=True))
            found["sweep"] = {level: self.alone_s / each for level, each in swept.items()}
            found["of_best"] = seconds / min(*swept.values(), seconds)
        return found


def missed(model: str, ours: dict[str, float], tuned: dict[int, dict[str, Any]]) -> list[str]:
    lines = []
    if not ours["vanilla"] < ours["slicing"] < ours["geryon"]:
        lines.append(f"{model}: vanilla, slicing and Geryon are not in the paper's order")
    marks = {"pulled when ready": ours["ready"]}
    if 2 in tuned:
        marks["tuned"] = tuned[2]["efficiency"]
        best = tuned[2].get("of_best", 1.0)
        if best > OFF_BEST:
            lines.append(f"{model}: the tuned threshold takes {best:.3f} of the best one's time")
    for how, mark in marks.items():
        if mark < PAPER[model][-1]:
            lines.append(f"{model}: Geryon {how} {mark:.1%}, the paper {PAPER[model][-1]:.1%}")
    return lines


def rows_table(
    model: str,
    ours: dict[str, float],
    tuned: dict[int, dict[str, Any]],
    paces: dict[str, list[float]],
) -> Printed:
    """Return one model's efficiencies with the paper's."""
    paper = dict(zip(("vanilla", "slicing", "geryon"), PAPER[model], strict=True))
    cells = [
        (
            row,
            f"{value:.1%}",
            " and ".join(f"{end:.1%}" for end in paces.get(row, ())),
            f"{paper.get(row, PAPER[model][-1]):.1%}",
            "",
            "",
            "",
        )
        for row, value in ours.items()
    ]
    cells += [
        (
            f"tuned, {classes} classes",
            f"{found['efficiency']:.1%}",
            "",
            f"{PAPER[model][-1]:.1%}",
            " + ".join(f"{level:.3f}" for level in found["thresholds"]),
            str(found["trials"]),
            f"{found['of_best']:.3f}" if "of_best" in found else "",
        )
        for classes, found in tuned.items()
    ]
    columns = (
        "servers",
        "efficiency",
        "if the pace is off by two",
        "paper",
        "thresholds",
        "trials",
        "time, of the best swept",
    )
    return Printed.of(f"{model}: {WORKERS} workers, 10GbE, virtual time", columns, cells)


def sweep_table(model: str, sweep: dict[float, float]) -> Printed:
    """Return the effect of thresholds of two classes."""
    cells = [(f"{level:.2f}", f"{value:.1%}") for level, value in sweep.items()]
    return Printed.of(f"{model}: thresholds of two classes", ("threshold", "efficiency"), cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(PAPER), choices=PAPER, metavar="MODEL")
    parser.add_argument(
        "--iterations", type=int, default=6, help="of a row (6); the first does not count"
    )
    parser.add_argument(
        "--classes", nargs="*", type=int, default=[2, 3, 4], choices=(2, 3, 4), metavar="N",
        help="of which thresholds are tuned (2 3 4)",
    )  # fmt: skip
    parser.add_argument("--sweep", type=int, default=12, help="thresholds of two classes (12)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write all figures")
    args = parser.parse_args()
    report: dict[str, Any] = {"command": sys.argv, "versions": machine.versions(), "models": {}}
    lines = []
    try:
        if args.json:
            check_writable(args.json)
        for model in args.models:
            setting = Setting(model, args.iterations)
            ours = {row: setting.efficiency(text) for row, text in ROWS.items()}
            tuned = {classes: setting.tuned(classes, args.sweep) for classes in args.classes}
            ends = [Setting(model, args.iterations, pace) for pace in OFF_PACE]
            paces = {row: [end.efficiency(ROWS[row]) for end in ends]
                     for row in ("geryon", "ready") if model in DERIVED}  # fmt: skip
            report["models"][model] = {
                "ours": ours, "paper": PAPER[model], "tuned": tuned, "pace_off_by_two": paces,
            }  # fmt: skip
            lines += missed(model, ours, tuned)
            show(report, rows_table(model, ours, tuned, paces))
            for found in tuned.values():
                if "sweep" in found:
                    show(report, sweep_table(model, found["sweep"]))
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
