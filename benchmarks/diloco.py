"""Infrequent averages compared with an exchange in each step, on real text over slow links.

Workers train a transformer to predict the next character of the standard library's source, each row
from the same weights on the same batches, with AdamW along a cosine. The table has bytes that a
host sends in a step, by the kernel's counters, seconds of a step, accuracy on held-out text, and
seconds to DDP's final accuracy less 0.5 points. Models are evaluated after a step in which all are
averaged, and codecs are used whether they are faster or not. ``4*diloco`` trains four times the
steps, along a cosine of that length, because its steps send less.

With ``--straggler`` the rows train for ``--seconds`` instead, while the last worker takes as many
times as long for a step (a sleep of ``--step-ms`` is the computation of the others), and 1 is none.
The table has the seconds of a round on the first worker, the steps of the first and the last, and
the loss of the mean of all models at that time. Rows are strategies, by default DiLoCo without and
with a quorum.

Rule: ``diloco`` with a sketch sends at most a 100th of the bytes of the first row, and reaches the
accuracy in a fifth of the time of the fastest row of PyTorch's (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import accuracy
import common
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wingbeat
from wingbeat import parts, strategies
from wingbeat.errors import LabError
from wingbeat_lab import lab
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.attach import attached
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab import counters

OUTER = "outer_lr=0.8,outer_momentum=0.5"
"""For the ten or so rounds of a row: a momentum of 0.9 averages over as many."""
ROWS = (
    "ddp",
    "ddp+fp16",
    "ddp+powersgd",
    "allreduce:compression=sketch",
    "dear",
    "localsgd:every=10",
    "diloco:every=30",
    f"diloco:every=30,{OUTER}",
    f"diloco:every=30,{OUTER},compression=sketch@4",
    f"diloco:every=30,{OUTER},compression=topk@0.05:bits=2",
    f"4*diloco:every=30,{OUTER},compression=sketch@4",
    "2*ddp+powersgd",
)
RACE = (
    f"diloco:every=10,{OUTER}",
    f"diloco:every=10,{OUTER},quorum=3,grace=0.2",
    f"diloco:every=10,{OUTER},quorum=3,grace=0.2,weights=tokens",
    f"diloco:every=10,{OUTER},quorum=3,grace=10",
)
"""Rows with a straggler: none is left out, it is, with its weight, and by a grace of any length."""
MARK = 30
"""Steps between two evaluations: all rows have just averaged then, if they average."""
POINTS, FEWER, FASTER = 0.5, 100.0, 5.0
RATE = 2e-3
HELD_OUT = 20_000


class Transformer(nn.Module):
    """From characters (int64, [batch, length]) to logits of the next ([batch, length, 128])."""

    def __init__(self, seed: int, width: int, length: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(128, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.places
        return self.out(self.layers(hidden, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def text(length: int, batch: int) -> accuracy.Task:
    """The text of `accuracy`, in windows of another length."""
    whole = accuracy.text_task()
    share, width = 8 // batch, whole.held_out[0].shape[1]

    def batches(rank: int, workers: int, seed: int) -> accuracy.Batches:
        # The same windows for each length.
        for x, y in whole.batches(rank, workers, seed):
            for part in zip(x.split(8 // share), y.split(8 // share), strict=True):
                yield part[0][:, :length], part[1][:, :length]

    held_out = tuple(part[: HELD_OUT // width + 1] for part in whole.held_out)
    asked, answers = (part.reshape(-1)[: HELD_OUT // length * length] for part in held_out)
    looked_at = asked.view(-1, length), answers.view(-1, length)
    return accuracy.Task(whole.network, batches, looked_at, iterations=0, rate=0.0)


# -- one worker ------------------------------------------------------------------------------


def sent() -> float:
    """Bytes that this host's interfaces have sent."""
    return float(sum(each.tx_bytes for name, each in counters.read().items() if name != "lo"))


def times_of(row: str) -> tuple[int, str]:
    """The factor of a row's steps, and its name.

    >>> times_of("4*diloco"), times_of("ddp")
    ((4, 'diloco'), (1, 'ddp'))
    """
    times, star, name = row.partition("*")
    return (int(times), name) if star and times.isdecimal() else (1, row)


