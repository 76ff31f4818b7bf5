"""How soon each search finds a good bucket size: Bayesian optimisation, random, grid (Fig. 10).

    python benchmarks/tuning.py --json out/tuning.json
    python benchmarks/tuning.py --models resnet50 densenet201 --searches bo --curve-steps 3

For each model, on one lab and in one run: DeAR trains with 20 bucket sizes between 1 and 100 MB,
evenly spaced in their logarithm, which take turns (the curve). Then each search tunes trainings
of its own, one from each of several small sizes (``--starts``): 25 MB, where DeAR starts, is within
3% of the best on these networks, so that a search from there has nothing to find. At the end the
sizes that the searches chose and the curve's best take turns once more.

A search has *found* a size when the curve is within 3% of its best there. A start that is within 3%
itself is marked, and does not count. The grid goes up from the smallest size. Random search
needs 1/p trials on average, where a share p of the range is within 3%. Model scale and network are
those of ``dear.py`` (slow: 10GbE on 64 GPUs); sizes shrink with the model.

Exit code 1 if Bayesian optimisation needs more than 10 trials on a model, chooses a size that is
more than 3% from the best, or a trial costs 50 ms or more.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import show, write

import wingbeat
from wingbeat.engine.upgrade import engine_of
from wingbeat_lab import lab, paced
from wingbeat_lab.bench import attach, machine
from wingbeat_lab.bench.config import scaled
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab.spec import LabSpec

MODELS = ("resnet50", "densenet201", "inception_v4", "bert_base", "bert_large")
SEARCHES = ("bo", "random", "grid")
WITHIN = 0.97
MAX_TRIALS, MAX_COST_S = 10, 0.05
POINTS = 20
SETTLE = 2
"""Uncounted iterations after a change of size: memory is touched for the first time."""


def curve_sizes() -> list[float]:
    """The grid's sizes in MB, before the model's scale."""
    return [100 ** (i / (POINTS - 1)) for i in range(POINTS)]


# -- workers ------------------------------------------------------------------------------


class Training:
    """One distributed paced model whose bucket size can be changed."""

    def __init__(self, options: argparse.Namespace, plan: str, start_mb: float = 25.0) -> None:
        self.scale = paced.parse(options.model).scale
        profile = paced.parse(options.model)
        network = paced.PacedModel(profile, dist.get_rank(), time_scale=options.stretch)
        strategy = wingbeat.DeAR(
            plan=plan,
            mb=start_mb * self.scale,
            edge_mb=options.edge_mb * self.scale,
            min_mb=1 * self.scale,
            max_mb=100 * self.scale,
            trials=options.trials,
            steps=options.trial_steps,
        )
        make = attach.optimizer_maker("sgd", paced=True)
        self.model, self.optimizer = wingbeat.distribute(
            network, make(network.parameters()), strategy
        )
        engine = engine_of(self.model)
        assert engine is not None
        self.engine = engine

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(None))
        self.optimizer.step()

    def time(self, mb: float, steps: int) -> list[float]:
        """Change to buckets of ``mb`` and return the seconds of ``steps`` iterations."""
        bucketing = self.engine.bucketing
        size = int(mb * self.scale * 2**20)
        bucketing.use(dataclasses.replace(bucketing.fusion, bucket_bytes=size))
        for _ in range(SETTLE):
            self.step()
        starts = [time.monotonic()]
        for _ in range(steps):
            self.step()
            starts.append(time.monotonic())
        return starts

    def close(self) -> None:
        wingbeat.release(self.model, self.optimizer)


def samples_of(starts: Sequence[float]) -> list[float]:
    """Seconds of each iteration, from the last worker's start to the last worker's next start."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(starts))
    last = [max(stamps) for stamps in zip(*everyone, strict=True)]
    return [after - before for before, after in itertools.pairwise(last)]


def take_turns(
    options: argparse.Namespace, sizes: Sequence[float], steps: int, rounds: int, what: str
) -> list[float]:
    """Median seconds of an iteration at each size; the sizes take turns."""
    training = Training(options, "fixed")
    times: list[list[float]] = [[] for _ in sizes]
    for round_ in range(rounds):
        order = range(len(sizes)) if round_ % 2 == 0 else reversed(range(len(sizes)))
        for done, i in enumerate(order):
            times[i] += samples_of(training.time(sizes[i], steps))
            say(f"{what}: round {round_ + 1}/{rounds}, size {done + 1}/{len(sizes)}")
    training.close()
    return [statistics.median(values) for values in times]


