"""The distance of wingbeat's weights from DDP's after training on real data.

    python benchmarks/exactness.py --json out/exactness.json

Four workers on emulated hosts train a small network on scikit-learn's digits for 50 steps: with
DDP, then with each exact preset from the same weights on the same batches; for SGD with momentum
and weight decay, and for AdamW. The figure is the largest difference of a weight over the largest
weight of its tensor. Exit code 1 if one is above the limit.

The network is smooth (tanh, average pooling). With ReLU and max pooling a difference in the last
bit can decide on which side of a kink a value falls, and weights diverge from there: DDP with
another bucket size, which sums in another order, was then observed 3e-3 away from itself. That
row, ``ddp:mb=0.05``, is measured here too: it shows the limit that rounding sets.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import show, write
from torch import nn

import wingbeat
from wingbeat_lab import baselines, lab
from wingbeat_lab.bench import attach, contenders, machine, models
from wingbeat_lab.bench.table import Printed

LIMIT = 1e-5
OPTIMIZERS = ("sgd", "adamw")


REFERENCE, OTHER_BUCKETS = "ddp", "ddp:mb=0.05"
UPDATED_THERE = ("geryon:update=server", "geryon:pull=start,update=server")
"""Rows whose parameters the servers update; by default the workers do."""


def smooth_network() -> nn.Module:
    """The digits network without kinks, the same weights on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    )


def train(row: str, optimizer_name: str, steps: int) -> list[torch.Tensor]:
    """Weights after ``steps``."""
    images, answers, _, _ = models.data()
    batches = models.batches(
        images, answers, rank=dist.get_rank(), workers=dist.get_world_size(), seed=1
    )
    network = smooth_network()
    make = attach.optimizer_maker(optimizer_name, paced=False)
    with attach.attached(contenders.parse(row), network, make) as made:
        for _ in range(steps):
            batch, names = next(batches)
            made.optimizer.zero_grad()
            nn.functional.cross_entropy(made.model(batch), names).backward()
            made.optimizer.step()
    return [p.detach().clone() for p in network.parameters()]


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(ours, theirs, strict=True)
    )


def same_everywhere(weights: list[torch.Tensor]) -> bool:
    """Whether all workers hold bitwise equal weights."""
    flat = torch.cat([w.flatten() for w in weights])
    mine = flat.clone()
    dist.broadcast(flat, src=0)
    differs = torch.tensor(float(not torch.equal(mine, flat)))
    dist.all_reduce(differs)
    return float(differs) == 0.0


def worker(path: Path, steps: int, optimizers: Sequence[str], rows: Sequence[str]) -> None:
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    results: list[dict[str, Any]] = []
    for optimizer in optimizers:
        theirs = train(REFERENCE, optimizer, steps)
        start = train(REFERENCE, optimizer, 0)
        for row in rows:
            ours = train(row, optimizer, steps)
            same = same_everywhere(ours)
            results.append(
                {
                    "strategy": row,
                    "optimizer": optimizer,
                    "steps": steps,
                    "max_relative_difference": difference(ours, theirs),
                    "same_bits_on_all_workers": same,
                    "moved": difference(theirs, start),
                }
            )
    if dist.get_rank() == 0:
        path.write_text(json.dumps(results), encoding="utf-8")
    wingbeat.shutdown()


def run(spec: str, steps: int, *words: str, script: str = __file__) -> list[dict[str, Any]]:
    """Start ``script`` as the workers, with more ``words``, and return rank 0's results."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "results.json"
        command = [sys.executable, script, "--worker", str(path), "--steps", str(steps), *words]
        ended = lab.run(spec, command)
        if ended.exit_code:
            sys.exit(ended.exit_code)
        results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return results


def table(spec: str, results: Sequence[dict[str, Any]], each: str, more: str) -> Printed:
    """Return the results for printing.

    Args:
        spec: the lab.
        results: by row.
        each: the field that distinguishes rows of one strategy.
        more: fields with a column of their own.
    """
    cells = [
        (
            f"{r['strategy']}, {r[each]}",
            f"{r['max_relative_difference']:.2e}",
            "yes" if r["same_bits_on_all_workers"] else "NO",
            f"{r[more]:.3g}",
        )
        for r in results
    ]
    columns = (
        f"strategy, {each}",
        "from DDP's weights",
        "same bits on all workers",
        COLUMNS[more],
    )
    title = f"largest difference of a weight after {results[0]['steps']} steps on {spec}"
    notes = [f"relative to the largest weight of its tensor; limit {LIMIT:g}"]
    return Printed.of(title, columns, cells, notes)


COLUMNS = {"moved": "DDP's moved by", "times_rebucketed": "changes of buckets"}


def conclude(
    path: Path | None, spec: str, results: list[dict[str, Any]], each: str, more: str
) -> int:
    """Print and save the results; return the exit code."""
    report = {
        "lab": spec,
        "limit": LIMIT,
        "machine": machine.describe(),
        "versions": machine.versions(),
        "results": results,
    }
    show(report, table(spec, results, each, more))
    if path:
        write(path, report)
    return 0 if all(map(good, results)) else 1


def good(r: dict[str, Any]) -> bool:
    """Whether a result is within the limit."""
    return bool(r["max_relative_difference"] <= LIMIT and r["same_bits_on_all_workers"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lab", default="star:4@1gbit", help="the cluster (default star:4@1gbit)")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default 50)")
    exact = [name for name, preset in baselines.PRESETS.items() if preset().traits.exact]
    rows = [OTHER_BUCKETS, *exact, *UPDATED_THERE]
    parser.add_argument("--rows", nargs="+", default=rows, help="(all that are exact)")
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.steps, options.optimizers, options.rows)
        return 0
    words = ["--optimizers", *options.optimizers, "--rows", *options.rows]
    results = run(options.lab, options.steps, *words)
    return conclude(options.json, options.lab, results, "optimizer", "moved")


if __name__ == "__main__":
    sys.exit(main())
