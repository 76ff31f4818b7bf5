"""Every strategy compared with the fastest form of DDP: time per iteration by model and link rate.

    python benchmarks/best.py --json out/best.json
    python benchmarks/best.py --models resnet50 --rates 10gbit --rows ddp ddp+bf16 dear:plan=fixed
    python benchmarks/best.py --workers 2 --per-host 4 --models resnet50 --svg out/best.svg

Each cell, a model on links of one rate, is two benches of paced models (an RTX 2080 Ti's times;
links and bytes are real): strategies that exchange gradients in each step, and those that average
models periodically, whose time is a mean over thirty iterations. Codecs stay on whether they are
faster or not, so that the table shows where they are. With ``--add``, cells that the JSON already
has are kept, so that an interrupted run can continue.

Models are at 0.05 of their size with links to match. Their matrices are some 4.5 times smaller each
way, so that factors of rank 1 are as large a share of their bytes as those of rank 4 or 5 are of
the whole model's. Two cores carry four workers, so cells with fast links are in slow motion, up to
four times. Cells in which an iteration of DDP takes long, up to a minute, are in fast motion, down
to a tenth, and the processors' work counts for more there. The table has milliseconds at the
model's real pace. Codecs and DDP's hooks are slowed to their share of the whole model; optimizers
and sums do the work of a twentieth, and are not slowed. Top-k is timed after its warm-up, and a
row's tuning is not timed: `time_to_accuracy.py` includes all of that. *Cores* marks rows that the
processors limit.

Rule: in each cell the fastest strategy of wingbeat's with an exchange in each step is faster than
the fastest form of DDP, and the fastest of its exact ones than DDP (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import BEGIN_ANEW, measured_before, run_and_judge, show, write

from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat_lab.bench import contenders, estimate, runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.results import Run
from wingbeat_lab.bench.table import Printed

MODELS = ("resnet50", "vgg16", "bert_base", "densenet201")
RATES = ("100mbit", "1gbit", "4gbit", "10gbit")
DDP_S, FASTEST, SLOWEST = 1.6, 0.1, 4.0
"""Target seconds of an iteration of DDP; least and largest slow-motion factor to reach it."""
ROWS = (
    "ddp",
    "ddp+fp16",
    "ddp+bf16",
    "ddp+powersgd:rank=1",
    "allreduce",
    "dear:plan=fixed",
    "dear:plan=fixed,compression=bf16",
    "allreduce:compression=sketch:auto_disable=false",
    "dear:plan=fixed,compression=sketch:auto_disable=false",
    "dear:plan=fixed,compression=sketch@4:auto_disable=false",
    "allreduce:compression=lowrank@1:auto_disable=false",
    "dear:plan=fixed,compression=lowrank@1:auto_disable=false",
    "omgs",
    "geryon",
)
SELDOM = (
    "ripples:policy=smart",
    "localsgd:every=10",
    "localsgd:every=30,compression=sketch@4",
    "diloco:every=30,compression=sketch@4",
)
SELDOM_STEPS = 30
"""Timed iterations of rows of `SELDOM`: a whole number of averages."""
SCALE = 0.05


def configs(args: argparse.Namespace) -> dict[tuple[str, str], list[BenchConfig]]:
    """The benches of each cell, checked before any measurement."""
    out = {}
    for model in args.models:
        for rate in args.rates:
            bench = functools.partial(
                BenchConfig,
                lab=f"star:{args.workers}@{rate}",
                per_host=args.per_host,
                model=f"paced:{model}@{args.scale:g}",
                measure=False,
            )
            bench = functools.partial(bench, stretch=args.stretch or stretch_of(bench))
            step = bench(
                strategies=tuple(args.rows),
                iterations=args.iterations,
                rounds=min(args.rounds, args.iterations),
                warmup=3,  # PowerSGD compresses from its third iteration on
            )
            some = [step] if args.rows else []
            if args.seldom:
                seldom = tuple(args.seldom)
                some.append(bench(strategies=seldom, iterations=SELDOM_STEPS, rounds=1, warmup=3))
            for each in some:
                each.check()
            out[model, rate] = some
    return out


def stretch_of(bench: Callable[..., BenchConfig]) -> float:
    """The slow-motion factor of a cell, so that an iteration of DDP takes about `DDP_S`."""
    ddp = estimate.of(bench(strategies=("ddp",)).check()).rows[0].iteration_s
    return round(min(SLOWEST, max(FASTEST, DDP_S / ddp)), 2)


def figures(run: Run, config: BenchConfig) -> dict[str, Any]:
    """One row of a cell; seconds and bytes at the model's real pace and size."""
    row = contenders.parse(run.strategy)
    return {
        "iteration_s": run.typical_s / config.stretch,
        "samples_s": [each / config.stretch for each in run.samples_s],
        "mb_sent": run.bytes_per_iteration / 1e6,
        "ddp": row.ddp,
        "exact": row.traits.exact,
        "each_step": not row.averages,
        "cores_share": run.cores_share,
        "limited_by_cores": run.limited_by_cores,
        "fraction_of_bound": run.fraction_of_bound,
        "merge": run.merge,
        "codec": run.codec,
    }


