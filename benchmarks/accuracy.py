"""Whether training with coarser gradients is as accurate as with exact ones, on real data.

Four workers train each task with each strategy and each seed, from the same weights on the same
batches. The figure is the accuracy on held-out data:

digits  a convolutional network on scikit-learn's digits, moved by up to a pixel; SGD, momentum 0.9
text    an LSTM that predicts the next character of the standard library's source; clipped plain SGD

Where workers' models differ, their mean is evaluated, and each continues from it
(`wingbeat.synchronize`).
Learning rates rise, then fall to zero along a cosine, so that the end is a plateau. The text task
has no momentum: gradients that top-k holds back would lose it (Deep Gradient Compression, 3.1).

Rule: with an 8-bit sketch, top-k from 0.01 on or with a warm-up that is not the default, or full
gradients, the mean over seeds is at most 0.5 points below the first row's (exit code 1 otherwise);
other rows are shown without a limit. Codecs are used whether they are faster or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import show, write
from exactness import same_everywhere
from torch import Tensor, nn

import wingbeat
from wingbeat import strategies
from wingbeat.compression import Sketch, TopK
from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat_lab.bench import contenders, estimate, machine, models
from wingbeat_lab.bench.attach import Attached, attached
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.cli.bench import check_writable

ROWS = (
    "allreduce allreduce:compression=sketch allreduce:compression=sketch@4 "
    "allreduce:compression=topk@0.01"
)
Batches = Iterator[tuple[Tensor, Tensor]]
LIMIT = 0.5  # points of accuracy that a judged row may lose relative to the first
EVALUATIONS = 10  # per training
EXAMPLES = """examples:
  python benchmarks/accuracy.py --json out/accuracy.json --png out/accuracy.png
  python benchmarks/accuracy.py --tasks digits \\
      --strategies allreduce allreduce:compression=lowrank@4
  python benchmarks/accuracy.py --warmup 200 \\
      --strategies allreduce allreduce:compression=topk@0.001
  python benchmarks/accuracy.py --tasks text --strategies allreduce omgs:density=0.001,warmup=1000
  python benchmarks/accuracy.py --strategies ddp ddp+powersgd:rank=4 allreduce:compression=lowrank@4
  python benchmarks/accuracy.py --strategies ddp localsgd:every=10 --evaluations 40
"""


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned, and how; `rate` is the largest, gradients are clipped to `max_norm`."""

    network: Callable[[int], nn.Module]
    batches: Callable[[int, int, int], Batches]  # of rank, number of workers, seed
    held_out: tuple[Tensor, Tensor]
    iterations: int
    rate: float
    momentum: float = 0.0
    max_norm: float = math.inf


def digits_task() -> Task:
    """797 test images at nine positions each: with fewer, one image would be a quarter point."""
    images, names, more_images, more_names = models.data()
    names = torch.cat([names, more_names])
    wide = nn.functional.pad(torch.cat([images, more_images]), (2, 2, 2, 2))
    moved = torch.stack([wide[:, :, i : i + 10, j : j + 10] for i in range(3) for j in range(3)])

    def network(seed: int) -> nn.Module:
        made: Any = models.network(seed)
        made[6] = nn.Linear(32 * 5 * 5, 128)  # 10 by 10, not 8 by 8
        return made  # type: ignore[no-any-return]

    def batches(rank: int, workers: int, seed: int) -> Batches:
        places = torch.Generator().manual_seed(1000 * seed + rank)
        order = {"rank": rank, "workers": workers, "seed": seed}
        for chosen, answers in models.batches(torch.arange(1000), names[:1000], **order):
            yield moved[torch.randint(9, chosen.shape, generator=places), chosen], answers

    held_out = moved[:, 1000:].flatten(0, 1), names[1000:].repeat(9)
    return Task(network, batches, held_out, iterations=1200, rate=0.05, momentum=0.9)


MODULES = """
    argparse ast bdb cmd configparser contextlib dataclasses difflib dis doctest email.message
    enum ftplib functools gettext heapq http.client http.server imaplib inspect ipaddress locale
    mailbox optparse pdb pickle pickletools platform plistlib pydoc random shutil smtplib socket ssl
    statistics subprocess tarfile tempfile textwrap threading traceback turtle typing unittest.mock
    urllib.parse urllib.request uuid warnings xml.dom.minidom
"""
"""One file each, from Python 3.10 on; the text is that of the running Python."""


def source(module: str) -> bytes:
    """The module's source in ASCII; only its parents are imported."""
    spec = importlib.util.find_spec(module)
    text = getattr(spec and spec.loader, "get_source", lambda _: None)(module)
    if not text:
        raise UsageError(f"this Python has no source of {module!r}; use --tasks digits")
    return str(text).encode("ascii", "replace")


