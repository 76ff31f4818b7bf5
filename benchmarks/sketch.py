"""The gradient sketch as in section 6.5 and 6.6 of the paper on Canary, figure by figure.

22a  real training on real data over slow links, sketched for the first 0 to 100% of all
     iterations and dense for the rest: accuracy over time. The paper does not state which part of
     the progress is sketched; its claim is that the early stage becomes faster, so it is the first.
22b  seconds of sketching in one iteration of every profile: encoding with a residual, adding the
     others' payloads and decoding, on this machine's kernels, all of it exposed; with the
     profile's own forward and backward, and the links' time for the payloads. A stack of
     times without overlap, as the paper draws it.
ddp  Figs. 25 to 27: DistributedDataParallel with and without the sketch by its hook, paced
     models on emulated clusters; samples per second. Profiles are of ImageNet's sizes (Fig. 27).
     At the paper's 10GbE first, and at 1 Gbit/s, in slow motion, so that two cores can carry the
     traffic; the sketch is slowed down as well, to what one core would need for the whole model.

Rules, with exit code 1 and a line for each that is missed: in 22a the final accuracy, mean over
seeds, is at most 0.5 points below that of the dense training, all workers end with the same
weights, and a sketched iteration takes at most 0.9 of a dense one; in 22b sketching is less than
10% of the iteration on every profile; in ddp no model is slower with the sketch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import hooks
import sketch_stack
import torch
import torch.distributed as dist
from common import end_as_by_ctrl_c, refuse_unwritable, show, write
from sketch_stack import coded

import wingbeat
from wingbeat import compression
from wingbeat.errors import UsageError
from wingbeat_lab import lab, paced
from wingbeat_lab.bench import estimate, machine, models
from wingbeat_lab.bench.table import Printed

FIGURES = ("22a", "22b", "ddp")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
POINTS, FASTER, OVERHEAD = 0.5, 0.9, 0.1
DDP_MODELS = ("alexnet", "vgg19", "inception_v3", "resnet50")
"""Those of the paper's six that have profiles; ResNet-50 represents its ResNets."""
LABS = ("star:4@10gbit", "star:4@1gbit")
PAPER_WIRE = "lowrank@4:bits=8:split=count:level=ends"
EXAMPLES = f"""examples:
  python benchmarks/sketch.py --json out/sketch.json
  python benchmarks/sketch.py --figures 22a --seeds 0 --shares 0 0.5 1
  python benchmarks/sketch.py --figures 22b --device cuda
  python benchmarks/sketch.py --figures 22b --models vgg19 --wire {PAPER_WIRE}
  python benchmarks/sketch.py --figures ddp --labs star:4@1gbit --models vgg19
"""


# -- Fig. 22a --------------------------------------------------------------------------------


def row_of(share: float, iterations: int, wire: str) -> str:
    """The row that sketches this share; all dense is the plain row, without a codec."""
    if not share:
        return "allreduce"
    asked = replace(coded(wire), share=share, total=iterations, auto_disable=False)
    return f"allreduce:compression={compression.to_text(asked)}"


