"""CPU time of a worker's main thread in one iteration, by part of the training loop.

    python benchmarks/main_thread.py --json out/main_thread.json
    python benchmarks/main_thread.py --models densenet201@0.1 --optimizers adamw --rounds 1

Two workers on the loopback. A model has the parameters of a network, and only adds their elements,
so that what is left of an iteration is autograd, hooks, copies and the optimizer. Figures are CPU
time, so waiting costs nothing: of the main thread, in which autograd runs too, medians over
iterations and workers; of all threads of a worker, means. Rows take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import at_least_one, show, write
from torch import nn

import wingbeat
from wingbeat.errors import UsageError
from wingbeat_lab import lab, paced
from wingbeat_lab.bench import attach, contenders, machine
from wingbeat_lab.bench.table import Printed

MODELS = ("resnet50@0.1", "densenet201@0.1", "bert_base@0.02")
ROWS = ("single", "ddp", "allreduce", "dear:plan=fixed")
OPTIMIZERS: dict[str, attach.MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-6),
}
PARTS = ("zero_grad", "forward", "backward", "step")
WARMUP = 5  # iterations; buckets are made again in the second backward


class Layer(nn.Module):
    """The parameters of a layer, which forward adds up, and its buffers."""

    def __init__(self, layer: paced.ProfiledLayer) -> None:
        super().__init__()
        for param in layer.parameters:
            self.register_parameter(param.name, nn.Parameter(torch.ones(param.shape)))
        if layer.kind == "bn":
            for name in ("running_mean", "running_var"):
                self.register_buffer(name, torch.ones(layer.parameters[0].shape))
            self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        for param in self._parameters.values():
            total = total + param.sum()  # type: ignore[union-attr]
        return total


def turn(model: str, optimizer: str, row: str, *, iterations: int) -> dict[str, Any]:
    """Train under one row; return CPU seconds by part of each iteration, and of all threads."""
    profile = paced.parse(f"paced:{model}")
    network = nn.Sequential(*(Layer(layer) for layer in profile.layers if layer.parameters))
    contender = contenders.parse(row).at_scale(profile.scale)
    made = attach.attach(contender, network, OPTIMIZERS[optimizer])
    parts, process, start = [], 0.0, torch.zeros(())
    dist.barrier()
    for number in range(WARMUP + iterations):
        if number == WARMUP:
            process = time.process_time()
        marks = [time.thread_time()]
        made.optimizer.zero_grad()
        marks.append(time.thread_time())
        loss = made.model(start)
        marks.append(time.thread_time())
        loss.backward()
        marks.append(time.thread_time())
        made.optimizer.step()
        marks.append(time.thread_time())
        parts.append([end - begin for begin, end in itertools.pairwise(marks)])
    process = (time.process_time() - process) / iterations
    made.detach()
    return {"row": row, "model": f"{model}, {optimizer}", "parts": parts[WARMUP:], "all": process}


def worker(args: argparse.Namespace) -> None:
    """Run every turn on this rank, and write the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wingbeat.init()
    shares = itertools.product(args.models, args.optimizers * args.rounds, args.rows)
    turns = [turn(*share, iterations=args.iterations) for share in shares]
    (args.worker / f"{dist.get_rank()}.json").write_text(json.dumps(turns), encoding="utf-8")
    wingbeat.shutdown()
    dist.destroy_process_group()


def figures(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return CPU milliseconds by part, of the main thread, and of a worker."""
    samples = zip(*(sample for each in turns for sample in each["parts"]), strict=True)
    found = {part: 1e3 * statistics.median(s) for part, s in zip(PARTS, samples, strict=True)}
    whole = 1e3 * statistics.fmean(each["all"] for each in turns)
    return {**found, "main thread": sum(found.values()), "all threads": whole}


def main() -> int:
    """Parse the command line; inside the lab, run a worker."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--models", nargs="+", default=MODELS, help="networks, with their scale")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--rows", nargs="+", default=ROWS, help="as of `wingbeat bench`")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="turns of each row (3)")
    parser.add_argument("--iterations", type=at_least_one, default=20, help="in each turn (20)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    try:
        for row in args.rows:
            contenders.parse(row)
        for model in args.models:
            paced.parse(f"paced:{model}")
    except UsageError as error:
        parser.error(str(error))
    report: dict[str, Any] = {"command": sys.argv, "machine": machine.describe(), "figures": {}}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *sys.argv, "--worker", folder]
        code = lab.run("loopback:2", words).exit_code
        turns = [t for path in Path(folder).iterdir() for t in json.loads(path.read_text("utf-8"))]
    for model in dict.fromkeys(each["model"] for each in turns):
        mine = [each for each in turns if each["model"] == model]
        rows = {row: figures([each for each in mine if each["row"] == row]) for row in args.rows}
        report["figures"][model] = rows
        cells = [(row, *(f"{ms:.2f}" for ms in own.values())) for row, own in rows.items()]
        columns = ("row", *next(iter(rows.values())))
        show(report, Printed.of(model, columns, cells, ["CPU milliseconds in one iteration"]))
    if args.json:
        write(args.json, report)
    return code


if __name__ == "__main__":
    sys.exit(main())