def search(options: argparse.Namespace, name: str, start_mb: float) -> dict[str, Any]:
    """Train until the search has ended; return its trials, and its choice (on rank 0)."""
    training = Training(options, name, start_mb)
    control = training.engine.control
    assert control is not None
    tuning = control.tuning
    assert tuning is not None
    iterations = 0
    while not tuning.done:
        training.step()
        iterations += 1
    result = tuning.result
    training.close()
    if result is None:
        return {}
    mega = 2**20 * training.scale
    return {
        "search": name,
        "start_mb": start_mb,
        "iterations": iterations,
        "tried_mb": [s.bucket_bytes / mega for s in result.samples],
        "iterations_per_s": [s.iterations_per_s for s in result.samples],
        "chosen_mb": result.chosen_bytes / mega,
        "trial_cost_s": list(result.decision_s),
        "says": result.explain(),
    }


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
    wingbeat.init(timeout=120.0)
    sizes = curve_sizes()
    curve = take_turns(options, sizes, options.curve_steps, options.curve_rounds, "curve")
    searches = [
        search(options, *each) for each in itertools.product(options.searches, options.starts)
    ]
    best = sizes[curve.index(min(curve))]
    chosen: list[Any] = [[s.get("chosen_mb") for s in searches]]
    dist.broadcast_object_list(chosen)
    finalists = [*chosen[0], best]
    final = take_turns(options, finalists, options.curve_steps, 2, "final")
    if dist.get_rank() == 0:
        report = {"sizes_mb": sizes, "curve_s": curve, "searches": searches}
        report["final_mb"], report["final_s"] = finalists, final
        options.worker.write_text(json.dumps(report), encoding="utf-8")
    wingbeat.shutdown()


# -- parent -------------------------------------------------------------------------------


def interpolate(sizes: Sequence[float], curve: Sequence[float], mb: float) -> float:
    """The curve's seconds at ``mb``, linear in its logarithm."""
    if mb <= sizes[0]:
        return curve[0]
    for (a, b), (s, t) in zip(itertools.pairwise(sizes), itertools.pairwise(curve), strict=True):
        if mb <= b:
            share = math.log(mb / a) / math.log(b / a)
            return s + share * (t - s)
    return curve[-1]


def judge(raw: dict[str, Any]) -> dict[str, Any]:
    """Add to the raw figures each search's number of trials, and the quality of its choice."""
    sizes, curve = raw["sizes_mb"], raw["curve_s"]
    limit = min(curve) / WITHIN
    fine = [100 ** (i / 2000) for i in range(2001)]
    share = sum(interpolate(sizes, curve, mb) <= limit for mb in fine) / len(fine)
    *finals, best_s = raw["final_s"]
    for each, final_s in zip(raw["searches"], finals, strict=True):
        found = [interpolate(sizes, curve, mb) <= limit for mb in each["tried_mb"]]
        each["start_of_best"] = min(curve) / interpolate(sizes, curve, each["start_mb"])
        each["trials_until_found"] = found.index(True) + 1 if any(found) else None
        each["chosen_of_best"] = best_s / final_s
        each["max_trial_cost_ms"] = 1e3 * max(each["trial_cost_s"], default=0.0)
    return {
        **raw,
        "share_within_3_percent": share,
        "expected_trials_random": 1 / share,
        "best_mb": sizes[curve.index(min(curve))],
        "worst_of_best": min(curve) / max(curve),
    }


def missed(name: str, report: dict[str, Any]) -> list[str]:
    """The missed limits of Bayesian optimisation."""
    out = []
    for each in report["searches"]:
        if each["search"] != "bo":
            continue
        trials = each["trials_until_found"]
        if trials is None or trials > MAX_TRIALS:
            start = f"{each['start_mb']:g} MB"
            out.append(f"{name}: from {start} no size within 3% in {MAX_TRIALS} trials")
        if each["chosen_of_best"] < WITHIN:
            out.append(f"{name}: the chosen size reaches {each['chosen_of_best']:.3f} of the best")
        if each["max_trial_cost_ms"] >= 1e3 * MAX_COST_S:
            out.append(f"{name}: a trial cost {each['max_trial_cost_ms']:.0f} ms")
    return out


COLUMNS = (
    "search",
    "start, MB",
    "of the best",
    "trials until found",
    "of trials",
    "chosen, MB",
    "of the best",
    "dearest trial, ms",
)