class Lstm(nn.Module):
    """From characters (int64, [batch, length]) to logits of the next ([batch, length, 128])."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(128, 48)
        self.lstm = nn.LSTM(48, 96, batch_first=True)
        self.out = nn.Linear(96, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0])  # type: ignore[no-any-return]


def text_task() -> Task:
    """Windows of 64 characters; the last part of each module is held out, about 240,000."""
    length, batch, share = 64, 8, 0.08
    train, test = bytearray(), bytearray()
    for text in map(source, MODULES.split()):
        cut = int(len(text) * (1 - share))
        train += text[:cut]
        test += text[cut:]
    known, asked = (torch.frombuffer(part, dtype=torch.uint8).long() for part in (train, test))
    size = (len(asked) - 1) // length * length

    def batches(rank: int, workers: int, seed: int) -> Batches:
        starts = torch.Generator().manual_seed(seed)
        window = torch.arange(length + 1)
        while True:
            begin = torch.randint(len(known) - length, (workers, batch, 1), generator=starts)
            chosen = known[begin[rank] + window]
            yield chosen[:, :-1], chosen[:, 1:]

    held_out = asked[:size].view(-1, length), asked[1 : size + 1].view(-1, length)
    return Task(Lstm, batches, held_out, iterations=4000, rate=20.0, max_norm=1.0)


TASKS = {"digits": digits_task, "text": text_task}


def parse(text: str, warmup: int | None) -> Contender:
    """The row, with a codec that stays on; UsageError if there is none."""
    contender = contenders.parse(text)
    if contender.strategy is None:
        return contender
    own = None if "warmup=" in text else warmup
    return dataclasses.replace(contender, strategy=coded(contender.strategy, own))


def coded(strategy: strategies.Strategy, warmup: int | None) -> strategies.Strategy:
    """The strategy with its codec always on, and the requested warm-up of top-k's density."""
    wire: Any = strategy.wire  # a dataclass with auto_disable, or a name
    if isinstance(wire, str):
        return strategy
    wire = dataclasses.replace(wire, auto_disable=False)
    if isinstance(wire, TopK) and warmup is not None:
        wire = dataclasses.replace(wire, warmup=warmup)
    return dataclasses.replace(strategy, compression=wire)


