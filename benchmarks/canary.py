"""Canary on its BCubes compared with its baselines: the paper's Figs. 19 to 21, 23 and 24.

    python benchmarks/canary.py --json out/canary.json          (all figures)
    python benchmarks/canary.py --figures 23                    (with and without slow workers)
    python benchmarks/canary.py --figures 20 --sizes 2x2 3x2    (speed by number of workers)
    python benchmarks/canary.py --figures 19 --seeds 0          (real training, by seconds)

23  VGG-19 on BCube(3, 2), 10 Gbit/s an interface, paced as on a V100; s = 2 n, p = 6, k = 10:
    seconds for the same number of applied gradients, with equal workers. A row with s = 0, its own
    BSP, isolates the gain of the sketch; ``canary`` is as `wingbeat.Canary` is by default. The
    paper's Fig. 23 is the time to converge (section 6.6), which 24 has; this one is of iterations.
    Parameter servers are on a star, one per job as in the paper. Bytes are the kernel's, and
    traffic over time (21) comes from the same runs. On request (``--slow``), with another worker
    +2x slow in each iteration, or with one that always is, which the paper does not have.
20  The same with 4, 9 and 16 workers: images per second, and how they grow.
19  Real training on real data (digits) with 4 and 9 workers on slow links, three seeds: final
    accuracy, and seconds to a predefined accuracy (24). One row is Canary by default, one as
    published, without a bound on rounds in flight; others have s and p in the paper's proportion:
    s = 2 n; p = 2 of the 4 layers. Learning rate as in section 6.1.3: 0.1, times 0.2 every
    quarter; no momentum, which the paper does not name. On request (``--training-slow``) a worker
    is +2x slow half of the time, which the paper does not have.

The model's scale shrinks bytes and rates together; the stretch slows computation and links down
together, until two cores can do the work of all hosts. Rows take turns. Codecs of workers
are slowed down as well, by stretch over scale, to what one core would need for the whole model.
Sums and copies are not: at a scale of 0.05 and a stretch of 8 they take 1/160 of their real share.
Each bench is also measured at real pace, where two cores carry all hosts; rows that they limit are
marked.

Exit code 1 if a limit is missed, in slow motion. 23: a row of Canary, but for s = 0, slower than
0.98 of BML with equal workers, or less than 1.61 times as fast with slow ones, or its busiest
window not below BML's; the bytes of the row that sends least more than 0.3 of BML's. 19: accuracy
more than 0.5 points below BSP's, or not the first to the predefined accuracy.
``benchmarks/sketch.py`` has Figs. 22 and 25 to 27.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import canary_training
from common import run_and_judge, show, write

from wingbeat import topologies
from wingbeat_lab.bench import estimate, models, runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.results import Report
from wingbeat_lab.bench.table import Printed

FIGURES = ("23", "20", "19")
BML, AKO, SERVER = "bml", "ako", "vanillaps"
CANARY = "canary:s={s},p=6,colayers=10,compression=sketch,encrypted=False"
SIX_BITS = CANARY.replace("sketch", "sketch@6")
BSP = CANARY.replace("s={s},p=6,", "s=0,")
"""Canary's exchange without staleness; the gain over it is that of ``s``."""
DEFAULT = "canary"
"""The preset without options; it alone is encrypted."""
SERVERS = f"{SERVER}:servers=1,encrypted=False"
SLOW: dict[str, tuple[str, ...]] = {"equal": (), "random": ("random:+2x",), "one": ("1=+2x",)}
IMAGES = 64
"""Images of a worker in an iteration of the profile."""
NOT_SLOWER, FASTER, OF_BYTES = 0.98, 1.61, 0.3


def main() -> int:
    """Measure the requested figures, print tables and judge them."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return the missed limits."""
    missed: list[str] = []
    for figure in args.figures:
        found: dict[str, Any] = report.setdefault(figure, {})
        measure = {"23": figure_23, "20": figure_20, "19": canary_training.figure_19}[figure]
        tables = {"23": table, "20": table, "19": canary_training.table}[figure]
        for name, part in measure(args):
            found[name] = part
            show(report, tables(figure, name, part))
            write(args.json, report)
        judge = {"23": judged_23, "20": judged_20, "19": canary_training.judged_19}[figure]
        missed += judge(found)
    return missed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--slow", nargs="+", choices=SLOW, default=["equal"], help="in Fig. 23")
    parser.add_argument("--size", default="3x2", help="PORTSxLEVELS of Fig. 23's BCube (3x2)")
    parser.add_argument("--sizes", nargs="+", default=["2x2", "3x2", "4x2"], help="in Fig. 20")
    parser.add_argument("--model", default="vgg19_v100", help="the profile (vgg19_v100)")
    parser.add_argument("--rate", default="10gbit", help="of an interface (10gbit)")
    parser.add_argument(
        "--rows", nargs="+", default=[BML, DEFAULT, CANARY, SIX_BITS, BSP, AKO],
        help="on the BCube; {s} is 2 n",
    )  # fmt: skip
    parser.add_argument("--star-rows", nargs="*", default=[SERVERS], help="on a star")
    parser.add_argument("--iterations", type=int, default=30, help="timed ones of each row (30)")
    parser.add_argument("--rounds", type=int, default=2, help="how often rows take turns (2)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed ones of each turn (2)")
    parser.add_argument("--scale", type=float, default=0.05, help="of the model (0.05)")
    parser.add_argument("--stretch", type=float, default=8.0, help="slow motion (8)")
    canary_training.add_arguments(parser)
    parser.add_argument("--json", type=Path, default=Path("out/canary.json"), metavar="FILE")
    return parser.parse_args()


