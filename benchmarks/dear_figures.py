"""DeAR compared with its baselines: the paper's Figs. 5, 6, 7, 9 and 11.

    python benchmarks/dear_figures.py --json out/dear_figures.json --png out    (all of them)
    python benchmarks/dear_figures.py --figures 7 --rates slow --models resnet50 bert_base
    python benchmarks/dear_figures.py --figures 9 --models resnet50 --trials 8 --steps 5

5   An all-reduce, its two halves, and both one after the other, by message size.
6   No tensor fusion: DeAR and ByteScheduler over WFBP.
7   Buckets of 25 MB, over all-reduces in such buckets (in place of Horovod): DDP, MG-WFBP, DeAR.
9   Tensor fusion: none, four layers, 5 MB, 25 MB, found by Bayesian optimisation from 25 MB on, so
    that the gain of the search is visible; all-reduces in buckets of 64 MB, and tuned likewise; and
    MG-WFBP, whose plan is found by measuring: it has no size.
11  ResNet-50 and BERT-Base by batch size. A batch's time is assumed proportional to its size.

Networks, scale and slow motion are those of ``dear.py`` (slow: 64 GPUs with 10GbE; fast: 100GbIB).
Each model is a bench in which rows take turns; speeds are over its first row. ``no edges`` is DeAR
as in the paper, and by default; the other has small buckets at both edges (``edge_mb=1``). In place
of Horovod there is wingbeat's all-reduce with the same buckets, the first of which is small, as by
default; ByteScheduler is `wingbeat_lab.ByteScheduler`, because its authors' needs PyTorch 1.4. The
paper has its figures only as pictures: its numbers here are those of its text (sections VI-C to
VI-H).

Exit code 1 if a limit is missed: both halves within 5% of an all-reduce, at each size; DeAR (in
Fig. 9 DeAR-BO) as fast as the fastest other row, within 1%.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dear
import dear_halves
from common import run_and_judge, show, write

from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat_lab import paced
from wingbeat_lab.bench import estimate, runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.table import Printed, decided

WITHIN = 1.01


@dataclass(frozen=True)
class Figure:
    """One of the paper's bar charts.

    Attributes:
        title: its subject.
        rows: the bars, by the paper's names; the first is the reference.
        judged: which bar must be the highest, within 1%.
        models: the paper's.
        rates: the paper's networks.
        paper: the numbers of its text, by rate.
    """

    title: str
    rows: dict[str, str]
    judged: str
    models: tuple[str, ...]
    rates: tuple[str, ...]
    paper: dict[str, str]


FUSED = {
    "Horovod's": "allreduce:mb=25",
    "PyTorch-DDP": "ddp:mb=25",
    "MG-WFBP": "mgwfbp",
    "DeAR, no edges": "dear:plan=fixed,edge_mb=0",
    "DeAR": "dear:plan=fixed,edge_mb=1",
}
BARS = {
    "6": Figure(
        "without tensor fusion, over WFBP",
        {
            "WFBP": "allreduce:plan=none",
            "DeAR": "dear:plan=none",
            "ByteScheduler": "bytescheduler",
        },
        "DeAR",
        dear.MODELS,
        ("slow", "fast"),
        {
            "slow": "DeAR 1.06 to 1.19 over WFBP in all cases; ByteScheduler mostly below 0.9",
            "fast": "DeAR 1.06 to 1.19 over WFBP in all cases; ByteScheduler mostly below 0.9",
        },
    ),
    "7": Figure(
        "buckets of 25 MB, over all-reduces in such (Horovod's)",
        FUSED,
        "DeAR",
        dear.MODELS,
        ("slow", "fast"),
        {
            "slow": "DeAR 1.06 to 1.83 over the others, 1.36 on average",
            "fast": "DeAR up to 1.15 over the others, 1.08 on average",
        },
    ),
    "9": Figure(
        "tensor fusion, over all-reduces in buckets of 64 MB (Horovod-FB)",
        {
            "Horovod-FB": "allreduce:mb=64",
            "Horovod-BO": "allreduce:plan=bo,trials={trials},steps={steps}",
            "MG-WFBP": "mgwfbp",
            "DeAR w/o TF": "dear:plan=none",
            "DeAR-NL": "dear:plan=layers",
            "DeAR-FB": "dear:plan=fixed,mb=5,edge_mb=0",
            "DeAR, 25 MB": "dear:plan=fixed",
            "DeAR-BO": "dear:trials={trials},steps={steps}",
        },
        "DeAR-BO",
        ("resnet50", "densenet201", "bert_base"),
        ("slow", "fast"),
        {
            "slow": "DeAR-BO 1.22 to 1.56 over Horovod-FB, 1.35 to 4.54 over DeAR w/o TF; "
            "Horovod-BO slightly above 1, on BERT-Base 1; NL below FB on CNNs, above both on "
            "BERT-Base",
            "fast": "DeAR-BO 1.07 to 1.14 over Horovod-FB, 1.29 to 1.78 over DeAR w/o TF",
        },
    ),
    "11": Figure(
        "by batch size, over all-reduces in buckets of 25 MB (Horovod's)",
        FUSED,
        "DeAR",
        ("resnet50", "bert_base"),
        ("slow",),
        {"slow": "DeAR the fastest in all cases"},
    ),
}
FIGURES = ("5", *BARS)


def main() -> int:
    """Measure the requested figures, print tables, draw and judge them."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--models", nargs="+", metavar="NAME", help="(the paper's of each figure)")
    parser.add_argument("--rates", nargs="+", choices=("slow", "fast"), help="(the paper's)")
    parser.add_argument("--rows", nargs="+", metavar="BAR", help="by the paper's names (all)")
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 32, 64], help="in Fig. 11")
    parser.add_argument("--trials", type=int, default=10, help="of the tuned rows of Fig. 9 (10)")
    parser.add_argument("--steps", type=int, default=10, help="iterations of such a trial (10)")
    parser.add_argument("--iterations", type=int, help="timed ones of each row (by rate)")
    parser.add_argument("--rounds", type=int, default=2, help="how often rows take turns (2)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed ones of each turn (2)")
    parser.add_argument("--workers", type=int, default=4, help="hosts of the lab (4)")
    parser.add_argument("--scale", type=float, help="of the models (by rate)")
    parser.add_argument("--stretch", type=float, help="slow motion (by rate)")
    dear_halves.add_arguments(parser)
    parser.add_argument("--json", type=Path, default=Path("out/dear_figures.json"), metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="draw dear_fig5.png, ... here")
    return parser.parse_args()


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return the missed limits."""
    if args.png:
        blank("figure", (1, 1), 50)  # refused before any measurement
        try:
            args.png.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise UsageError(f"cannot write {str(args.png)!r}: {err.strerror or err}") from None
    with tempfile.TemporaryDirectory() as folder:
        # Check all benches before any measurement.
        planned = {f: benches(f, args, Path(folder)) for f in args.figures if f in BARS}
        if planned:
            long = estimate.of_all(b for each in planned.values() for _, _, b in each)
            print(f"takes about {estimate.about(long)}", file=sys.stderr, flush=True)
        for figure in args.figures:
            parts: Callable[[], Iterator[tuple[str, Any]]]
            if figure == "5":
                parts = functools.partial(dear_halves.figure_5, args)
            else:
                parts = functools.partial(bars, figure, args, planned[figure])
            found: dict[str, Any] = report.setdefault(figure, {})
            for name, part in parts():
                found[name] = part
                write(args.json, report)
            for made in tables(figure, found):
                show(report, made)
            write(args.json, report)
            if args.png:
                draw(figure, found, args.png / f"dear_fig{figure}.png")
    return judged(report)


def rows_of(figure: str, args: argparse.Namespace) -> dict[str, str]:
    """Return the requested bars as rows of a bench; the first one is always included."""
    bars_ = BARS[figure].rows
    asked = set(args.rows or bars_)
    known = {bar for f in args.figures if f in BARS for bar in BARS[f].rows}
    if asked - known:
        raise UsageError(
            f"--rows {sorted(asked - known)[0]!r}: allowed: {', '.join(sorted(known))}"
        )
    words = {"{trials}": str(args.trials), "{steps}": str(args.steps)}
    rows = {}
    for number, (bar, text) in enumerate(bars_.items()):
        if number == 0 or bar in asked:
            rows[bar] = functools.reduce(lambda t, w: t.replace(*w), words.items(), text)
    return rows


def benches(
    figure: str, args: argparse.Namespace, folder: Path
) -> list[tuple[str, str, BenchConfig]]:
    """Return rate, comparison, and bench of each group of bars, checked."""
    if args.workers < 2 or min(args.batches) < 1:
        raise UsageError("--workers: allowed are 2 or more; --batches: 1 or more")
    rows, about = tuple(rows_of(figure, args).values()), BARS[figure]
    out = []
    for rate in [r for r in args.rates or about.rates if r in about.rates]:
        network = dear.NETWORKS[rate]
        iterations = args.iterations or network.iterations
        for name, model in models(figure, args, folder):
            bench = BenchConfig(
                lab=f"star:{args.workers}@{dear.host_rate(network.gbit, args.workers)}",
                model=f"paced:{model}@{args.scale or network.scale:g}",
                strategies=rows,
                iterations=iterations,
                rounds=min(args.rounds, iterations),
                warmup=args.warmup,
                stretch=args.stretch or network.stretch,
                measure=False,
            )
            bench.check()
            out.append((rate, name, bench))
    return out


def models(figure: str, args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each model's name and its spelling; Fig. 11's have a file for each batch size."""
    for name in args.models or BARS[figure].models:
        if figure != "11":
            yield name, name
            continue
        profile = paced.load_profile(name)
        for batch in args.batches:
            path = folder / f"{name}_{batch}.json"
            data = {"name": path.stem, "like": name, "device": profile.device}
            source = f"the throughput of {name}, whatever the batch size"
            numbers = {"batch_size": batch, "samples_per_second": profile.samples_per_second}
            path.write_text(json.dumps(data | numbers | {"source": source}), encoding="utf-8")
            yield f"{name}, {batch}", str(path)