def rate_at(step: int, iterations: int) -> float:
    """The share of the learning rate: up in the first twentieth, then a half cosine down to 0."""
    return (
        min(1.0, 20 * (step + 1) / iterations) * 0.5 * (1 + math.cos(math.pi * step / iterations))
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> tuple[Tensor, int]:
    """Cross entropy in nats, and the number of correct answers."""
    logits = model(x).flatten(0, -2)
    right = int((logits.detach().argmax(-1) == y.flatten()).sum())
    return nn.functional.cross_entropy(logits, y.flatten(), reduction=reduction), right


def evaluate(model: nn.Module, task: Task) -> dict[str, float | None]:
    """Accuracy in %, and bits per answer (None: not a number); each worker evaluates a part."""
    x, y = (part[dist.get_rank() :: dist.get_world_size()] for part in task.held_out)
    totals = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for some_x, some_y in zip(x.split(128), y.split(128), strict=True):
            nats, right = loss_of(model, some_x, some_y, reduction="sum")
            totals += torch.tensor([right, float(nats), some_y.numel()], dtype=torch.float64)
    model.train()
    dist.all_reduce(totals)
    right, nats, count = totals.tolist()
    bits = nats / count / math.log(2)
    return {"accuracy": 100 * right / count, "bits": bits if math.isfinite(bits) else None}


def train(
    task: Task,
    contender: Contender,
    seed: int,
    iterations: int,
    evaluations: int = EVALUATIONS,
    until: float = math.inf,
) -> dict[str, Any]:
    """Train once; return the curve, and whether all workers end with the same weights.

    A curve's seconds are those of training, without evaluations. Synchronization before an
    evaluation counts as training, which continues from it. Training ends early once the accuracy is
    ``until`` percent.
    """
    begin = time.monotonic()
    batches = task.batches(dist.get_rank(), dist.get_world_size(), seed)
    marks = {round(iterations * i / evaluations) for i in range(1, evaluations + 1)}
    curve, evaluating = [], 0.0
    optimizer = functools.partial(torch.optim.SGD, momentum=task.momentum, weight_decay=5e-4)
    with attached(contender, task.network(seed), optimizer) as made:
        for step in range(iterations):
            for group in made.optimizer.param_groups:
                group["lr"] = task.rate * rate_at(step, iterations)
            made.optimizer.zero_grad()
            loss_of(made.model, *next(batches))[0].backward()
            if math.isfinite(task.max_norm):
                clip(made, task.max_norm)
            made.optimizer.step()
            if step + 1 in marks:
                made.settle()  # also averages models that differ
                paused = time.monotonic()
                trained = paused - begin - evaluating
                curve.append({"iteration": step + 1, "s": trained, **evaluate(made.model, task)})
                evaluating += time.monotonic() - paused
                if (curve[-1]["accuracy"] or 0.0) >= until:
                    break
        weights = [p.detach().clone() for p in made.model.parameters()]
    return {"same_weights": same_everywhere(weights), "s": time.monotonic() - begin, "curve": curve}


def clip(made: Attached, max_norm: float) -> None:
    """Clip gradients: wingbeat's optimizers do it themselves, DDP's gradients are complete here."""
    own = getattr(made.optimizer, "clip_grad_norm_", None)
    if own is not None:
        own(max_norm)
    else:
        nn.utils.clip_grad_norm_(made.model.parameters(), max_norm)


def worker(options: argparse.Namespace) -> None:
    """Train all requested rows, one after the other; rank 0 writes a line for each."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    tasks = {name: TASKS[name]() for name in options.tasks}
    runs = list(itertools.product(options.tasks, options.seeds, options.strategies))
    lengths = [options.iterations or tasks[name].iterations for name, _, _ in runs]
    seconds: dict[str, float] = {}  # per iteration, by task
    for number, ((name, seed, text), iterations) in enumerate(zip(runs, lengths, strict=True), 1):
        row = parse(text, options.warmup)
        made = train(tasks[name], row, seed, iterations, options.evaluations)
        if dist.get_rank() == 0:
            kept = {"task": name, "seed": seed, "strategy": text, **made}
            with options.worker.open("a", encoding="utf-8") as file:
                print(json.dumps(kept), file=file)
            seconds[name] = made["s"] / iterations
            end = f"{made['curve'][-1]['accuracy']:.2f}%, {made['s']:.0f} s"
            end += left(runs[number:], lengths[number:], seconds)
            print(f"{number}/{len(runs)} {name} {seed} {text}: {end}", file=sys.stderr, flush=True)
    wingbeat.shutdown()


def left(runs: Sequence[tuple[str, ...]], lengths: Sequence[int], seconds: dict[str, float]) -> str:
    """Expected time of the remaining runs, from those before them; empty for none."""
    if not runs:
        return ""
    known = [seconds[run[0]] * n for run, n in zip(runs, lengths, strict=True) if run[0] in seconds]
    others = "" if len(known) == len(runs) else ", and the tasks not begun"
    return f", about {estimate.about(sum(known))} left{others}"


def judged(contender: Contender) -> bool:
    """Whether the rule applies to this row, with the warm-up that it trained with."""
    wire = "" if contender.strategy is None else contender.strategy.wire
    if isinstance(wire, Sketch):
        return wire.bits == 8
    if isinstance(wire, TopK):
        return wire.density >= 0.01 or wire.warmup not in (0, TopK.warmup)
    return contender.traits.exact


def summary(runs: Sequence[dict[str, Any]], warmup: int | None = None) -> list[dict[str, Any]]:
    """A row for each task and strategy, in order; the gap is to the task's first, in points."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["strategy"]), []).append(run)
    first: dict[str, float] = {}
    rows = []
    for (task, strategy), own in groups.items():
        finals, bits = ([r["curve"][-1][key] for r in own] for key in ("accuracy", "bits"))
        mean = statistics.fmean(finals)
        row = {"task": task, "strategy": strategy, "judged": judged(parse(strategy, warmup))}
        row["accuracy"] = mean
        row["gap"] = mean - first.setdefault(task, mean)
        row |= {"lowest": min(finals), "highest": max(finals)}
        row["bits"] = None if None in bits else statistics.fmean(bits)
        row["same_weights"] = all(run["same_weights"] for run in own)
        row["s"] = statistics.fmean(run["s"] for run in own)
        rows.append(row)
    return rows


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each judged row that breaks the rule."""
    out = []
    for row in filter(lambda r: r["judged"], rows):
        name = f"{row['task']}: {row['strategy']}"
        if row["gap"] < -LIMIT:
            out.append(f"{name} ends {-row['gap']:.2f} points below the first row; limit {LIMIT}")
        if not row["same_weights"]:
            out.append(f"{name} leaves the workers with different weights")
    return out


COLUMNS = (
    "task, strategy",
    "right, %",
    "over seeds, %",
    "gap, points",
    "bits",
    "training, s",
    "rule kept",
)


def table(rows: Sequence[dict[str, Any]], seeds: int) -> Printed:
    cells = [
        (
            f"{row['task']}, {row['strategy']}",
            f"{row['accuracy']:.2f}",
            f"{row['lowest']:.2f} .. {row['highest']:.2f}",
            f"{row['gap']:+.2f}",
            "" if row["bits"] is None else f"{row['bits']:.3f}",
            f"{row['s']:.0f}",
            ("no" if missed([row]) else "yes") if row["judged"] else "not judged",
        )
        for row in rows
    ]
    notes = [f"mean of {seeds} seeds; bits: cross entropy of an answer"]
    return Printed.of("accuracy on data that was held out", COLUMNS, cells, notes)


COLOURS = ("#2b2f36", "#34679a", "#e39b3b", "#c8281e", "#4a8f5c", "#7b5aa6", "#8a6d4b", "#9aa1ab")


def draw(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """A panel for each task: accuracy by iteration, mean and range over seeds."""
    names = list(dict.fromkeys(run["task"] for run in runs))
    figure = blank("curve", (5.2 * len(names), 4.2), 150)
    for number, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), number + 1)
        draw_curves(axes, [run for run in runs if run["task"] == name])
        axes.set(title=name, xlabel="iteration", ylabel="right about held-out data, %")
        axes.grid(color="#e6e9ed", linewidth=0.7)
        axes.legend(fontsize=8, frameon=False, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as file:
        figure.savefig(file, format="png", bbox_inches="tight")


def draw_curves(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    """The axis begins at the lowest value after a quarter, to tell the ends apart."""
    lowest = math.inf
    for number, text in enumerate(dict.fromkeys(run["strategy"] for run in runs)):
        curves = [run["curve"] for run in runs if run["strategy"] == text]
        at = [point["iteration"] for point in curves[0]]
        values = [[p["accuracy"] for p in points] for points in zip(*curves, strict=True)]
        low, high, mean = (list(map(f, values)) for f in (min, max, statistics.fmean))
        [line] = axes.plot(at, mean, color=COLOURS[number % len(COLOURS)], label=text)
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
        lowest = min(lowest, *low[len(low) // 4 :])
    axes.set_ylim(bottom=lowest - 0.5)


def run(words: Sequence[str]) -> list[dict[str, Any]]:
    """Start the workers on this machine; return every training's curve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        command = [sys.executable, *launch, __file__, *words, "--worker", str(path)]
        code = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
        if code:
            sys.exit(code)
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for invalid values, before anything starts."""
    check_numbers(options)
    parsed = [parse(text, options.warmup) for text in options.strategies]
    for name in options.tasks:
        TASKS[name]()
    if not parsed[0].traits.exact:
        raise UsageError(f"--strategies: {parsed[0].text!r} is not exact; put allreduce first")
    for contender in parsed:
        if contender.traits.bound == "fsdp":
            raise UsageError(f"--strategies: {contender.text!r} keeps no whole weights to compare")
    for path in filter(None, (options.json, options.png)):
        check_writable(path)
    if options.png:
        blank("curve", (1, 1), 72)


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UsageError for a list with duplicates, or too few iterations."""
    for key in ("tasks", "seeds", "strategies"):
        values = getattr(options, key)
        if len(set(values)) < len(values):
            raise UsageError(f"--{key} {' '.join(map(str, values))}: each can stand there once")
    if options.evaluations < 1:
        raise UsageError(f"--evaluations {options.evaluations}: allowed are 1 or more")
    if options.iterations is not None and options.iterations < options.evaluations:
        least = f"--evaluations {options.evaluations}"
        raise UsageError(f"--iterations {options.iterations}: allowed are {least} or more")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", default=ROWS.split(), help=f"default: {ROWS}")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--iterations", type=int, help="of each training; default: the task's own")
    parser.add_argument(
        "--evaluations", type=int, default=EVALUATIONS, help=f"of each training ({EVALUATIONS})"
    )
    parser.add_argument("--warmup", type=int, help="of top-k rows that write none")
    parser.add_argument("--json", type=Path, help="write figures and curves here")
    parser.add_argument("--png", type=Path, help="draw the curves here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.worker:
        worker(options)
        return 0
    try:
        check(options)
    except UsageError as err:
        print(f"accuracy.py: {err}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    runs = run(sys.argv[1:])
    rows = summary(runs, options.warmup)
    lines = missed(rows)
    report |= {"command": sys.argv, "limit_points": LIMIT, "rows": rows, "missed": lines}
    show(report, table(rows, len(options.seeds)))
    if options.json:
        write(options.json, report | {"runs": runs})
    if options.png:
        draw(options.png, runs)
    for line in lines:
        print(f"MISSED: {line}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
