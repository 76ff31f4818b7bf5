"""The simulator's predictions beside the lab's measurements, for a fixed grid.

    python benchmarks/validation.py --json out/validation.json
    python benchmarks/validation.py --models vgg16 --settings uneven --strategies allreduce dear
    python benchmarks/validation.py --kept docs/results/validation.json      (measures nothing)

A cell of the grid is a model in a setting of the lab: real workers, sockets and shaped links, with
paced compute. Its strategies then run in virtual time, with the same plan, schedule and machine, on
links of the same rate less headers, and on as many processors, which all hosts share
(`wingbeat_lab.bench.simulated`). Codecs have the prices that the lab has found before each row, and
training threads the costs of this machine, which are measured first on workers that train alone
(`wingbeat_lab.bench.costs`). Other costs of the simulator come from measurements of single
operations, never from these runs. ``HELD_BACK`` names the cells that are not read while costs are
changed; they are reported apart.

A run that was interrupted goes on where it ended: cells of the same commit in the JSON are kept.
``--kept`` predicts again beside the measurements of a report, and measures nothing.

Exit code 1 if the median error of a group is more than 4%, one is more than 10%, or two strategies
of a cell that differ by more than 4% are ranked wrongly.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat.errors import UsageError, unknown
from wingbeat_lab.bench import costs, runner, simulated
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.table import Printed

MEDIAN, WORST, RANKED = 0.04, 0.10, 0.04


@dataclass(frozen=True, slots=True)
class Setting:
    """A lab, for a model whose usual rate is ``{rate}`` Mbit/s.

    ``part``: of each worker's model, where more than four share the two processors. ``apart``:
    strategies without lockstep run here too.
    """

    lab: str
    share: float = 1.0
    per_host: int = 1
    part: float = 1.0
    apart: bool = False

    def of(self, rate: float) -> str:
        """Return the lab's text for a model's rate."""
        return self.lab.format(
            rate=f"{rate * self.share:g}mbit", slow=f"{rate * self.share / 2.5:g}mbit"
        )


SETTINGS = {
    "slow": Setting("star:4@{rate},prio=2", apart=True),
    "fast, 2 a host": Setting("star:3@{rate},prio=2", share=2.5, per_host=2, part=0.6),
    "4 a host": Setting("star:2@{rate},prio=2", per_host=4, part=0.6),
    "two NICs": Setting("star:4x2@{rate},prio=2", share=0.6),
    "uneven": Setting("star:4@{rate},h3@{slow},prio=2", share=2),
    "fat-tree": Setting("fat-tree:4/2@{rate}+{rate},prio=2", share=1.2),
}


@dataclass(frozen=True, slots=True)
class Scaled:
    """A bundled model: its usual rate in Mbit/s, and its scales.

    With ``coded``, for strategies with codecs, it has more bytes: the smaller the model, the more
    of a call's time is fixed, and the less exact is the price of its bytes.
    """

    rate: float
    scale: float
    coded: float


MODELS = {
    "resnet50": Scaled(4000, 0.06, 0.2),
    "vgg16": Scaled(16000, 0.012, 0.04),
    "bert_base": Scaled(12000, 0.015, 0.05),
    "alexnet": Scaled(10000, 0.025, 0.08),
}

HELD_BACK = (
    ("resnet50", "uneven"),
    ("vgg16", "fat-tree"),
    ("bert_base", "fast, 2 a host"),
    ("alexnet", "two NICs"),
)
"""Cells that are not read while costs are changed."""

STRATEGIES = {
    "allreduce": "allreduce",
    "dear": "dear:plan=fixed",
    "dear, merged": "dear:plan=merged,steps=1",
    "dear, sketch": "dear:plan=fixed,compression=sketch:auto_disable=false",
    "allreduce, sketch@4": "allreduce:compression=sketch@4:auto_disable=false",
    "allreduce, low rank": "allreduce:compression=lowrank@1:auto_disable=false",
    "omgs": "omgs:merge=exact,steps=1,compression=topk@0.01:auto_disable=false",
    "geryon": "geryon",
    "canary": "canary:s=2,p=none,colayers=8,compression=fp32",
    "ripples": "ripples",
    "adpsgd": "adpsgd",
    "local steps": "localsgd:every=4",
}

CODED = ("dear, sketch", "allreduce, sketch@4", "allreduce, low rank", "omgs")
"""Strategies with codecs."""

APART = ("canary", "ripples", "adpsgd", "local steps")
"""Strategies without lockstep: means of more iterations, in a turn of their own."""

FEW = {"iterations": 4, "rounds": 1, "warmup": 1}
MANY = {"iterations": 8, "rounds": 1, "warmup": 2}
"""Timed iterations of a strategy in its turns; local steps need whole periods."""

Row = dict[str, Any]
Cell = dict[str, Any]


def main() -> int:
    args = arguments()
    return run_and_judge(args.json, functools.partial(validate, args))


def validate(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report with cells that are measured, or kept; return the missed limits."""
    report |= {"commit": commit(), "cells": []}
    if args.kept:
        report["cells"] = [again(cell) for cell in cells_in(args.kept) if asked(args, cell)]
    else:
        measure(args, report)
    judge(report)
    write(args.json, report)
    return list(report["missed"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, known in (("settings", SETTINGS), ("models", MODELS), ("strategies", STRATEGIES)):
        parser.add_argument(f"--{name}", nargs="+", default=list(known), metavar="NAME")
    parser.add_argument("--iterations", type=int, help="of a row in lockstep")
    parser.add_argument("--rounds", type=int, help="turns of a row in lockstep")
    parser.add_argument("--kept", type=Path, help="predict beside a report's measurements")
    parser.add_argument("--json", type=Path, default=Path("out/validation.json"))
    args = parser.parse_args()
    for name, known in (("settings", SETTINGS), ("models", MODELS), ("strategies", STRATEGIES)):
        for given in getattr(args, name):
            if given not in known:
                print(f"validation.py: {unknown(name, given, list(known))}", file=sys.stderr)
                sys.exit(2)
    return args


def commit() -> str:
    """Return the commit, with a mark if code was changed since."""
    words = ("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", "src", "native")
    head, changes = (
        subprocess.run(
            ["git", *each], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
        for each in words
    )
    return f"{head} with changes" if changes else head


def cells_in(path: Path) -> list[Cell]:
    """Return the cells of a report; UsageError if it is none."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        cells = kept.get("report", kept)["cells"]  # as written here, or by tools/figures.py
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{str(path)!r} is no report of validation.py: {error}") from None
    return list(cells)


def asked(args: argparse.Namespace, cell: Cell) -> bool:
    return cell["model"] in args.models and cell["setting"] in args.settings


def measure(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Fill in all cells; those that the JSON of the same commit has are not measured again."""
    known = {(cell["model"], cell["setting"]): cell for cell in resumed(args.json, report)}
    pairs = list(itertools.product(args.models, args.settings))
    configs = {pair: list(benches(args, *pair)) for pair in pairs}
    for config in itertools.chain(*configs.values()):
        config.check()  # refuse what cannot be measured before anything is
    began = time.monotonic()
    machine = functools.cache(lambda: asdict(costs.measure()))
    for number, (model, setting) in enumerate(pairs, 1):
        cell = known.get((model, setting))
        wanted = [text for config in configs[model, setting] for text in config.strategies]
        if cell is None or [row["strategy"] for row in cell["rows"]] != wanted:
            cell = measured(model, setting, configs[model, setting], machine())
        report["cells"].append(cell)
        write(args.json, report)
        passed = time.monotonic() - began
        print(
            f"{number} of {len(pairs)} cells: {model}, {setting}; {passed:.0f} s so far",
            file=sys.stderr,
            flush=True,
        )


def resumed(path: Path, report: dict[str, Any]) -> list[Cell]:
    """Return the cells of an interrupted run of the same commit."""
    text = path.read_text(encoding="utf-8")  # empty if it is new
    if not text or report["commit"].endswith("changes"):
        return []
    try:
        found = json.loads(text)
        return list(found["cells"]) if found["commit"] == report["commit"] else []
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{str(path)!r} is no report of validation.py: {error}") from None


def benches(args: argparse.Namespace, model: str, setting: str) -> Iterator[BenchConfig]:
    """Yield the benches of a cell: dense, coded, and without lockstep if these run there."""
    lab, scaled, few = SETTINGS[setting], MODELS[model], dict(FEW)
    for name in ("iterations", "rounds"):
        if getattr(args, name) is not None:
            few[name] = getattr(args, name)
    dense = [each for each in args.strategies if each not in (*CODED, *APART)]
    coded = [each for each in args.strategies if each in CODED]
    apart = [each for each in args.strategies if each in APART and lab.apart]
    parts = (dense, scaled.scale, few), (coded, scaled.coded, few), (apart, scaled.scale, MANY)
    for names, scale, counts in parts:
        if names:
            yield BenchConfig(
                lab=lab.of(scaled.rate),
                model=f"paced:{model}@{scale * lab.part:g}",
                strategies=tuple(STRATEGIES[each] for each in names),
                per_host=lab.per_host,
                measure=False,
                iterations=counts["iterations"],
                rounds=counts["rounds"],
                warmup=counts["warmup"],
            )


def measured(
    model: str, setting: str, configs: Sequence[BenchConfig], machine: Mapping[str, float]
) -> Cell:
    """Measure and predict one cell, with the machine's costs."""
    rows: list[Row] = []
    load = []
    for config in configs:
        raw = runner.run(config, command=sys.argv).report.to_json()
        load.append(raw["machine"]["load_before"])
        for run in raw["runs"]:
            cpu_s = sum(sum(each) for each in run["cpu_s_per_iteration"].values())
            rows.append(
                {
                    "strategy": run["strategy"],
                    "config": plain(config, run["strategy"]),
                    "lab_s": run["typical_s"],
                    "lab_spread_s": run["iteration_s"],
                    "cpu_s": cpu_s,
                    "prices": run["codec_prices"],
                }
            )
    cores = simulated.machine_cores()
    cell = {"model": model, "setting": setting, "cores": cores, "costs": machine, "load": load}
    return again({**cell, "rows": rows})


def plain(config: BenchConfig, strategy: str) -> dict[str, Any]:
    """Return a config of one row as plain values."""
    return {**json.loads(config.to_json()), "strategies": [strategy]}


def again(cell: Cell) -> Cell:
    """Return a cell with predictions of its rows, as they are now."""
    rows, machine = [], costs.Costs(**cell["costs"])
    for row in cell["rows"]:
        lists = {key: tuple(v) for key, v in row["config"].items() if isinstance(v, list)}
        checked = BenchConfig(**{**row["config"], **lists}).check()
        simulated_s = simulated.iteration_s(
            checked, checked.rows[0], cores=cell["cores"], prices=row["prices"], costs=machine
        )
        rows.append({**row, "simulated_s": simulated_s, "off": simulated_s / row["lab_s"] - 1})
    return {**cell, "rows": rows}


# -- the verdict -----------------------------------------------------------------------------


def judge(report: dict[str, Any]) -> None:
    """Fill in the tables and the missed limits."""
    cells: list[Cell] = report["cells"]
    groups = {
        "cells held back": [each for each in cells if is_held_back(each)],
        "other cells": [each for each in cells if not is_held_back(each)],
    }
    report["missed"] = [
        line for name, own in groups.items() if own for line in missed_by(name, own)
    ]
    report["tables"] = []
    show(report, verdict(groups))
    names = {text: name for name, text in STRATEGIES.items()}
    by_strategy, by_setting, by_model = ({} for _ in range(3))  # type: ignore[var-annotated]
    for cell in cells:
        for row in cell["rows"]:
            where = f"{cell['model']}, {cell['setting']}"
            found = (row["off"], where, names.get(row["strategy"], row["strategy"]))
            by_strategy.setdefault(found[2], []).append(found)
            by_setting.setdefault(cell["setting"], []).append(found)
            by_model.setdefault(cell["model"], []).append(found)
    for title, parts in (
        ("strategy", by_strategy),
        ("setting", by_setting),
        ("model", by_model),
    ):
        show(report, errors(title, parts))


def is_held_back(cell: Cell) -> bool:
    return (cell["model"], cell["setting"]) in HELD_BACK


def missed_by(name: str, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the limits that a group of cells misses."""
    offs = [abs(row["off"]) for cell in cells for row in cell["rows"]]
    if statistics.median(offs) > MEDIAN:
        yield f"{name}: median error {statistics.median(offs):.1%}; limit {MEDIAN:.0%}"
    for cell in cells:
        where = f"{cell['model']}, {cell['setting']}"
        for row in cell["rows"]:
            if abs(row["off"]) > WORST:
                yield f"{where}, {row['strategy']}: {row['off']:+.1%}; limit {WORST:.0%}"
        for a, b in wrongly_ranked(cell):
            yield f"{where}: {a} and {b} are ranked wrongly"


def wrongly_ranked(cell: Cell) -> list[tuple[str, str]]:
    """Return pairs whose measured difference is beyond the limit and predicted the other way."""
    found = []
    for a, b in itertools.combinations(cell["rows"], 2):
        faster, slower = sorted((a, b), key=lambda row: float(row["lab_s"]))
        differ = slower["lab_s"] > (1 + RANKED) * faster["lab_s"]
        if differ and slower["simulated_s"] <= faster["simulated_s"]:
            found.append((faster["strategy"], slower["strategy"]))
    return found


def compared_pairs(cell: Cell) -> int:
    """Return the number of pairs whose measured difference is beyond the limit."""
    times = sorted(row["lab_s"] for row in cell["rows"])
    return sum(b > (1 + RANKED) * a for a, b in itertools.combinations(times, 2))


def verdict(groups: Mapping[str, Sequence[Cell]]) -> Printed:
    """Return the table of both groups of cells."""
    lines = []
    for name, cells in groups.items():
        offs = [abs(row["off"]) for cell in cells for row in cell["rows"]]
        if not offs:
            continue
        wrong = sum(len(wrongly_ranked(cell)) for cell in cells)
        lines.append(
            (
                name,
                str(len(cells)),
                str(len(offs)),
                f"{100 * statistics.median(offs):.1f}",
                f"{100 * max(offs):.1f}",
                str(sum(off > WORST for off in offs)),
                f"{wrong} of {sum(compared_pairs(cell) for cell in cells)}",
            )
        )
    columns = (
        "group",
        "cells",
        "rows",
        "median error, %",
        "worst, %",
        f"rows beyond {WORST:.0%}",
        "pairs ranked wrongly",
    )
    notes = [
        f"wanted: median at most {MEDIAN:.0%}, worst {WORST:.0%}, no pair ranked wrongly",
        f"pairs: two strategies of a cell whose measured times differ by more than {RANKED:.0%}",
    ]
    return Printed.of("Predicted beside measured", columns, lines, notes)


def errors(title: str, parts: Mapping[str, Sequence[tuple[float, str, str]]]) -> Printed:
    """Return the errors of rows, by what the title says."""
    lines = []
    for name, found in parts.items():
        offs = [off for off, _, _ in found]
        worst = max(found, key=lambda each: abs(each[0]))
        lines.append(
            (
                name,
                str(len(offs)),
                f"{100 * statistics.median(map(abs, offs)):.1f}",
                f"{100 * statistics.median(offs):+.1f}",
                f"{100 * worst[0]:+.1f}",
                f"{worst[1]}, {worst[2]}",
            )
        )
    columns = (title, "rows", "median error, %", "with sign, %", "worst, %", "which row")
    return Printed.of(f"Errors by {title}", columns, lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