def config(args: argparse.Namespace, lab: str, rows: list[str], slow: str) -> BenchConfig:
    """Return one bench."""
    return BenchConfig(
        lab=lab,
        model=f"paced:{args.model}@{args.scale:g}",
        strategies=tuple(rows),
        iterations=args.iterations,
        rounds=min(args.rounds, args.iterations),
        warmup=args.warmup,
        stretch=args.stretch,
        slow=SLOW[slow],
        traffic=True,
        measure=False,
    )


def benches(args: argparse.Namespace, size: str, slow: str) -> list[BenchConfig]:
    """Return the benches of one BCube: on it, and on a star of as many hosts."""
    ports, levels = topologies.parse_size(size)
    rows = [row.replace("{s}", str(2 * ports**levels)) for row in args.rows]
    made = [config(args, f"bcube:{size}@{args.rate}", rows, slow)]
    if args.star_rows:
        made.append(config(args, f"star:{ports**levels}@{args.rate}", args.star_rows, slow))
    for each in made:
        each.check()
    return made


def figure_23(args: argparse.Namespace) -> Any:
    """Yield the rows by the slow workers."""
    planned = {name: benches(args, args.size, name) for name in args.slow}
    yield from measured(planned)


def figure_20(args: argparse.Namespace) -> Any:
    """Yield the rows by the BCube's size."""
    planned = {size: benches(args, size, "equal") for size in args.sizes}
    yield from measured(planned)


def measured(planned: dict[str, list[BenchConfig]]) -> Any:
    """Run the benches, in slow motion and at real pace; yield their names and results."""
    paces = {name: [made, at_real_pace(made)] for name, made in planned.items()}
    long = estimate.of_all([each for both in paces.values() for made in both for each in made])
    print(f"takes about {estimate.about(long)}", file=sys.stderr, flush=True)
    for number, (name, both) in enumerate(paces.items(), start=1):
        print(f"{number}/{len(planned)}: {name}", file=sys.stderr, flush=True)
        slow_motion, real = map(run, both)
        yield name, {**slow_motion, "real": real if both[1] else None}


def at_real_pace(made: list[BenchConfig]) -> list[BenchConfig]:
    """Return the same benches without slow motion; none if they have none."""
    return [replace(each, stretch=1.0) for each in made if each.stretch != 1.0]


def run(made: list[BenchConfig]) -> dict[str, Any]:
    """Run benches one after the other; return their rows."""
    rows: dict[str, Any] = {}
    for each in made:
        rows |= figures(each, runner.run(each, command=sys.argv).report)
    return {"rows": rows, "configs": [asdict(each) for each in made]}


def figures(made: BenchConfig, report: Report) -> dict[str, Any]:
    """Return one bench's figures by row."""
    rows = {}
    for run in report.runs:
        # Without lockstep, iterations differ in length, so only their sum is meaningful.
        mean = statistics.fmean(run.samples_s)
        rows[run.strategy] = {
            "iteration_s": mean,
            "quantiles_s": asdict(run.iteration_s),
            "images_per_s": report.workers * IMAGES * made.stretch / mean,
            "bytes_per_iteration": run.bytes_per_iteration,
            "traffic": None if run.traffic is None else asdict(run.traffic),
            "iterations_per_s": asdict(run.iterations_per_s),
            "cores_share": run.cores_share,
            "cpu_s_per_iteration": run.cpu_s_per_iteration,
            "limited_by_cores": run.limited_by_cores,
            "gradients": report.workers * len(run.samples_s),
            "fired_by_rank": run.fired_by_rank,
        }
    return rows


COLUMNS = (
    "row",
    "real pace: times as fast as BML",
    "times as fast as BML",
    "real pace: images/s",
    "images/s",
    "mean iteration, s",
    "p10 .. p90, s",
    "sent, MB",
    "of BML's bytes",
    "links used, mean, %",
    "busiest window, %",
    "real pace: dropped gradients",
    "dropped gradients",
)


