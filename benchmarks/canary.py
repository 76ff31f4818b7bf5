"""Canary on its BCubes beside its baselines: the paper's Figs. 19 to 21, 23 and 24.

    python benchmarks/canary.py --json out/canary.json          (all figures)
    python benchmarks/canary.py --figures 23                    (with and without slow workers)
    python benchmarks/canary.py --figures 20 --sizes 2x2 3x2    (speed by number of workers)
    python benchmarks/canary.py --figures 19 --seeds 0          (real training, by seconds)

23  VGG-19 on BCube(3, 2), 10 Gbit/s an interface, paced as on a V100; s = 18, p = 6, k = 10:
    seconds for the same number of applied gradients, once with equal workers, once with another one
    +2x slow in each iteration, once with one that always is. A row with s = 0, its own BSP, shows
    what the sketch alone gains. The paper's Fig. 23 is the time to converge (section 6.6), and has
    no slow workers; ours is of iterations. Parameter servers are on a star, one a job as in the
    paper. Bytes are the kernel's, and traffic over time (21) is in the same runs.
20  The same with 4, 9 and 16 workers: images a second, and how they grow.
19  Real training on real data (digits) with 4 and 9 workers on slow links, three seeds, with and
    without a worker that is +2x slow half of the time: final accuracy, and seconds to BSP's less
    half a point (24). s and p are in the paper's proportion: s = 2 n; p = 2 of the 4 layers.
    Learning rate as in section 6.1.3: 0.1, times 0.2 every quarter; no momentum, which the paper
    does not name.

The model's scale shrinks bytes and rates together; the stretch slows computation and links down
together, until two cores can do the work of all hosts. Rows take turns. Codecs
are slowed down as well, by stretch over scale, to what one core would need for the whole model.
Sums and copies are not: at a scale of 0.05 and a stretch of 8 they take 1/160 of their real share.

Exit code 1 if a limit is missed. 23: a row of Canary, but for s = 0, slower than 0.98 of BML with
equal workers, or less than 1.61 times as fast with slow ones, or its busiest window not below
BML's; the bytes of the row that sends least more than 0.3 of BML's. 19: accuracy more than 0.5
points below BSP's, or not the first there with a slow worker. ``benchmarks/sketch.py`` has Figs. 22
and 25 to 27.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import canary_training
from common import run_and_judge, write

from wingbeat import topologies
from wingbeat.bench import estimate, runner, table
from wingbeat.bench.config import BenchConfig
from wingbeat.bench.results import Report

FIGURES = ("23", "20", "19")
BML, AKO, SERVER = "bml", "ako", "vanillaps"
CANARY = "canary:s=18,p=6,colayers=10,wire=sketch,encrypted=False"
SIX_BITS = CANARY.replace("sketch", "sketch@6")
BSP = CANARY.replace("s=18,p=6,", "s=0,")
"""Canary's exchange without staleness: what is gained over this is what ``s`` gains."""
SERVERS = f"{SERVER}:servers=1,encrypted=False"
SLOW: dict[str, tuple[str, ...]] = {"equal": (), "random": ("random:+2x",), "one": ("1=+2x",)}
IMAGES = 64
"""A worker's, in an iteration of the profile."""
PAPER = {BML: 1.61, AKO: 2.28, SERVERS: 2.84}
"""How much sooner than these Canary converges in Fig. 23; no time of an iteration."""
NOT_SLOWER, FASTER, OF_BYTES = 0.98, 1.61, 0.3