def table(name: str, report: dict[str, Any], where: str) -> Printed:
    """Return the results of each search for one model, for printing."""
    searches = dict.fromkeys(each["search"] for each in report["searches"])
    cells = [
        (
            each["search"],
            f"{each['start_mb']:g}",
            f"{each['start_of_best']:.3f}" + ", useless" * (each["start_of_best"] >= WITHIN),
            str(each["trials_until_found"] or "never"),
            str(len(each["tried_mb"])),
            f"{each['chosen_mb']:.1f}",
            f"{each['chosen_of_best']:.3f}",
            f"{each['max_trial_cost_ms']:.0f}",
        )
        for each in report["searches"]
    ]
    notes = [
        *(over_starts(each, report["searches"]) for each in searches),
        f"best of the curve: {report['best_mb']:.1f} MB; its worst size reaches "
        f"{report['worst_of_best']:.3f} of it",
        f"within 3% of the best: {report['share_within_3_percent']:.0%} of the range, which random "
        f"search finds in {report['expected_trials_random']:.1f} trials on average",
    ]
    return Printed.of(f"Fig. 10: bucket sizes for {name}, {where}", COLUMNS, cells, notes)


def over_starts(search: str, searches: Sequence[dict[str, Any]]) -> str:
    """Describe the spread of a search's trials and choices over its useful starts."""
    mine = [s for s in searches if s["search"] == search and s["start_of_best"] < WITHIN]
    if not mine:
        return f"{search}: no start that is not good already"
    trials = [s["trials_until_found"] for s in mine]
    there = [count for count in trials if count is not None]
    found = f"found after {min(there)} to {max(there)} trials" if there else "found nothing"
    chosen = [s["chosen_of_best"] for s in mine]
    return (
        f"{search}, {len(mine)} starts: {found}, never from {trials.count(None)}; chose "
        f"{min(chosen):.3f} to {max(chosen):.3f} of the best"
    )


def run(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One model on one lab."""
    model = f"paced:{name}@{options.scale:g}"
    spec = scaled(LabSpec.parse(options.lab), options.scale / options.stretch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, __file__, "--worker", str(path), "--model", model]
        for key in ("stretch", "trials", "trial_steps", "curve_steps", "curve_rounds", "edge_mb"):
            command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
        command += ["--searches", *options.searches, "--starts", *map(str, options.starts)]
        ended = lab.run(spec, command)
        if ended.exit_code:
            sys.exit(ended.exit_code)
        return judge(json.loads(path.read_text(encoding="utf-8")))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--searches", nargs="+", default=list(SEARCHES), choices=SEARCHES)
    parser.add_argument(
        "--starts", nargs="+", type=float, default=[1.0, 2.0, 4.0], metavar="MB",
        help="each search from each of them, from 1 to 100 (1 2 4)",
    )  # fmt: skip
    parser.add_argument("--lab", default="star:4@7.62gbit", help="before scaling")
    parser.add_argument("--scale", type=float, default=0.05, help="of the models (default 0.05)")
    parser.add_argument("--stretch", type=float, default=1.0, help="slow motion (default 1)")
    parser.add_argument("--trials", type=int, default=MAX_TRIALS, help="default 10")
    parser.add_argument("--trial-steps", type=int, default=8, help="default 8")
    parser.add_argument("--curve-steps", type=int, default=4, help="in each turn (default 4)")
    parser.add_argument(
        "--curve-rounds", type=int, default=2, help="turns of each size (default 2)"
    )
    parser.add_argument(
        "--edge-mb", type=float, default=1.0, help="of the buckets at both edges (default 1)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure each model, print the results of each search, and judge."""
    options = arguments()
    if options.worker:
        worker(options)
        return 0
    if not all(1 <= mb <= 100 for mb in options.starts):
        print(f"tuning.py: --starts {options.starts}: allowed are 1 to 100 MB", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    models: dict[str, Any] = {}
    misses: list[str] = []
    report |= {"command": sys.argv, "models": models, "missed": misses}
    for name in options.models:
        models[name] = run(options, name)
        misses += missed(name, models[name])
        where = (
            f"model at {options.scale:g} of its size, {options.lab} at the same scale, slow motion "
            f"of {options.stretch:g}, {options.trials} trials of {options.trial_steps} iterations"
        )
        show(report, table(name, models[name], where))
        if options.json:
            write(options.json, report)
    for line in misses:
        print(f"MISSED: {line}")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