def train(task: accuracy.Task, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train once; return rank 0's curve by seconds, and bytes of a step, the mean over hosts."""
    times, name = times_of(row)
    steps = times * args.steps
    batches = task.batches(dist.get_rank(), dist.get_world_size(), args.seed)
    kept: list[tuple[float, int, dict[str, Any]]] = []
    adamw = functools.partial(torch.optim.AdamW, lr=RATE)
    with attached(
        accuracy.parse(name, None), Transformer(args.seed, args.width, args.length), adamw
    ) as made:
        dist.barrier()
        begin, before = time.monotonic(), sent()
        for step in range(steps):
            for group in made.optimizer.param_groups:
                group["lr"] = RATE * accuracy.rate_at(step, steps)
            made.optimizer.zero_grad()
            accuracy.loss_of(made.model, *next(batches))[0].backward()
            nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
            made.optimizer.step()
            if (step + 1) % MARK == 0:
                state = {name: t.clone() for name, t in made.model.state_dict().items()}
                kept.append((time.monotonic() - begin, step + 1, state))
        seconds, nbytes = time.monotonic() - begin, torch.tensor(sent() - before)
        dist.barrier()
        params = sum(param.numel() for param in made.model.parameters())
    dist.all_reduce(nbytes)
    found = {"row": row, "s": seconds, "bytes": float(nbytes) / dist.get_world_size() / steps}
    if dist.get_rank() == 0:
        found["curve"] = [{"s": s, "step": n, **judged(task, args, state)} for s, n, state in kept]
    return {**found, "parameters": params}


def race(task: accuracy.Task, row: str, factor: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train for a time, the last worker slower; return rank 0's rounds, all steps, and the loss."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = task.batches(rank, size, args.seed)
    strategy = strategies.parse(row)
    assert isinstance(strategy.schedule, parts.Local)
    weighted = isinstance(strategy.update, parts.Outer) and strategy.update.weights != "equal"
    model = Transformer(args.seed, args.width, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    wingbeat.distribute(model, optimizer, strategy)
    pause = args.step_ms / 1000 * (factor if rank == size - 1 else 1.0)
    dist.barrier()
    begin, steps, ends = time.monotonic(), 0, []
    while time.monotonic() - begin < args.seconds:
        time.sleep(pause)
        x, y = next(batches)
        optimizer.zero_grad()
        accuracy.loss_of(model, x, y)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if weighted:
            wingbeat.count_tokens(model, x.numel())
        optimizer.step()
        steps += 1
        if steps % strategy.schedule.every == 0:
            ends.append(time.monotonic() - begin)
    wingbeat.synchronize(model)
    made = torch.zeros(size)
    made[rank] = steps
    dist.all_reduce(made)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    wingbeat.release(model, optimizer)
    rounds = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "row": row,
        "straggler": factor,
        "rounds_s": rounds,
        "round_s": statistics.median(rounds) if rounds else None,
        "steps": [int(count) for count in made],
        **(judged(task, args, state) if rank == 0 else {}),
    }


def judged(
    task: accuracy.Task, args: argparse.Namespace, state: dict[str, Any]
) -> dict[str, float]:
    """Accuracy in % of these weights, and nats per character."""
    network = Transformer(args.seed, args.width, args.length)
    network.load_state_dict({name.removeprefix("module."): t for name, t in state.items()})
    right, nats = 0, 0.0
    with torch.no_grad():
        for x, y in zip(*(part.split(100) for part in task.held_out), strict=True):
            loss, hits = accuracy.loss_of(network, x, y, reduction="sum")
            right, nats = right + hits, nats + float(loss)
    count = task.held_out[1].numel()
    return {"accuracy": 100 * right / count, "loss": nats / count}


def worker(args: argparse.Namespace) -> None:
    """Train all rows; rank 0 writes a line for each."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120.0)
    task = text(args.length, args.batch)
    for factor, row in itertools.product(args.straggler or [], args.rows):
        raced = race(task, row, factor, args)
        if dist.get_rank() == 0:
            with args.json.open("a") as file:
                print(json.dumps(raced), file=file)
            print(f"{row}, {factor:g}: {raced['steps']}, {raced['loss']:.3f}", flush=True)
        dist.barrier()
    for row in () if args.straggler else args.rows:
        made = train(task, row, args)
        if dist.get_rank() == 0:
            with args.json.open("a") as file:
                print(json.dumps(made), file=file)
            print(f"{row}: {made['curve'][-1]['accuracy']:.2f}%, {made['s']:.0f} s", flush=True)
        dist.barrier()
    wingbeat.shutdown()


# -- all of them -----------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all rows in one lab."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.jsonl"
        words = [sys.executable, __file__, "--worker", "--json", str(path), "--rows", *args.rows]
        for key in ("steps", "width", "length", "batch", "seed", "seconds", "step_ms"):
            words += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
        if args.straggler:
            words += ["--straggler", *map(str, args.straggler)]
        ended = lab.run(args.lab, words, on_line=lambda rank, line: print(f"[{rank}] {line}"))
        if ended.exit_code:
            raise LabError(f"{args.lab}: {ended.first_failure or ended.exit_code}")
        return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table's data of each run; the first is the reference."""
    first = runs[0]
    target = first["curve"][-1]["accuracy"] - POINTS
    rows = []
    for run in runs:
        curve = run["curve"]
        there = next((point["s"] for point in curve if point["accuracy"] >= target), None)
        rows.append(
            {
                "row": run["row"],
                "steps": curve[-1]["step"],
                "kb": run["bytes"] / 1000,
                "fewer": first["bytes"] / max(1.0, run["bytes"]),
                "step_ms": 1000 * run["s"] / curve[-1]["step"],
                "accuracy": curve[-1]["accuracy"],
                "loss": curve[-1]["loss"],
                "to_target_s": there,
            }
        )
    return rows


COLUMNS = (
    "strategy",
    "steps",
    "kB a step",
    "times fewer",
    "ms a step",
    "right, %",
    "nats",
    "to target, s",
)


def table(rows: list[dict[str, Any]], where: str) -> Printed:
    cells = [
        (
            row["row"],
            str(row["steps"]),
            f"{row['kb']:.1f}",
            f"{row['fewer']:.1f}",
            f"{row['step_ms']:.1f}",
            f"{row['accuracy']:.2f}",
            f"{row['loss']:.3f}",
            "" if row["to_target_s"] is None else f"{row['to_target_s']:.1f}",
        )
        for row in rows
    ]
    notes = [f"target: the first row's final accuracy less {POINTS:g} points; one seed"]
    return Printed.of(f"a transformer on text, {where}", COLUMNS, cells, notes)


def race_table(runs: list[dict[str, Any]], where: str, seconds: float) -> Printed:
    columns = ("strategy", "straggler", "s a round", "steps, first", "steps, last", "nats")
    cells = [
        (
            run["row"],
            f"{run['straggler']:g}",
            "" if run["round_s"] is None else f"{run['round_s']:.2f}",
            str(run["steps"][0]),
            str(run["steps"][-1]),
            f"{run['loss']:.3f}",
        )
        for run in runs
    ]
    notes = ["rounds are medians on the first worker; the loss is of the mean model; one seed"]
    return Printed.of(f"{seconds:g} s of training, {where}", columns, cells, notes)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return the missed limits."""
    theirs = [row["to_target_s"] for row in rows if times_of(row["row"])[1].startswith("ddp")]
    best = min((seconds for seconds in theirs if seconds), default=math.inf)
    found = []
    for row in rows:
        if not times_of(row["row"])[1].startswith("diloco") or "sketch" not in row["row"]:
            continue
        if row["fewer"] < FEWER:
            found.append(f"{row['row']}: {row['fewer']:.0f} times fewer bytes; asked: {FEWER:g}")
        times = best / (row["to_target_s"] or math.inf)
        if times < FASTER:
            found.append(
                f"{row['row']}: {times:.2f} times as fast to the target; asked: {FASTER:g}"
            )
    return found


def main() -> int:
    """Measure, print, and compare with the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="star:4@100mbit")
    parser.add_argument("--rows", nargs="+", help="the first is the reference")
    parser.add_argument(
        "--straggler", nargs="+", type=float, metavar="TIMES", help="the last worker's steps"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of a row, with it (40)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of a step, with it (50)")
    parser.add_argument("--steps", type=int, default=360, help=f"a multiple of {MARK} (360)")
    parser.add_argument("--width", type=int, default=192, help="of the transformer (192)")
    parser.add_argument("--length", type=int, default=16, help="characters of a window (16)")
    parser.add_argument("--batch", type=int, default=1, choices=[1, 2, 4, 8], help="windows (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="out/diloco.json, or out/diloco_straggler.json")
    parser.add_argument("--add", action="store_true", help="rows to those that --json has")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if any(not 1 <= times <= 100 for times in args.straggler or ()):
        parser.error(f"--straggler {args.straggler}: allowed are 1 to 100 times as long")
    args.rows = args.rows or list(RACE if args.straggler else ROWS)
    args.json = args.json or Path(f"out/diloco{'_straggler' if args.straggler else ''}.json")
    if args.steps % MARK:
        parser.error(f"--steps {args.steps}: allowed are multiples of {MARK}")
    if args.worker:
        worker(args)
        return 0
    common.end_as_by_ctrl_c()
    before = common.measured_before(args.json, "runs", common.BEGIN_ANEW) if args.add else []
    common.refuse_unwritable(args.json)
    runs = [*before, *measure(args)]
    if args.straggler:
        report = {"machine": machine.describe(), "seconds": args.seconds, "runs": runs}
        common.show(report, race_table(runs, args.lab, args.seconds))
        common.write(args.json, report)
        return 0
    rows = rows_of(runs)
    report = {"machine": machine.describe(), "runs": runs, "rows": rows}
    common.show(report, table(rows, args.lab))
    common.write(args.json, report)
    found = missed(rows)
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