def main() -> int:
    """Measure what was asked for, print tables and judge them."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return which limits are missed."""
    missed: list[str] = []
    for figure in args.figures:
        found: dict[str, Any] = report.setdefault(figure, {})
        measure = {"23": figure_23, "20": figure_20, "19": canary_training.figure_19}[figure]
        for name, part in measure(args):
            found[name] = part
            write(args.json, report)
        judge = {"23": judged_23, "20": judged_20, "19": canary_training.judged_19}[figure]
        missed += judge(found)
    return missed


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--slow", nargs="+", choices=SLOW, default=list(SLOW), help="in Fig. 23")
    parser.add_argument("--size", default="3x2", help="PORTSxLEVELS of Fig. 23's BCube (3x2)")
    parser.add_argument("--sizes", nargs="+", default=["2x2", "3x2", "4x2"], help="in Fig. 20")
    parser.add_argument("--model", default="vgg19_v100", help="the profile (vgg19_v100)")
    parser.add_argument("--rate", default="10gbit", help="of an interface (10gbit)")
    parser.add_argument(
        "--rows", nargs="+", default=[BML, CANARY, SIX_BITS, BSP, AKO], help="on the BCube"
    )
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
    made = [config(args, f"bcube:{size}@{args.rate}", args.rows, slow)]
    if args.star_rows:
        made.append(config(args, f"star:{ports**levels}@{args.rate}", args.star_rows, slow))
    for each in made:
        each.check()
    return made


def figure_23(args: argparse.Namespace) -> Any:
    """Yield the rows by who is slow."""
    planned = {name: benches(args, args.size, name) for name in args.slow}
    yield from measured(planned)


def figure_20(args: argparse.Namespace) -> Any:
    """Yield the rows by the BCube's size."""
    planned = {size: benches(args, size, "equal") for size in args.sizes}
    yield from measured(planned)


def measured(planned: dict[str, list[BenchConfig]]) -> Any:
    """Run the benches; yield their names and what they found."""
    long = estimate.of_all([each for made in planned.values() for each in made])
    print(f"takes about {estimate.about(long)}", file=sys.stderr, flush=True)
    for number, (name, made) in enumerate(planned.items(), start=1):
        print(f"{number}/{len(planned)}: {name}", file=sys.stderr, flush=True)
        rows: dict[str, Any] = {}
        for each in made:
            rows |= figures(each, runner.run(each, command=sys.argv).report)
        show(f"{name}: {made[0].model} on {made[0].lab}", rows)
        yield name, {"rows": rows, "configs": [asdict(each) for each in made]}


def figures(made: BenchConfig, report: Report) -> dict[str, Any]:
    """What one bench says of its rows."""
    rows = {}
    for run in report.runs:
        # Whoever is not in lockstep has iterations of all lengths: what counts is their sum.
        mean = statistics.fmean(run.samples_s)
        rows[run.strategy] = {
            "iteration_s": mean,
            "images_per_s": report.workers * IMAGES * made.stretch / mean,
            "bytes_per_iteration": run.bytes_per_iteration,
            "traffic": None if run.traffic is None else asdict(run.traffic),
            "iterations_per_s": asdict(run.iterations_per_s),
            "cores_share": run.cores_share,
            "cpu_s_per_iteration": run.cpu_s_per_iteration,
            "limited_by_cores": run.limited_by_cores,
            "fired_by_rank": run.fired_by_rank,
        }
    return rows


def show(title: str, rows: dict[str, Any]) -> None:
    """Print the rows of one bench, beside the first of BML's."""
    print(f"\n{title}")
    print(f"{'row':44} {'s':>7} {'x':>6} {'images/s':>9} {'MB':>7} {'mean':>5} {'peak':>5}")
    first = rows.get(BML)
    for row, own in rows.items():
        faster = f"{first['iteration_s'] / own['iteration_s']:6.2f}" if first else ""
        traffic = own["traffic"]
        shares = f"{traffic['mean']:5.0%} {traffic['peak']:5.0%}" if traffic else ""
        full = "  limited by this machine's cores" if own["limited_by_cores"] else ""
        fired = own.get("fired_by_rank")
        bound = f"  {table.acted(fired)}" if fired else ""
        print(
            f"{row:44} {own['iteration_s']:7.3f} {faster:>6} {own['images_per_s']:9.1f} "
            f"{own['bytes_per_iteration'] / 2**20:7.1f} {shares}{full}{bound}"
        )


def judged_23(found: dict[str, Any]) -> list[str]:
    """Return which limits of Fig. 23 are missed."""
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
    """Return at which sizes Canary's images a second do not grow."""
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
