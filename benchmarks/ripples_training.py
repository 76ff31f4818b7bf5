"""Real training with averaged models, for ``ripples.py``: Figs. 16, 18 and 20.

SGD is that of ``accuracy.py``: a rate of 0.05 with momentum 0.9, up at first and then along a
cosine to 0, by the share of completed steps.

An iteration is as many steps as there are workers, of any of them; for AD-PSGD as many steps of
active workers as there are of these. Passive ones make more, so it uses more samples than the
others in as many iterations: ``steps_by_rank`` has all.

As a program, one worker of a lab: trains all rows by turns within a seed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accuracy
import paper_order
import torch
import torch.distributed as dist
from canary_training import normal_s
from exactness import same_everywhere

import wingbeat
from wingbeat.errors import LabError, UsageError
from wingbeat.methods.model_averaging.pair_machine import is_active
from wingbeat_lab import lab
from wingbeat_lab.bench import contenders
from wingbeat_lab.bench.attach import attached
from wingbeat_lab.bench.measure import Quantiles
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.bench.worker import SharedSteps

POINTS = 0.5
LAST = 10
"""Iterations whose mean loss is compared with the target."""
ASKED = 5
"""Iterations after which workers that make the same number of them agree on the time."""
ROWS = (
    "allreduce",
    "adpsgd",
    "ripples:policy=static",
    "ripples:policy=random",
    "ripples:policy=paper",
    "ripples:policy=smart",
    "localsgd:every=8",
    "diloco:every=30",
)
KEPT = {"accuracy": "accuracy", "seconds": "s", "iterations": "iterations"}
"""Figures of a row, and their names in a run."""
LENGTHS = tuple(f"ripples:policy=smart,every={every}" for every in (1, 2, 4, 8))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of real training."""
    parser.add_argument("--training-rows", nargs="+", default=list(ROWS), help="in Fig. 18")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="in 16, 18 and 20")
    parser.add_argument("--slow-rate", default="200mbit", help="of a host, in 16 to 20 (200mbit)")
    parser.add_argument("--length", type=int, default=400, help="iterations of a training (400)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="that each training may take, in Fig. 20 (10)"
    )
    parser.add_argument("--loss", type=float, default=0.32, help="the paper's target (0.32)")
    parser.add_argument(
        "--training-slowness", type=float, nargs="+", default=[0.0, 2.0],
        help="normal iterations that a worker sleeps, in Fig. 18 (0 2)",
    )  # fmt: skip


