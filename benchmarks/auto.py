"""Regret of `wingbeat.Auto` against the best of all its candidates, on twelve clusters.

    python benchmarks/auto.py --json out/auto.json
    python benchmarks/auto.py --settings 0 4 --rounds 1
    python benchmarks/auto.py --auto auto:exact=false --settings 0 3 5

Each setting is one bench, in which DDP, each candidate of `Auto` as a preset of its own, and Auto
take turns. Auto decides once, before its first turn, on the same links. Its regret is the median of
its timed iterations over that of the fastest candidate, minus 1. *Choice* is the same for the row
of the chosen candidate, without what Auto's engine costs. One candidate has a second row: how much
the two differ is the noise. *Forecast* is the regret of the candidate that the simulator predicts
to be the fastest, from the exact layer times and link rates, and *its three* that of the best of
the three that it predicts to be fastest: what a trial without the others could reach. With
``--add``, settings that the JSON already has are kept, so that an interrupted run can continue.

Models are paced, or the small network on the digits, and at a fraction of their size with links to
match. Where an iteration would be long or short the setting is in fast or slow motion: times in the
table are at the bench's pace.

Rules (exit code 1 otherwise): the regret is at most 2% on average, and 5% in each setting; on fast
links Auto takes at most 1.01 times as long as DDP; it has decided within 60 iterations.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from common import BEGIN_ANEW, measured_before, run_and_judge, show, write

from wingbeat import parts
from wingbeat.parts.plan import Candidate
from wingbeat_lab.bench import contenders, estimate, runner, simulated
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.results import Run
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab import LabSpec

MEAN_REGRET, MOST_REGRET, OVER_DDP, MOST_ITERATIONS = 0.02, 0.05, 1.01, 60


class Setting(NamedTuple):
    """A cluster and a model.

    Attributes:
        per_host: workers of each host.
        stretch: slow-motion factor.
        iterations: timed ones of each row in a turn.
        fast: whether links are fast, where Auto must not be slower than DDP.
    """

    lab: str
    model: str
    per_host: int = 1
    stretch: float = 1.0
    iterations: int = 4
    fast: bool = False

    @property
    def name(self) -> str:
        """The setting in the table."""
        several = f", {self.per_host} per host" if self.per_host > 1 else ""
        return f"{self.lab}{several}, {self.model.removeprefix('paced:')}"


SETTINGS = (
    Setting("star:4@1gbit", "paced:resnet50@0.05", stretch=0.4),
    Setting("star:4@10gbit", "paced:resnet50@0.05", stretch=2, fast=True),
    Setting("star:2@200mbit", "paced:resnet50@0.05", stretch=0.12),
    Setting("star:2@1gbit", "paced:vgg16@0.02", stretch=0.12),
    Setting("star:2@10gbit", "paced:bert_base@0.02", fast=True),
    Setting("star:4@4gbit", "paced:bert_base@0.02", stretch=0.4),
    Setting("star:3@2gbit,h2@1gbit", "paced:resnet50@0.05", stretch=0.5),
    Setting("star:3x2@1gbit", "paced:vgg16@0.02", stretch=0.18),
    Setting("star:2@1gbit", "paced:resnet50@0.05", per_host=2, stretch=0.5),
    Setting("star:2@4gbit", "paced:bert_base@0.02", per_host=2, stretch=0.5),
    Setting("star:2@10gbit", "digits", iterations=60, fast=True),
    Setting("star:3@200mbit", "digits", iterations=30),
)
REPEATED = "dear:plan=fixed"
"""The second row of the first candidate."""


def candidates(auto: str, topology: str, mb: float = 25.0) -> tuple[Candidate, ...]:
    """Return the candidates of the row ``auto``, which may try a codec."""
    strategy = contenders.parse(auto).strategy
    assert strategy is not None, auto
    return parts.Chosen(mb=mb).candidates(topology, strategy.codec)


def rows_of(setting: Setting, auto: str) -> dict[str, str]:
    """Return the bench rows of Auto's candidates, by their names."""
    # Where hosts have several workers, Auto tries another topology for less data than these have.
    hops = LabSpec.parse(setting.lab).hosts > 2 and setting.per_host == 1
    return {each.name: row_of(each.name) for each in candidates(auto, "mesh" if hops else "")}


def row_of(name: str) -> str:
    """Convert a candidate's name to a bench row.

    >>> row_of("DeAR(plan='fixed', mb=25, compression=Sketch(bits=4, auto_disable=False))")
    'dear:plan=fixed,mb=25,compression=sketch@4:auto_disable=false'
    """
    name = name.replace("Sketch(bits=4, auto_disable=False)", "sketch@4:auto_disable=false")
    name = name.replace("Sketch(auto_disable=False)", "sketch@8:auto_disable=false")
    preset, options = re.fullmatch(r"(\w+)\((.*)\)", name).groups()  # type: ignore[union-attr]
    return f"{preset.lower()}:{options.replace(' ', '')}".replace("'", "")


def config_of(setting: Setting, args: argparse.Namespace) -> BenchConfig:
    """Return the bench of a setting."""
    iterations = args.iterations or setting.iterations
    return BenchConfig(
        lab=setting.lab,
        model=setting.model,
        strategies=("ddp", *rows_of(setting, args.auto).values(), REPEATED, args.auto),
        iterations=iterations * args.rounds,
        rounds=args.rounds,
        warmup=2,
        per_host=setting.per_host,
        stretch=setting.stretch,
        measure=False,
    )


