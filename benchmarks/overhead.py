"""The overhead of `wingbeat.distribute` per iteration of a run with one worker.

    python benchmarks/overhead.py --json out/overhead.json
    python benchmarks/overhead.py --strategies allreduce dear --pairs 1000

Two models, one plain and one distributed, take turns iteration by iteration in one process, in
alternating order, so that both run under the same load. The figure is the median over pairs
of (distributed - plain) / plain, in percent, with a 95% interval from resampling the pairs.
Exit code 1 if a figure is above the limit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import show, write
from torch import nn

import wingbeat
from wingbeat_lab import baselines, paced
from wingbeat_lab.bench import machine, models
from wingbeat_lab.bench.table import Printed

LIMIT_PERCENT = 1.0
Loop = Callable[[], None]


def digits_loop() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A real network on real images, 256 in a batch so that an iteration takes milliseconds."""
    images, answers, _, _ = models.data()
    batch, names = images[:256], answers[:256]
    return models.network(0), lambda model: nn.functional.cross_entropy(model(batch), names)


def paced_loop() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """ResNet-50's 161 parameter tensors at a twentieth of their size, at an RTX 2080 Ti's pace."""
    return paced.PacedModel(paced.parse("paced:resnet50@0.05")), lambda model: model(None)


MODELS = {"digits": digits_loop, "paced:resnet50@0.05": paced_loop}
PAIRS = {"digits": 600, "paced:resnet50@0.05": 50}
"""A real network's time varies by some percent from one iteration to the next."""


def iteration(model: nn.Module, optimizer: Any, loss: Callable[..., torch.Tensor]) -> Loop:
    def run() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return run


def timed(run: Loop) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(name: str, strategy: str, pairs: int) -> dict[str, Any]:
    loops = []
    for distributed in (False, True):
        model, loss = MODELS[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if distributed:
            model, optimizer = wingbeat.distribute(model, optimizer, baselines.parse(strategy))
        loops.append(iteration(model, optimizer, loss))
    for run in loops * 10:
        run()
    plain: list[float] = []
    ours: list[float] = []
    for number in range(pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {which: timed(loops[which]) for which in order}
        plain.append(seconds[0])
        ours.append(seconds[1])
    shares = [100 * (b - a) / a for a, b in zip(plain, ours, strict=True)]
    low, high = interval(shares)
    return {
        "model": name,
        "strategy": strategy,
        "pairs": pairs,
        "plain_s": statistics.median(plain),
        "distributed_s": statistics.median(ours),
        "overhead_percent": statistics.median(shares),
        "interval_percent": [low, high],
    }


def interval(values: list[float], resamples: int = 2000) -> tuple[float, float]:
    """The 95% confidence interval of the median, by resampling with a fixed seed."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples)
    )
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def table(results: list[dict[str, Any]]) -> Printed:
    """Return the overhead of each model and strategy for printing."""
    rows = []
    for result in results:
        low, high = result["interval_percent"]
        rows.append(
            (
                f"{result['model']}, {result['strategy']}",
                f"{1e3 * result['plain_s']:.2f}",
                f"{result['overhead_percent']:+.2f}",
                f"{low:+.2f} .. {high:+.2f}",
            )
        )
    columns = ("model, strategy", "plain iteration, ms", "overhead, %", "95% interval, %")
    notes = [f"medians over pairs of iterations; limit {LIMIT_PERCENT:g}%"]
    return Printed.of("overhead of one worker alone", columns, rows, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--pairs", type=int, help=f"pairs of iterations ({', '.join(map(str, PAIRS.values()))})"
    )
    parser.add_argument("--strategies", nargs="+", default=list(baselines.PRESETS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.pairs is not None and options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: allowed are 2 or more")
    torch.set_num_threads(1)
    about = machine.describe()
    wingbeat.init()
    results = []
    for name in MODELS:
        for strategy in options.strategies:
            result = measure(name, strategy, options.pairs or PAIRS[name])
            results.append(result)
            print(f"{name} {strategy}: {result['overhead_percent']:+.2f} %", file=sys.stderr)
    wingbeat.shutdown()
    report = {
        "limit_percent": LIMIT_PERCENT,
        "machine": about,
        "versions": machine.versions(),
        "results": results,
    }
    show(report, table(results))
    if options.json:
        write(options.json, report)
    return int(any(result["overhead_percent"] > LIMIT_PERCENT for result in results))


if __name__ == "__main__":
    sys.exit(main())