def figure_16(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield trainings by the number of steps between two averages."""
    yield "0", _trained(args, list(LENGTHS), 0.0, "16: steps between averages")


def figure_18(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield trainings by the slowness of one worker."""
    for factor in args.training_slowness:
        who = f"one worker sleeps {factor:g} iterations" if factor else "equal workers"
        title = f"18: {who}"
        yield f"{factor:g}", _trained(args, args.training_rows, factor, title)


def figure_20(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield trainings of equal duration, in any number of iterations."""
    title = f"20: {args.seconds:g} s of training"
    yield "0", _trained(args, args.training_rows, 0.0, title, args.seconds)


def _trained(
    args: argparse.Namespace, rows: list[str], slow: float, title: str, seconds: float = 0.0
) -> dict[str, Any]:
    spec = f"star:{args.hosts}@{args.slow_rate}"
    for row in rows:
        contenders.parse(row)  # fail before a lab is created
    if seconds < 0:
        raise UsageError(f"--seconds {seconds:g}: allowed are numbers above 0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.jsonl"
        words = [sys.executable, __file__, "--json", str(path), "--length", str(args.length)]
        words += ["--seeds", *map(str, args.seeds), "--rows", *rows, "--slow", str(slow)]
        words += ["--seconds", str(seconds)]
        ended = lab.run(
            spec, words, per_host=args.per_host,
            on_line=lambda rank, line: print(f"[{rank}] {line}", flush=True),
        )  # fmt: skip
        if ended.exit_code:
            raise LabError(f"{spec}: {ended.first_failure or ended.exit_code}")
        runs = [json.loads(line) for line in path.read_text().splitlines()]
    about = f"{title}: digits on {spec}, {args.hosts * args.per_host} workers"
    return {"title": about, "runs": runs, "rows": summary(runs, args.loss), "loss": args.loss}


def summary(runs: list[dict[str, Any]], loss: float) -> list[dict[str, Any]]:
    """A row for each strategy, median over seeds; the gap is to the first, in points.

    ``spread`` has the tenth and the ninetieth percentile of what has several values.
    """
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(run["row"] for run in runs):
        own = [run for run in runs if run["row"] == name]
        there = [reached(run["losses"], counting(name, run["workers"]), loss) for run in own]
        known = [each for each in there if each is not None]
        whole = len(known) == len(there)
        values = {name: [run[kept] for run in own] for name, kept in KEPT.items()}
        if whole:
            values |= {"to_loss_s": [s for s, _ in known]}
            values |= {"to_loss_iterations": [i for _, i in known]}
        found = {name: Quantiles.of(each) for name, each in values.items()}
        final = found["accuracy"].median
        rows.append(
            {
                "row": name,
                "accuracy": final,
                "gap": final - rows[0]["accuracy"] if rows else 0.0,
                "seconds": found["seconds"].median,
                "to_loss_s": found["to_loss_s"].median if whole else None,
                "to_loss_iterations": found["to_loss_iterations"].median if whole else None,
                "iterations": found["iterations"].median,
                "same_weights": all(run["same_weights"] for run in own),
                "spread": {name: (each.p10, each.p90) for name, each in found.items()},
            }
        )
    return rows


def counting(row: str, workers: int) -> list[int]:
    """The ranks whose steps count as iterations.

    >>> counting("adpsgd:encrypted=False", 5), counting("allreduce", 3)
    ([0, 2, 4], [0, 1, 2])
    """
    return [rank for rank in range(workers) if is_active(rank) or not row.startswith("adpsgd")]


def reached(
    losses: list[tuple[float, float, int]], ranks: list[int], target: float
) -> tuple[float, float] | None:
    """Seconds and iterations until the mean loss of the last steps is below the target.

    Args:
        losses: time, loss and rank of each worker's steps, in order of time.
        ranks: their steps define iterations; the losses of others do not count.
        target: the loss.
    """
    own = [(seconds, loss) for seconds, loss, rank in losses if rank in ranks]
    count, total = LAST * len(ranks), 0.0
    for number, (seconds, loss) in enumerate(own, start=1):
        total += loss - (own[number - 1 - count][1] if number > count else 0.0)
        if number >= count and total / count < target:
            return seconds, number / len(ranks)
    return None


COLUMNS = (
    "strategy", "right, %", "gap, points", "s", "iterations", "s to loss", "iterations to loss",
)  # fmt: skip
SHOWN = ("accuracy", "gap", "seconds", "iterations", "to_loss_s", "to_loss_iterations")


def table(part: dict[str, Any]) -> Printed:
    """Return one figure's rows."""
    rows = part["rows"]
    cells = [(row["row"], *(_cell(row, name) for name in SHOWN)) for row in rows]
    notes = [f"median over seeds (p10 .. p90); loss {part['loss']:g}; empty: not reached by all"]
    notes += order(part["title"].partition(":")[0], rows)
    return Printed.of(part["title"], COLUMNS, cells, notes)


def _cell(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return ""
    if name == "gap":
        return f"{row[name]:+.2f}"
    digits = 2 if name == "accuracy" else 1
    low, high = row["spread"][name]
    return f"{row[name]:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def order(figure: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return whether rows are in the paper's order: 16 and 18 by iterations, 20 by accuracy."""
    if figure == "20":
        figures = {row["row"]: row["accuracy"] for row in rows}
        return paper_order.notes(figures, paper_order.BY_FIGURE["20"], max)
    figures = {row["row"]: row["to_loss_iterations"] for row in rows}
    if figure == "16":  # fewer iterations with more averages
        names = [row["row"] for row in rows]
        return paper_order.notes(figures, list(itertools.pairwise(names)), name=str)
    return paper_order.notes(figures, paper_order.BY_FIGURE[figure])


def judged(found: dict[str, Any]) -> list[str]:
    """Return the missed limits."""
    missed = []
    for slow, part in found.items():
        for row in part["rows"]:
            where = f"18, +{slow}x: {row['row']}"
            if not row["same_weights"]:
                missed.append(f"{where}: the workers' weights differ in the end")
            if row["row"].startswith("ripples") and row["gap"] < -POINTS:
                missed.append(f"{where}: {-row['gap']:.2f} points below; limit {POINTS}")
    return missed


# -- one worker ------------------------------------------------------------------------------


def train(
    task: accuracy.Task,
    row: str,
    seed: int,
    length: int,
    sleep_s: float,
    counted: Path,
    limit_s: float = 0.0,
) -> dict[str, Any]:
    """Train until workers have made ``length`` steps each, on average (`counting`).

    With ``limit_s`` until so many seconds have passed, for any number of steps.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    batches, contender = task.batches(rank, size, seed), contenders.parse(row)
    steps, ranks = SharedSteps(counted, rank, size), counting(row, size)
    own: list[tuple[float, float]] = []
    sgd = functools.partial(torch.optim.SGD, lr=task.rate, momentum=task.momentum)
    with attached(contender, task.network(seed), sgd) as made:
        dist.barrier()
        begin, share = time.monotonic(), 0.0
        while True:
            made_by = steps.by_rank()
            done = statistics.fmean(made_by[r] for r in ranks) if contender.averages else len(own)
            if limit_s and (contender.averages or len(own) % ASKED == 0):
                share = passed(begin, limit_s, alike=not contender.averages)
            elif not limit_s:
                share = done / length
            if share >= 1:
                break
            for group in made.optimizer.param_groups:
                group["lr"] = task.rate * accuracy.rate_at(int(round(share * length, 6)), length)
            if rank == 1 and sleep_s:
                time.sleep(sleep_s)
            made.optimizer.zero_grad()
            loss, _ = accuracy.loss_of(made.model, *next(batches))
            loss.backward()
            made.optimizer.step()
            steps.add(time.monotonic())
            own.append((time.monotonic() - begin, float(loss.detach())))
        made.settle()
        seconds = time.monotonic() - begin
        same = same_everywhere([p.detach().clone() for p in made.model.parameters()])
        final = accuracy.evaluate(made.model, task)["accuracy"]
    steps.close()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, own)
    losses = sorted((s, loss, by) for by, each in enumerate(everyone) for s, loss in each)
    return {
        "row": row,
        "seed": seed,
        "workers": size,
        "iterations": statistics.fmean(len(everyone[r]) for r in ranks),
        "s": seconds,
        "accuracy": final,
        "same_weights": same,
        "losses": losses,
        "steps_by_rank": [len(each) for each in everyone],
    }


def passed(begin: float, limit_s: float, *, alike: bool) -> float:
    """The elapsed share of the time since ``begin``; if ``alike``, rank 0's, on all."""
    share = torch.tensor((time.monotonic() - begin) / limit_s)
    if alike:
        dist.broadcast(share, 0)
    return float(share)


def worker() -> None:
    """Train all rows by turns; rank 0 writes a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.0, help="0: --length iterations")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    task = accuracy.digits_task()
    # As in Fig. 19: of smart groups, if they are among the rows.
    usual = next((row for row in args.rows if "smart" in row), args.rows[0])
    sleep_s = args.slow * normal_s(task, usual) if args.slow else 0.0
    for seed in args.seeds:
        for number, row in enumerate(args.rows):
            counted = args.json.parent / f"steps-{seed}-{number}"
            made = train(task, row, seed, args.length, sleep_s, counted, args.seconds)
            if dist.get_rank() == 0:
                with args.json.open("a") as file:
                    print(json.dumps(made), file=file)
                print(f"{row}, seed {seed}: {made['accuracy']:.2f}%, {made['s']:.0f} s", flush=True)
            dist.barrier()
    wingbeat.shutdown()


if __name__ == "__main__":
    worker()
