"""The distance of weights from DDP's when buckets change frequently.

    python benchmarks/rebucketing.py --json out/rebucketing.json

Four workers on emulated hosts train the smooth network of `exactness.py` on scikit-learn's digits
with AdamW: with DDP, then with DeAR, whose buckets get another size at random moments, about every
tenth iteration; also between the two backwards of an iteration that accumulates gradients.
The figure is the largest difference of a weight over the largest weight of its tensor.
Exit code 1 if one is above the limit.

Re-bucketing changes the order of sums, hence the last bits. The row ``ddp:mb=0.05``, which is DDP
with other buckets from the beginning, shows the limit that rounding sets; in float64 it is so small
that a gradient or a moment lost even once would be visible.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exactness import (
    OTHER_BUCKETS,
    REFERENCE,
    conclude,
    difference,
    run,
    same_everywhere,
    smooth_network,
)
from torch import nn

import wingbeat
from wingbeat.engine.upgrade import engine_of
from wingbeat_lab.bench import attach, contenders, models

ROWS = ("dear:plan=fixed", "dear:plan=fixed,shard_optimizer=true", "allreduce")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
PARAMETER_BYTES = 300_000
"""About the network's size in float32: bucket sizes are between a hundredth of it and all."""


class Shuffle:
    """Changes the bucket size at random moments, the same on every worker."""

    def __init__(self, model: Any) -> None:
        self._engine = engine_of(model)
        self._random = random.Random(0)
        self.changes = 0

    def maybe(self) -> None:
        if self._engine is not None and self._random.random() < 0.1:
            size = int(PARAMETER_BYTES * 10 ** self._random.uniform(-2, 0.5))
            bucketing = self._engine.bucketing
            edge = min(size, int(PARAMETER_BYTES * 10 ** self._random.uniform(-3, 0)))
            bucketing.use(
                dataclasses.replace(
                    bucketing.fusion, bucket_bytes=size, first_bytes=edge, last_bytes=edge
                )
            )
            self.changes += 1


def train(row: str, dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], int]:
    """Weights after ``steps``, and the number of bucket changes."""
    images, answers, _, _ = models.data()
    batches = models.batches(
        images, answers, rank=dist.get_rank(), workers=dist.get_world_size(), seed=1
    )
    network = smooth_network().to(dtype)
    make = attach.optimizer_maker("adamw", paced=False)
    with attach.attached(contenders.parse(row), network, make) as made:
        shuffle = Shuffle(network)
        for step in range(steps):
            made.optimizer.zero_grad()
            for _ in range(2 if step % 5 == 4 else 1):
                shuffle.maybe()
                batch, names = next(batches)
                nn.functional.cross_entropy(made.model(batch.to(dtype)), names).backward()
            made.optimizer.step()
        changes = shuffle.changes
    return [p.detach().clone() for p in network.parameters()], changes


def worker(path: Path, steps: int) -> None:
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    results: list[dict[str, Any]] = []
    for name, dtype in DTYPES.items():
        theirs, _ = train(REFERENCE, dtype, steps)
        for row in (OTHER_BUCKETS, *ROWS):
            ours, changes = train(row, dtype, steps)
            same = same_everywhere(ours)
            results.append(
                {
                    "strategy": row,
                    "dtype": name,
                    "steps": steps,
                    "times_rebucketed": changes,
                    "max_relative_difference": difference(ours, theirs),
                    "same_bits_on_all_workers": same,
                }
            )
            if dist.get_rank() == 0:
                print(f"{name}, {row}: done", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(results), encoding="utf-8")
    wingbeat.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lab", default="star:4@1gbit", help="the cluster (default star:4@1gbit)")
    parser.add_argument("--steps", type=int, default=1000, help="training steps (default 1000)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.steps)
        return 0
    results = run(options.lab, options.steps, script=__file__)
    return conclude(options.json, options.lab, results, "dtype", "times_rebucketed")


if __name__ == "__main__":
    sys.exit(main())