def best(rows: dict[str, Any], *, ddp: bool, exact: bool) -> tuple[str, float] | None:
    """The fastest row with an exchange in each step, of DDP's forms or of wingbeat's."""
    fit = {
        text: own["iteration_s"]
        for text, own in rows.items()
        if own["ddp"] == ddp and own["each_step"] and (own["exact"] or not exact)
    }
    return min(fit.items(), key=lambda item: item[1]) if fit else None


def missed(cells: list[dict[str, Any]]) -> list[str]:
    """A line for each cell in which DDP is faster."""
    out = []
    for cell in cells:
        for exact in (True, False):
            theirs, ours = (best(cell["rows"], ddp=ddp, exact=exact) for ddp in (True, False))
            if theirs and ours and ours[1] >= theirs[1]:
                out.append(
                    f"{cell['model']}, {cell['rate']}: {ours[0]} takes {ours[1] / theirs[1]:.3f} "
                    f"of the time of {theirs[0]}"
                )
    return out


COLUMNS = ("strategy", "ms", "least .. largest, ms", "DDP's best / it", "sent, MB", "")


def table(cell: dict[str, Any]) -> Printed:
    """Return one cell's rows for printing: times at the model's real pace."""
    rows = cell["rows"]
    theirs = best(rows, ddp=True, exact=False)
    firsts = {best(rows, ddp=ddp, exact=exact) for ddp in (True, False) for exact in (True, False)}
    names = {first[0] for first in firsts if first}
    lines = []
    for text, row in rows.items():
        samples = [1e3 * each for each in row["samples_s"]]
        marks = ["cores"] * row["limited_by_cores"] + ["best"] * (text in names)
        lines.append(
            (
                text,
                f"{1e3 * row['iteration_s']:.0f}",
                f"{min(samples):.0f} .. {max(samples):.0f}",
                f"{theirs[1] / row['iteration_s']:.2f}" if theirs else "",
                f"{row['mb_sent']:.2f}",
                ", ".join(marks),
            )
        )
    notes = [
        f"measured {cell['stretch']:g} times as slow; cores: limited by this machine's processors",
        "best: of DDP or of wingbeat, of the exact ones or of all, with an exchange in each step",
    ]
    return Printed.of(f"{cell['model']} at {cell['rate']}", COLUMNS, lines, notes)


def summary(cells: list[dict[str, Any]]) -> Printed:
    """Return the speed of each row of wingbeat's over DDP's fastest form, by cell."""
    names = [text for text, row in cells[0]["rows"].items() if not row["ddp"]]
    lines = []
    for text in names:
        speeds = []
        for cell in cells:
            theirs, own = best(cell["rows"], ddp=True, exact=False), cell["rows"].get(text)
            speeds.append(f"{theirs[1] / own['iteration_s']:.2f}" if theirs and own else "")
        lines.append((text, *speeds))
    columns = ("strategy", *(f"{cell['model']} at {cell['rate']}" for cell in cells))
    return Printed.of(
        "an iteration of DDP's fastest form / of the strategy: below 1 is behind", columns, lines
    )


LABELS = {
    "ddp": "DDP",
    "ddp+bf16": "DDP, bf16 hook",
    "ddp+powersgd:rank=1": "DDP, PowerSGD",
    "allreduce": "AllReduce",
    "dear:plan=fixed": "DeAR",
    "dear:plan=fixed,compression=bf16": "DeAR, bf16",
    "dear:plan=fixed,compression=sketch@4:auto_disable=false": "DeAR, 4-bit sketch",
    "diloco:every=30,compression=sketch@4": "DiLoCo, 4-bit sketch",
}
"""Rows in the picture's legend; others have their own text."""