def bars(
    figure: str, args: argparse.Namespace, planned: list[tuple[str, str, BenchConfig]]
) -> Iterator[tuple[str, Any]]:
    """Yield, by rate, each model's bars."""
    names = list(rows_of(figure, args))
    found: dict[str, dict[str, Any]] = {}
    for number, (rate, model, bench) in enumerate(planned, start=1):
        print(f"{figure}: {number}/{len(planned)} {rate} {model}", file=sys.stderr, flush=True)
        report = runner.run(bench, command=sys.argv).report
        first = report.runs[0].iteration_s.median
        found.setdefault(rate, {})[model] = {
            "config": asdict(bench),
            "load_before": report.machine["load_before"],
            "stolen_share": report.machine.get("stolen_share"),
            "bars": {
                name: {
                    "strategy": run.strategy,
                    "iteration_s": asdict(run.iteration_s),
                    "speed": first / run.iteration_s.median,
                    "limited_by_cores": run.limited_by_cores,
                    "merge": run.merge,
                    "deciding": asdict(run.deciding) if run.deciding else None,
                }
                for name, run in zip(names, report.runs, strict=True)
            },
        }
        yield rate, found[rate]


COLUMNS = (
    "model, bar",
    "strategy",
    "the judged bar over it",
    "times the first bar's speed",
    "iteration, ms",
    "p10 .. p90, ms",
)