def forecast(setting: Setting, config: BenchConfig) -> list[str]:
    """Return the rows of the candidates in the order that the simulator predicts, if it can."""
    checked = config.check()
    if checked.model.profile is None:
        return []
    names = rows_of(setting, config.strategies[-1])
    rows = [row for row in checked.rows if row.text in names.values()]
    predicted = {row.text: simulated.iteration_s(checked, row) for row in rows}
    return sorted(predicted, key=lambda text: predicted[text])


def judged(setting: Setting, runs: list[Run], order: list[str]) -> dict[str, Any]:
    """Return the figures of a setting from the rows of its bench."""
    times = {run.strategy: statistics.median(run.samples_s) for run in runs}
    auto = runs[-1]
    names = rows_of(setting, auto.strategy)
    assert auto.deciding is not None, "Auto decides before it is timed"
    # A bench scales sizes with the model, and so the numbers in names.
    scale = float(setting.model.partition("@")[2] or 1)
    scaled = (candidates(auto.strategy, "mesh", mb) for mb in (25 * scale, 25.0))
    plain = {a.name: b.name for a, b in zip(*scaled, strict=True)}
    chosen = auto.deciding.decision["strategy"]
    chosen = plain.get(chosen, chosen)
    least = min(times[row] for row in names.values())
    first = next(iter(names.values()))
    own = times[auto.strategy]
    return {
        "setting": setting.name,
        "fast": setting.fast,
        "chosen": chosen,
        "fastest": next(name for name, row in names.items() if times[row] == least),
        "regret": own / least - 1,
        "choice": times[names[chosen]] / least - 1,
        "noise": abs(times[REPEATED] / times[first] - 1),
        "forecast": times[order[0]] / least - 1 if order else None,
        "its three": min(times[row] for row in order[:3]) / least - 1 if order else None,
        "over_ddp": own / times["ddp"],
        "iterations": auto.deciding.iterations,
        "times_s": times,
        "samples_s": {run.strategy: run.samples_s for run in runs},
        "limited_by_cores": auto.limited_by_cores,
    }


def missed(found: list[dict[str, Any]]) -> list[str]:
    """Return the missed limits."""
    mean = statistics.fmean(each["regret"] for each in found)
    out = [f"mean regret {mean:.3f}, allowed: {MEAN_REGRET}"] if mean > MEAN_REGRET else []
    for each in found:
        where = each["setting"]
        if each["regret"] > MOST_REGRET:
            out.append(f"{where}: regret {each['regret']:.3f}, allowed: {MOST_REGRET}")
        if each["fast"] and each["over_ddp"] > OVER_DDP:
            out.append(f"{where}: {each['over_ddp']:.3f} of DDP's time, allowed: {OVER_DDP}")
        if each["iterations"] > MOST_ITERATIONS:
            out.append(f"{where}: {each['iterations']} iterations, allowed: {MOST_ITERATIONS}")
    return out


REGRETS = ("regret", "choice", "noise", "forecast", "its three")
COLUMNS = ("setting", *REGRETS, "of DDP's time", "iterations", "chosen", "")


def table(found: list[dict[str, Any]]) -> Printed:
    """Return a row for each setting, and the mean."""
    lines = [
        (
            each["setting"],
            *("" if each[key] is None else f"{each[key]:.3f}" for key in REGRETS),
            f"{each['over_ddp']:.3f}",
            str(each["iterations"]),
            each["chosen"],
            "cores" if each["limited_by_cores"] else "",
        )
        for each in found
    ]
    known = {key: [each[key] for each in found if each[key] is not None] for key in REGRETS}
    means = [f"{statistics.fmean(own):.3f}" if own else "" for own in known.values()]
    lines.append(("mean", *means, "", "", "", ""))
    notes = [
        "regret: Auto's time after its decision over the fastest candidate's, minus 1; choice: the "
        "chosen candidate's as a preset; noise: of one candidate measured twice; forecast: of the "
        "candidate that the simulator predicts to be fastest; its three: of the best of three; "
        "cores: limited by this machine's processors",
        *missed(found),
    ]
    return Printed.of("Auto against the best of its candidates", COLUMNS, lines, notes)


def measure(
    args: argparse.Namespace, kept: list[dict[str, Any]], report: dict[str, Any]
) -> list[str]:
    """Measure the settings that the report lacks; return the missed limits."""
    found = report["settings"] = kept
    known = {each["setting"] for each in kept}
    asked = [SETTINGS[number] for number in args.settings]
    todo = {s: config_of(s, args) for s in asked if s.name not in known}
    about = estimate.about(estimate.of_all(todo.values()))
    print(f"{len(todo)} settings, about {about}", file=sys.stderr, flush=True)
    for setting, config in todo.items():
        order = forecast(setting, config)
        runs = runner.run(config, command=sys.argv).report.runs
        found.append(judged(setting, runs, order))
        write(args.json, report)
        print(f"\n{table(found).text()}", flush=True)
    show(report, table(found))
    write(args.json, report)
    return missed(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = list(range(len(SETTINGS)))
    parser.add_argument(
        "--settings", nargs="+", type=int, default=every, choices=every, metavar="NUMBER"
    )
    parser.add_argument("--auto", default="auto", help="the row of Auto (auto)")
    parser.add_argument("--rounds", type=int, default=3, help="how often rows take turns (3)")
    parser.add_argument("--iterations", type=int, help="timed ones of a turn (by setting)")
    parser.add_argument("--add", action="store_true", help="keep the settings that the JSON has")
    parser.add_argument("--json", type=Path, default=Path("out/auto.json"))
    args = parser.parse_args()
    kept = measured_before(args.json, "settings", BEGIN_ANEW) if args.add else []
    return run_and_judge(args.json, functools.partial(measure, args, kept))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