def table(figure: str, name: str, part: dict[str, Any]) -> Printed:
    """Return the rows of one part for printing, and where a row of Canary's is slower."""
    rows, config = part["rows"], part["configs"][0]
    real = part["real"]["rows"] if part["real"] else rows
    cells = []
    for row, own in rows.items():
        spread, traffic = own["quantiles_s"], own["traffic"]
        shares = [f"{100 * traffic[key]:.0f}" for key in ("mean", "peak")] if traffic else ["", ""]
        cells.append(
            (
                row,
                of_bml(real, row, "iteration_s", 2, over=True),
                of_bml(rows, row, "iteration_s", 2, over=True),
                f"{real[row]['images_per_s']:.0f}",
                f"{own['images_per_s']:.0f}",
                f"{own['iteration_s']:.3f}",
                f"{spread['p10']:.3f} .. {spread['p90']:.3f}",
                f"{own['bytes_per_iteration'] / 1e6:.2f}",
                of_bml(rows, row, "bytes_per_iteration", 3),
                *shares,
                dropped(real[row]),
                dropped(own),
            )
        )
    motion = f"slow motion of {config['stretch']:g} and real pace"
    title = (
        f"Figs. 20, 21 and 23, {name}" if figure == "23" else f"Fig. 20, {name}"
    ) + f": {config['model']} on {config['lab']}, {motion}, {config['iterations']} iterations"
    return Printed.of(title, COLUMNS, cells, notes(part))


def notes(part: dict[str, Any]) -> list[str]:
    """Return the slower rows, the meaning of the figures, and what disturbed them."""
    lines, full = [], []
    for pace, each in (("real pace", part["real"]), ("slow motion", part)):
        rows = each["rows"] if each else {}
        for row, own in rows.items():
            if row.startswith("canary") and own["iteration_s"] > rows.get(BML, own)["iteration_s"]:
                times = own["iteration_s"] / rows[BML]["iteration_s"]
                lines.append(f"behind: {row} takes {times:.2f} times as long as BML, {pace}")
            if own["limited_by_cores"]:
                full.append(f"limited by this machine's cores, {pace}: {row}")
    stretch, model = part["configs"][0]["stretch"], part["configs"][0]["model"]
    factors = [models.parse(model, stretch=each).codec_factor for each in (stretch, 1.0)]
    labs = ", ".join(config["lab"] for config in part["configs"][1:])
    return [
        *lines,
        "the paper's Fig. 23, the time to converge: Canary 1.61 times BML, 2.28 Ako, 2.84 servers; "
        "Fig. 21: 56.28% fewer bytes, links used 51.05% at most, 75.98% without",
        f"codecs of workers: what grows with the model takes {factors[0]:g} times as long as "
        f"measured here, {factors[1]:g} times at real pace, as on the whole model; sums and copies "
        "do not",
        "images/s: as if there were no slow motion; an iteration: as many applied gradients as "
        "there are workers; dropped: by the staleness rule, of those that were made",
        *([f"servers on {labs}"] if labs else []),
        *full,
    ]


def of_bml(rows: dict[str, Any], row: str, key: str, decimals: int, *, over: bool = False) -> str:
    """Return a figure as a share of BML's, or BML's as a multiple of it; empty without BML."""
    if BML not in rows:
        return ""
    share = rows[row][key] / rows[BML][key]
    return f"{1 / share if over else share:.{decimals}f}"


def dropped(own: dict[str, Any]) -> str:
    """Return how many gradients the rule has dropped, of how many; empty without the rule."""
    if own["fired_by_rank"] is None:
        return ""
    count = sum(fired["dropped"] for fired in own["fired_by_rank"])
    return f"{count} of {own['gradients'] + count}"


def judged_23(found: dict[str, Any]) -> list[str]:
    """Return the missed limits of Fig. 23."""
    missed = []
    for name, part in found.items():
        rows = part["rows"]
        ours = {row: own for row, own in rows.items() if row.startswith("canary") and row != BSP}
        bml = rows.get(BML)
        if not ours or bml is None:
            continue
        asked = NOT_SLOWER if name == "equal" else FASTER
        for row, own in ours.items():
            faster = bml["iteration_s"] / own["iteration_s"]
            if faster < asked:
                missed.append(f"23, {name}: {row} {faster:.2f} times as fast as BML; limit {asked}")
            peaks = own["traffic"]["peak"], bml["traffic"]["peak"]
            if peaks[0] >= peaks[1]:
                missed.append(
                    f"23, {name}: {row}: busiest window {peaks[0]:.0%}, BML's {peaks[1]:.0%}"
                )
        least = min(own["bytes_per_iteration"] for own in ours.values())
        share = least / bml["bytes_per_iteration"]
        if share > OF_BYTES:
            missed.append(f"23, {name}: sends {share:.2f} of BML's bytes; limit {OF_BYTES}")
    return missed


def judged_20(found: dict[str, Any]) -> list[str]:
    """Return the sizes at which Canary's images per second do not grow."""
    missed = []
    speeds = {
        size: next((own["images_per_s"] for row, own in part["rows"].items() if "canary" in row), 0)
        for size, part in found.items()
    }
    sizes = list(speeds)
    for before, after in itertools.pairwise(sizes):
        if speeds[after] <= speeds[before]:
            missed.append(f"20: {speeds[after]:.0f} images/s on {after}, {before} had more")
    return missed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