def draw(cells: list[dict[str, Any]], where: str, path: Path) -> None:
    """Draw the speed of each row over that of plain DDP, by cell, on a logarithmic axis."""
    import matplotlib as mpl

    names = list(cells[0]["rows"])
    own = [name for name in names if not cells[0]["rows"][name]["ddp"]]
    theirs = [name for name in names if name not in own]
    colours = {name: str(0.72 - 0.4 * at / len(theirs)) for at, name in enumerate(theirs)}
    scale = mpl.colormaps["viridis"]
    colours |= {name: scale(0.9 - 0.85 * at / len(own)) for at, name in enumerate(own)}
    ticks = [f"{c['model']}\n{c['rate'].replace('gbit', ' Gbit/s')}" for c in cells]
    with mpl.rc_context({"svg.hashsalt": "wingbeat", "svg.fonttype": "none"}):
        figure = blank("bars", (9.5, 3.9), 100)
        axes = figure.add_subplot()
        width = 0.86 / len(names)
        for place, name in enumerate(names):
            speeds = [
                cell["rows"]["ddp"]["iteration_s"] / cell["rows"][name]["iteration_s"]
                for cell in cells
            ]
            at = [number + width * (place - (len(names) - 1) / 2) for number in range(len(cells))]
            exact = "" if cells[0]["rows"][name]["exact"] else " *"
            axes.bar(
                at, [speed - 1 for speed in speeds], width, bottom=1, color=colours[name],
                label=LABELS.get(name, name) + exact,
            )  # fmt: skip
            for x, speed in zip(at, speeds, strict=True):
                if name != "ddp":
                    side = "bottom" if speed >= 1 else "top"
                    axes.text(x, speed, f"{speed:.1f}", ha="center", va=side, fontsize=7)
        axes.axhline(1, color="#2b2f36", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axes.minorticks_off()
        axes.set_xticks(range(len(cells)), ticks)
        axes.set_ylabel("speed, DDP = 1")
        axes.set_title(f"{where} (* rounds, drops or averages)", loc="left", fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)
        figure.tight_layout()
        with replacing(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})


def measure(
    args: argparse.Namespace, kept: list[dict[str, Any]], report: dict[str, Any]
) -> list[str]:
    """Add the missing cells to the report, cell by cell; return the missed limits."""
    benches = configs(args)
    cells = report["cells"] = kept
    todo = {at: some for at, some in benches.items() if at not in {_at(cell) for cell in kept}}
    long = estimate.of_all(each for some in todo.values() for each in some)
    print(f"{len(todo)} cells, about {estimate.about(long)}", file=sys.stderr, flush=True)
    for cell in kept:
        show(report, table(cell))
    for (model, rate), some in todo.items():
        rows: dict[str, Any] = {}
        for config in some:
            runs = runner.run(config, command=sys.argv).report.runs
            rows |= {run.strategy: figures(run, config) for run in runs}
        cells.append({"model": model, "rate": rate, "stretch": some[0].stretch, "rows": rows})
        show(report, table(cells[-1]))
        write(args.json, report)
    show(report, summary(cells))
    write(args.json, report)
    if args.svg is not None:
        draw(cells, f"{args.workers} hosts with {args.per_host} workers each", args.svg)
    return missed(cells)


def _at(cell: dict[str, Any]) -> tuple[str, str]:
    return cell["model"], cell["rate"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--rates", nargs="+", default=list(RATES), metavar="RATE")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="with an exchange each step")
    parser.add_argument("--seldom", nargs="*", default=list(SELDOM), help="that average models")
    parser.add_argument("--workers", type=int, default=4, help="hosts of the lab (4)")
    parser.add_argument("--per-host", type=int, default=1, help="workers of each host (1)")
    parser.add_argument("--scale", type=float, default=SCALE, help="of the models (0.05)")
    parser.add_argument("--stretch", type=float, help="slow motion (by cell)")
    parser.add_argument("--iterations", type=int, default=3, help="timed ones of each row (3)")
    parser.add_argument("--rounds", type=int, default=1, help="how often rows take turns (1)")
    parser.add_argument("--add", action="store_true", help="keep the cells that the JSON has")
    parser.add_argument("--json", type=Path, default=Path("out/best.json"))
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw speeds over plain DDP's")
    args = parser.parse_args()
    kept = measured_before(args.json, "cells", BEGIN_ANEW) if args.add else []
    return run_and_judge(args.json, functools.partial(measure, args, kept))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
