"""Seconds to DDP's final accuracy less half a point, by strategy and rate of the links.

    python benchmarks/accuracy.py --evaluations 40 --json out/curves.json --strategies ddp ddp+fp16
    python benchmarks/best.py --models resnet50 bert_base --json out/best.json
    python benchmarks/to_accuracy.py out/curves.json out/best.json --json out/to_accuracy.json

Two figures combined: the iterations that a strategy takes to the accuracy, in real training on real
data (`accuracy.py`), times what an iteration of a paced model takes in the lab (`best.py`). Neither
the network nor the number of workers' cores is the same in both: what is compared is the price of
coarser gradients in iterations with what they save on the links. Images are digits and ResNet-50,
text is the next character and BERT-Base.

Exact strategies share one curve, and so do strategies that send the same and differ in when
(the JSON says which). Rank 1 of `best.py`, whose models are
a twentieth of their size, stands for rank 4.

Rule: in each cell the first of wingbeat's strategies is there before the first form of DDP (exit
code 1 otherwise).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import measured_before, run_and_judge, write

from wingbeat.bench import contenders
from wingbeat.errors import UsageError

MODELS = {"digits": "resnet50", "text": "bert_base"}
"""The model whose iterations a task's are taken to be."""
POINTS = 0.5
Curves = dict[str, list[list[dict[str, float]]]]
"""By strategy: for each seed, points with ``iteration`` and ``accuracy``."""


def curve_of(row: str) -> str:
    """The row of `accuracy.py` that trains as this row of `best.py` does.

    >>> curve_of("dear:plan=fixed,wire=sketch@4:auto_disable=false")
    'allreduce:wire=sketch@4'
    >>> curve_of("allreduce:wire=lowrank@1:auto_disable=false"), curve_of("geryon")
    ('allreduce:wire=lowrank@4', 'ddp')
    """
    contender = contenders.parse(row)
    if contender.traits.exact:
        return "ddp"
    if contender.ddp or contender.averages or "wire=" not in row:
        return row.replace("rank=1", "rank=4")
    wire = row.partition("wire=")[2].replace(":auto_disable=false", "")
    return f"allreduce:wire={wire.replace('lowrank@1', 'lowrank@4')}"


def target(curves: Curves) -> float:
    """DDP's final accuracy in %, the mean over seeds, less half a point."""
    return statistics.fmean(curve[-1]["accuracy"] for curve in curves["ddp"]) - POINTS


def iterations_to(curves: Iterable[Sequence[dict[str, float]]], wanted: float) -> float | None:
    """Iterations until the mean over seeds is at ``wanted`` and stays; None if it ends below.

    >>> points = [{"iteration": i, "accuracy": a} for i, a in ((10, 91), (20, 89), (30, 95))]
    >>> iterations_to([points], 90), iterations_to([points], 96)
    (30, None)
    """
    there = None
    for points in zip(*curves, strict=True):
        right = statistics.fmean(point["accuracy"] for point in points)
        there = None if right < wanted else there or points[0]["iteration"]
    return there


def table(curves: Curves, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell of one model: each row's seconds to the target, None where it ends below.

    Rows whose curve was not trained are left out.
    """
    wanted = target(curves)
    made = []
    for cell in cells:
        rows = {}
        for row, own in cell["rows"].items():
            if (curve := curve_of(row)) not in curves:
                continue
            steps = iterations_to(curves[curve], wanted)
            rows[row] = {
                "curve": curve,
                "iterations": steps,
                "s": None if steps is None else steps * own["iteration_s"],
                "ddp": own["ddp"],
            }
        made.append({"model": cell["model"], "rate": cell["rate"], "rows": rows})
    return made


def first(rows: dict[str, dict[str, Any]], *, ddp: bool) -> tuple[str, float] | None:
    """The row that is there first, of DDP's forms or of wingbeat's."""
    there = {text: own["s"] for text, own in rows.items() if own["ddp"] == ddp and own["s"]}
    return min(there.items(), key=lambda item: item[1]) if there else None


def missed(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each cell in which a form of DDP is there first."""
    out = []
    for cell in cells:
        theirs, ours = (first(cell["rows"], ddp=ddp) for ddp in (True, False))
        if theirs and (ours is None or ours[1] >= theirs[1]):
            said = "nothing of wingbeat's" if ours is None else f"{ours[0]} ({ours[1]:.0f} s)"
            out.append(
                f"{cell['model']}, {cell['rate']}: {theirs[0]} takes {theirs[1]:.0f} s, {said}"
            )
    return out


def show(task: str, wanted: float, cells: Sequence[dict[str, Any]]) -> None:
    """Print a table in Markdown: seconds by strategy and rate, the first of each kind in bold."""
    print(f"\n| {task} to {wanted:.2f}%, {cells[0]['model']} | iterations | ", end="")
    print(" | ".join(cell["rate"] for cell in cells) + " |")
    print("|---" * (len(cells) + 2) + "|")
    for text in dict.fromkeys(text for cell in cells for text in cell["rows"]):
        own = [cell["rows"].get(text) for cell in cells]
        steps = next((row["iterations"] for row in own if row), None)
        said = [_seconds(text, row, cell) for row, cell in zip(own, cells, strict=True)]
        print(f"| `{text}` | {steps or 'not reached'} | " + " | ".join(said) + " |")
    print("| DDP's best form / ours | | " + " | ".join(map(_gain, cells)) + " |")


def _seconds(text: str, row: dict[str, Any] | None, cell: dict[str, Any]) -> str:
    if row is None or row["s"] is None:
        return ""
    best = [first(cell["rows"], ddp=ddp) for ddp in (True, False)]
    return (
        f"**{row['s']:.0f}**" if text in {each[0] for each in best if each} else f"{row['s']:.0f}"
    )


def _gain(cell: dict[str, Any]) -> str:
    theirs, ours = (first(cell["rows"], ddp=ddp) for ddp in (True, False))
    return f"{theirs[1] / ours[1]:.2f}" if theirs and ours else ""


def combine(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, task by task; return what is missed."""
    trained = measured_before(args.curves, "runs", "measure it by accuracy.py")
    cells = measured_before(args.times, "cells", "measure it by best.py")
    found = report["tasks"] = {}
    lines = []
    for task in dict.fromkeys(run["task"] for run in trained):
        curves: Curves = {}
        for run in trained:
            if run["task"] == task:
                curves.setdefault(run["strategy"], []).append(run["curve"])
        own = [cell for cell in cells if cell["model"] == MODELS.get(task)]
        if "ddp" not in curves or not own:
            lack = "no row ddp" if "ddp" not in curves else f"no cell of {MODELS.get(task)}"
            raise UsageError(
                f"{task}: {args.curves} and {args.times} have {lack}: measure it first"
            )
        made = table(curves, own)
        found[task] = {"target": target(curves), "cells": made}
        show(task, target(curves), made)
        lines += missed(made)
    write(args.json, report)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("curves", type=Path, help="what accuracy.py has written")
    parser.add_argument("times", type=Path, help="what best.py has written")
    parser.add_argument("--json", type=Path, default=Path("out/to_accuracy.json"))
    args = parser.parse_args()
    return run_and_judge(args.json, functools.partial(combine, args))


if __name__ == "__main__":
    sys.exit(main())