def worker(options: argparse.Namespace) -> None:
    """All trainings on this rank, shares taking turns within a seed; rank 0 writes a line each."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    task = accuracy.TASKS[options.task]()
    iterations = options.iterations or task.iterations
    runs = [(seed, share) for seed in options.seeds for share in options.shares]
    begun = time.monotonic()
    for number, (seed, share) in enumerate(runs, 1):
        contender = accuracy.parse(row_of(share, iterations, options.wire), None)
        made = accuracy.train(task, contender, seed, iterations)
        if dist.get_rank() == 0:
            with options.worker.open("a", encoding="utf-8") as file:
                print(json.dumps({"seed": seed, "share": share, **made}), file=file)
            left = (time.monotonic() - begun) / number * (len(runs) - number)
            last = made["curve"][-1]
            print(
                f"{number}/{len(runs)} share {share:g}, seed {seed}: {last['accuracy']:.2f}%, "
                f"{last['s']:.0f} s; about {estimate.about(left)} left",
                flush=True,
            )
    wingbeat.shutdown()


def trainings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on the lab; every training's curve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        words = [sys.executable, __file__, "--worker", str(path), "--task", options.task]
        words += ["--wire", options.wire, "--shares", *map(str, options.shares)]
        words += ["--seeds", *map(str, options.seeds)]
        if options.iterations:
            words += ["--iterations", str(options.iterations)]
        result = lab.run(lab.LabSpec.parse(options.lab), words, on_line=hooks.progress)
        if result.exit_code:
            sys.exit(result.exit_code)
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_share(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each share: means over seeds, and the time to the dense training's early accuracy.

    Early is its first tenth; a training that never reaches it has no time.
    """
    dense = [run["curve"][0]["accuracy"] for run in runs if not run["share"]]
    early = statistics.fmean(dense) if dense else None
    rows = []
    for share in dict.fromkeys(run["share"] for run in runs):
        mine = [run for run in runs if run["share"] == share]
        ends = [run["curve"][-1]["accuracy"] for run in mine]
        reached = [seconds_to(run["curve"], early) for run in mine]
        rows.append(
            {
                "share": share,
                "accuracy": statistics.fmean(ends),
                "lowest": min(ends),
                "highest": max(ends),
                "training_s": statistics.fmean(run["curve"][-1]["s"] for run in mine),
                "early_s": None if None in reached else statistics.fmean(filter(None, reached)),
                "same_weights": all(run["same_weights"] for run in mine),
            }
        )
    return rows


def seconds_to(curve: Sequence[dict[str, Any]], least: float | None) -> float | None:
    """Seconds of training until the accuracy was reached; None if it never was."""
    if least is None:
        return None
    return next((mark["s"] for mark in curve if mark["accuracy"] >= least), None)


def missed_22a(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"22a: share {r['share']:g} leaves different weights" for r in rows if not r["same_weights"]
    ]
    dense = next((row for row in rows if not row["share"]), None)
    if dense is None:
        return lines
    for row in rows:
        gap = dense["accuracy"] - row["accuracy"]
        if gap > POINTS:
            lines.append(f"22a: share {row['share']:g} ends {gap:.2f} points lower; limit {POINTS}")
        ratio = row["training_s"] / dense["training_s"]
        if row["share"] == 1.0 and ratio > FASTER:
            lines.append(f"22a: an iteration takes {ratio:.2f} of a dense one; limit {FASTER}")
    return lines


def figure_22a(options: argparse.Namespace) -> dict[str, Any]:
    runs = trainings(options)
    rows = by_share(runs)
    return {"rows": rows, "runs": runs, "missed": missed_22a(rows)}