def tables(figure: str, found: dict[str, Any]) -> list[Printed]:
    """Return a figure's tables: one for Fig. 5, else one for each network."""
    if figure == "5":
        return [dear_halves.table(found["lab"], found["rows"])]
    return [table(figure, rate, groups) for rate, groups in found.items()]


def table(figure: str, rate: str, groups: dict[str, Any]) -> Printed:
    """Return one network's bars, and where the judged one is slower."""
    about, motions = BARS[figure], {f"{g['config']['stretch']:g}" for g in groups.values()}
    cells = []
    for model, group in groups.items():
        judged_speed = speed(group, about.judged) if about.judged in group["bars"] else None
        for name, bar in group["bars"].items():
            ms = [1e3 * bar["iteration_s"][key] for key in ("median", "p10", "p90")]
            over = f"{judged_speed / bar['speed']:.3f}" if judged_speed else ""
            cells.append(
                (f"{model}, {name}", bar["strategy"], over, f"{bar['speed']:.3f}",
                 f"{ms[0]:.0f}", f"{ms[1]:.0f} .. {ms[2]:.0f}")
            )  # fmt: skip
    configs = [group["config"] for group in groups.values()]
    title = (
        f"Fig. {figure}, {rate}: {about.title}; {', '.join(sorted({c['lab'] for c in configs}))}, "
        f"slow motion of {', '.join(sorted(motions))}, {configs[0]['iterations']} iterations"
    )
    return Printed.of(title, COLUMNS, cells, notes(about, rate, groups))