def table_22a(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Printed:
    cells = [
        (
            f"{row['share']:.0%}",
            f"{row['accuracy']:.2f}",
            f"{row['lowest']:.2f} .. {row['highest']:.2f}",
            f"{row['training_s']:.1f}",
            "" if row["early_s"] is None else f"{row['early_s']:.1f}",
        )
        for row in rows
    ]
    columns = (
        "sketched",
        "right, %",
        "over seeds, %",
        "training, s",
        "to the first mark, s",
    )
    title = f"Fig. 22a: {options.task} on {options.lab}, {options.wire}"
    notes = [
        f"mean of {len(options.seeds)} seeds; sketched: the first share of all iterations",
        "to the first mark: to what the dense training has after its first tenth",
    ]
    return Printed.of(title, columns, cells, notes)


# -- Fig. 22b --------------------------------------------------------------------------------


def figure_22b(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    rows = []
    for number, name in enumerate(options.profiles, 1):
        rows.append(sketch_stack.overhead(name, coded(options.wire), options))
        print(f"22b: {number}/{len(options.profiles)} {name}", file=sys.stderr, flush=True)
    lines = [
        f"22b: sketching is {row['share']:.1%} of an iteration of {row['model']}; "
        f"limit {OVERHEAD:.0%}"
        for row in rows
        if row["share"] >= OVERHEAD
    ]
    return {"rows": rows, "missed": lines}


def table_22b(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Printed:
    cells = [
        (
            row["model"],
            f"{1e3 * row['compute_s']:.1f}",
            f"{1e3 * row['sketch_s']:.1f}",
            " .. ".join(f"{1e3 * end(row['samples_s']):.1f}" for end in (min, max)),
            f"{1e3 * row['links_s']:.1f}",
            f"{100 * row['share']:.1f}",
        )
        for row in sorted(rows, key=lambda row: -row["share"])
    ]
    columns = (
        "model",
        "compute, ms",
        "sketch, ms",
        "least .. largest, ms",
        "links, ms",
        "sketch of all, %",
    )
    title = (
        f"Fig. 22b: {options.wire} on {options.device}, {options.threads} thread(s); "
        f"{options.workers} workers at {options.gbit:g} Gbit/s, models at {options.scale:g} of "
        "their size"
    )
    notes = [
        f"median of {options.rounds} rounds; the largest share first; wanted: under {OVERHEAD:.0%}"
    ]
    return Printed.of(title, columns, cells, notes)


# -- Figs. 25 to 27 --------------------------------------------------------------------------


def figure_ddp(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for text in options.labs:
        for name in options.models or DDP_MODELS:
            asked = argparse.Namespace(
                lab=text,
                model=f"paced:{name}@{options.scale:g}",
                rows=["ddp", options.wire],
                rounds=options.rounds,
                iterations=options.ddp_iterations,
                warmup=3,
                stretch=options.stretch,
            )
            hosts, turns = hooks.measure(asked)
            batch = paced.load_profile(name).batch_size
            for row in hooks.summary(turns, asked.rows, hosts):
                found = {"lab": text, "model": name, "workers": hosts, **row}
                # Without slow motion.
                found["samples"] = hosts * batch * options.stretch
                found["samples_per_s"] = found["samples"] / row["iteration_s"]
                rows.append(found)
    lines = [
        f"ddp: {row['model']} on {row['lab']} takes {row['time_ratio']:.2f} of the time with "
        f"{row['row']}; limit 1"
        for row in rows
        if row["time_ratio"] > 1.0
    ]
    return {"rows": rows, "missed": lines}


def table_ddp(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Printed:
    cells = [
        (
            f"{row['lab']}, {row['model']}, {row['row']}",
            f"{row['samples_per_s']:.0f}",
            " .. ".join(f"{row['samples'] / end(row['samples_s']):.0f}" for end in (max, min)),
            f"{row['time_ratio']:.2f}",
            f"{row['bytes_ratio']:.3f}",
        )
        for row in rows
    ]
    behind = sorted((row for row in rows if row["time_ratio"] > 1), key=lambda r: -r["time_ratio"])
    factor = hooks.codec_factor(f"paced:resnet50@{options.scale:g}", options.stretch)
    notes = [
        *(
            f"behind: on {row['lab']} {row['model']} takes {row['time_ratio']:.2f} times as long "
            f"with {row['row']} as without"
            for row in behind
        ),
        f"sketches: what grows with the model takes {factor:g} times as long as measured here, as "
        "on the whole model",
        f"median of {options.rounds} rounds of {options.ddp_iterations} iterations; samples/s: as "
        "if there were no slow motion",
    ]
    columns = (
        "lab, model, row",
        "samples/s",
        "least .. largest",
        "time, of DDP's",
        "bytes, of DDP's",
    )
    title = (
        f"Figs. 25 to 27: models at {options.scale:g} of their size, slow motion of "
        f"{options.stretch:g}"
    )
    return Printed.of(title, columns, cells, notes)


# -- all -------------------------------------------------------------------------------------

MEASURE = {
    "22a": (figure_22a, table_22a),
    "22b": (figure_22b, table_22b),
    "ddp": (figure_ddp, table_ddp),
}


def expected_s(options: argparse.Namespace) -> float:
    """Estimated duration of all parts, from bytes and rates; the machine may be slower."""
    seconds = 0.0
    if "22a" in options.figures:
        spec = lab.LabSpec.parse(options.lab)
        task = accuracy.TASKS[options.task]()
        nbytes = 4 * sum(each.numel() for each in task.network(0).parameters())
        dense_s = 16 * (spec.hosts - 1) / spec.hosts * nbytes / (spec.rate or 1e10)
        shares = sum(1.0 - 0.75 * share for share in options.shares)
        iterations = options.iterations or task.iterations
        seconds += (
            len(options.seeds) * iterations * (shares * dense_s + 0.015 * len(options.shares))
        )
    if "22b" in options.figures:
        numels = [sum(p.numel for p in paced.load_profile(n).layers) for n in options.profiles]
        seconds += sum(numels) * options.scale * (options.rounds + 2) * 8e-9
    if "ddp" in options.figures:
        for text in options.labs:
            spec = lab.LabSpec.parse(text)
            for name in options.models or DDP_MODELS:
                profile = paced.load_profile(name)
                numel = sum(layer.numel for layer in profile.layers)
                one = (profile.forward_ms + profile.backward_ms) / 1e3
                one += 1.3 * 64 * numel / (spec.rate or 1e10)
                one *= options.stretch
                seconds += 20 + options.rounds * (options.ddp_iterations + 3) * one
    return seconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    add("--wire", default="sketch", help="how gradients are sketched; default: sketch")
    add("--models", nargs="+", choices=paced.names(), help="22b: all profiles; ddp: the paper's")
    add("--rounds", type=int, default=3, help="of 22b and ddp; default: 3")
    add("--task", choices=accuracy.TASKS, default="digits", help="22a; default: digits")
    add("--shares", nargs="+", type=float, default=list(SHARES), help="22a; default: quarters")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="22a; default: 0 1 2")
    add("--iterations", type=int, help="22a, of each training; default: the task's own")
    add("--lab", default="star:4@100mbit", help="22a; default: star:4@100mbit")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="22b; default: cpu")
    add("--threads", type=int, default=1, help="22b, of the CPU; default: 1")
    add("--workers", type=int, default=16, help="22b; default: 16, BCube(4,2)")
    add("--gbit", type=float, default=10.0, help="22b, of a worker's links; default: 10")
    add("--labs", nargs="+", default=list(LABS), help=f"ddp; default: {' '.join(LABS)}")
    add("--scale", type=float, default=0.0, help="of models; default: 1 for 22b, 0.05 for ddp")
    add("--stretch", type=float, default=2.0, help="ddp, slow motion; default: 2")
    add("--ddp-iterations", type=int, default=6, help="ddp, timed, in each turn; default: 6")
    add("--json", type=Path, help="write figures here, after each part")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for invalid values, before any measurement."""
    coded(options.wire)
    for key in ("rounds", "threads", "ddp_iterations"):
        if getattr(options, key) < 1:
            raise UsageError(f"--{key.replace('_', '-')} {getattr(options, key)}: allowed: from 1")
    if options.workers < 2 or not options.gbit > 0 or not 0 <= options.scale <= 1:
        raise UsageError("allowed are --workers from 2, --gbit above 0, and --scale from 0 to 1")
    models.parse(f"paced:resnet50@{options.scale or 1:g}", stretch=options.stretch)
    if options.iterations is not None and options.iterations < accuracy.EVALUATIONS:
        raise UsageError(
            f"--iterations {options.iterations}: allowed are {accuracy.EVALUATIONS} or more"
        )
    if not all(0 <= share <= 1 for share in options.shares):
        raise UsageError(f"--shares {options.shares}: allowed are numbers from 0 to 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here")
    for text in (options.lab, *options.labs):
        lab.LabSpec.parse(text)
    options.profiles = options.models or list(paced.names())


def main() -> int:
    """Measure the requested figures, print tables, and judge them."""
    options = arguments()
    if options.worker:
        worker(options)
        return 0
    try:
        check(options)
        if options.json:
            refuse_unwritable(options.json)
        print(f"about {estimate.about(expected_s(with_scale(options, '22b')))}", file=sys.stderr)
        end_as_by_ctrl_c()
        report: dict[str, Any] = {
            "command": sys.argv,
            "machine": machine.describe(),
            "versions": machine.versions(),
            "wire": options.wire,
        }
        for name in options.figures:
            figure, table = MEASURE[name]
            scaled = with_scale(options, name)
            report[name] = figure(scaled)
            show(report, table(report[name]["rows"], scaled))
            if options.json:
                write(options.json, report)
    except UsageError as err:
        print(f"sketch.py: {err}", file=sys.stderr)
        return 2
    lines = [line for name in options.figures for line in report[name]["missed"]]
    for line in lines:
        print(f"MISSED: {line}")
    return int(bool(lines))


def with_scale(options: argparse.Namespace, figure: str) -> argparse.Namespace:
    """The options with this figure's scale of models, unless one was given."""
    usual = 0.05 if figure == "ddp" else 1.0
    return argparse.Namespace(**{**vars(options), "scale": options.scale or usual})


if __name__ == "__main__":
    sys.exit(main())