def notes(about: Figure, rate: str, groups: dict[str, Any]) -> list[str]:
    """Return where the judged bar is slower, its gains, the paper's, and disturbances."""
    lines = [
        f"behind: {model}: {name} is {speed(group, name) / speed(group, about.judged):.3f} times "
        f"as fast as {about.judged}"
        for model, group in groups.items()
        for name in group["bars"]
        if about.judged in group["bars"] and speed(group, name) > speed(group, about.judged)
    ]
    names = list(next(iter(groups.values()))["bars"])
    for other in names if about.judged in names else ():
        gains = [speed(group, about.judged) / speed(group, other) for group in groups.values()]
        if other != about.judged:
            lines.append(
                f"{about.judged} over {other}: {min(gains):.3f} to {max(gains):.3f}, "
                f"{statistics.fmean(gains):.3f} on average"
            )
    lines.append(f"paper: {about.paper[rate]}")
    for model, group in groups.items():
        for name, bar in group["bars"].items():
            where = f"{model}, {name}"
            if bar["limited_by_cores"]:
                lines.append(f"{where}: limited by this machine's cores")
            if bar["deciding"]:
                own = bar["deciding"]
                lines.append(
                    f"{where}: decided before it was timed, in {own['iterations']} iterations "
                    f"({own['seconds']:.1f} s): {decided(own['decision'])}"
                )
    return lines


def speed(group: dict[str, Any], bar: str) -> float:
    """Return the speed relative to the first bar."""
    return float(group["bars"][bar]["speed"])


def error_bar(bar: dict[str, Any]) -> tuple[float, float]:
    """Return the deviations of the speeds of the slowest and of the fastest tenth of iterations."""
    found, own = bar["iteration_s"], float(bar["speed"])
    below, above = (own * found["median"] / found[tenth] for tenth in ("p90", "p10"))
    return own - below, above - own


def judged(report: dict[str, Any]) -> list[str]:
    """Return the missed limits."""
    missed = dear_halves.judged(report.get("5", {}).get("rows", []))
    for figure, about in BARS.items():
        for rate, groups in report.get(figure, {}).items():
            for model, group in groups.items():
                speeds = {bar: speed(group, bar) for bar in group["bars"]}
                if about.judged not in speeds:
                    continue
                best = max(speeds, key=lambda bar: speeds[bar])
                if speeds[best] > WITHIN * speeds[about.judged]:
                    missed.append(
                        f"{figure}: {rate} {model}: {about.judged} is "
                        f"{speeds[about.judged] / speeds[best]:.3f} of {best}; limit 1 within 1%"
                    )
    return missed


COLOURS = (
    "#9aa3ae", "#5b6673", "#8a5bc7", "#2f9e62", "#d9b23d", "#a8476b", "#e0762d", "#2a78d6",
)  # fmt: skip


def draw(figure: str, found: dict[str, Any], path: Path) -> None:
    """Draw one figure, a panel for each network."""
    panels = ["5"] if figure == "5" else list(found)
    picture = blank("figure", (11 if len(panels) > 1 else 8, 4.2), 150)
    for number, panel in enumerate(panels, start=1):
        axes = picture.add_subplot(1, len(panels), number)
        if figure == "5":
            dear_halves.draw(axes, found["rows"])
            axes.set_title(f"DeAR's Fig. 5 on {found['lab']}", fontsize=11)
        else:
            draw_bars(axes, found[panel])
            axes.set_title(f"DeAR's Fig. {figure}, {panel}: {BARS[figure].title}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 4}
        axes.legend(frameon=False, fontsize=8, **place)
    picture.tight_layout()
    with replacing(path) as file:
        picture.savefig(file, format="png")


def draw_bars(axes: Any, groups: dict[str, Any]) -> None:
    """Draw the speeds of all bars, side by side for each model."""
    names = list(next(iter(groups.values()))["bars"])
    width = 0.8 / len(names)
    colours = COLOURS[: len(names) - 1] + COLOURS[-1:]
    for number, (name, colour) in enumerate(zip(names, colours, strict=True)):
        at = [i + (number - (len(names) - 1) / 2) * width for i in range(len(groups))]
        speeds = [speed(group, name) for group in groups.values()]
        spread = list(zip(*(error_bar(group["bars"][name]) for group in groups.values()),
                          strict=True))  # fmt: skip
        axes.bar(at, speeds, width * 0.92, color=colour, label=name, yerr=spread, capsize=2)
    axes.axhline(1.0, color="#2b2f36", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set_ylabel("times the first bar's speed")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
