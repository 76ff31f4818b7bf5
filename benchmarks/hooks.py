"""DistributedDataParallel with and without wingbeat's communication hooks, on an emulated cluster.

    python benchmarks/hooks.py --json out/hooks.json
    python benchmarks/hooks.py --model paced:vgg16@0.1 --rows ddp sketch@8

Rows take turns in each round, in rotating order, so that a slowdown of the machine affects all of
them. Times are medians over iterations of the slowest worker's; bytes are the kernel's counters of
a host's links, mean over hosts and iterations. The model is paced: real gradients' bytes, real
optimizer, compute times emulated; its scale shrinks bytes and links together, and the stretch
slows computation and links down together, as in ``wingbeat bench``. Encoding is slowed down as
well, to what one core would need for the whole model (`wingbeat_lab.bench.pace`).

``sketch@B`` is sketch_hook with B bits, any other sketch or low rank is written as for
``compression=`` (``lowrank@4:split=count:level=ends``), ``topk@D`` is topk_hook with density D.
Exit code 1 if a hook sends more than its payloads allow (``limit``, with 5% for headers and small
messages).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import show, write

from wingbeat import compression
from wingbeat.errors import UsageError
from wingbeat.kernels import layout
from wingbeat.simulator.codecs import Price
from wingbeat_lab import lab, paced
from wingbeat_lab.bench import attach as wrapping
from wingbeat_lab.bench import machine, models
from wingbeat_lab.bench.config import scaled
from wingbeat_lab.bench.pace import Pace, prices
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab import counters

ROWS = ("ddp", "ddp+fp16", "sketch@8", "sketch@4", "topk@0.001")
SLACK = 1.05
"""Ethernet's and TCP's headers on pieces of up to 64 KB, acknowledgements, and small messages."""


class Row:
    """A model under DDP with one hook, during one turn."""

    def __init__(self, name: str, model: str, stretch: float) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        from wingbeat.integrations import ddp

        profile = paced.parse(model)
        self.state: Any = None
        inner = paced.PacedModel(profile, time_scale=stretch)
        self.model = wrapping.wrap(inner, mb=wrapping.DEFAULT_MB, scale=profile.scale)
        kind, _, value = name.partition("@")
        if kind == "ddp+fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif kind == "topk":
            self.state = ddp.TopKState(self.model, density=float(value))
            self.model.register_comm_hook(self.state, ddp.topk_hook)
        elif kind != "ddp":
            self.state = ddp.SketchState(self.model, wire=name)
            self.model.register_comm_hook(self.state, ddp.sketch_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(None).backward()
        self.optimizer.step()

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def turn(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one row's turn; return the slowest worker's seconds by iteration, and sent bytes."""
    row = Row(name, args.model, args.stretch)
    for _ in range(args.warmup):
        row.step()
    dist.barrier()
    before, seconds = sent_bytes(), []
    for _ in range(args.iterations):
        begin = time.perf_counter()
        row.step()
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    sent = torch.tensor((sent_bytes() - before) / args.iterations, dtype=torch.float64)
    dist.all_reduce(sent)
    buckets = [n // 4 for n in wrapping.buckets(row.model)]
    row.close()
    return {
        "row": name,
        "seconds": slowest.tolist(),
        "sent_bytes": float(sent) / dist.get_world_size(),
        "buckets": buckets,
    }


def sent_bytes() -> int:
    """Bytes sent by this host's interfaces; without shaped links, over the loopback."""
    found = counters.read()
    names = [name for name in found if name != "lo"] or ["lo"]
    return sum(found[name].tx_bytes for name in names)


def worker(args: argparse.Namespace) -> None:
    """Run all rounds on this rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pace = Pace(args.stretch, paced.parse(args.model).scale)
    pace.install()
    found = {name: priced(name, args, pace) for name in args.rows if name != "ddp"}
    turns = []
    for number in range(args.rounds):
        shift = number % len(args.rows)
        for name in (*args.rows[shift:], *args.rows[:shift]):
            pace.use(found.get(name, {}))
            turns.append(turn(name, args))
            if dist.get_rank() == 0:
                print(f"round {number + 1}/{args.rounds}: {name}", flush=True)
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(turns), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def priced(name: str, args: argparse.Namespace, pace: Pace) -> dict[str, Price]:
    """Return the prices of the hook's calls."""
    base, scale = args.model.partition("@")[0], paced.parse(args.model).scale

    @contextlib.contextmanager
    def opened(share: float) -> Iterator[Callable[[int], None]]:
        row = Row(name, f"{base}@{share * scale!r}", args.stretch)
        yield lambda _: row.step()
        row.close()

    return prices(*pace.measure(opened))


def codec_factor(model: str, stretch: float) -> float:
    """Factor on encoding time: whole model over scaled model."""
    return models.parse(model, stretch=stretch).codec_factor


def limit(row: str, buckets: list[int], workers: int) -> float | None:
    """Bytes that a host may send in an iteration, without headers; None if unknown.

    A large gradient's own table is in the slack.
    """
    kind, _, value = row.partition("@")
    if kind == "sketch" and value.isdigit():
        blocks = [-(-n // workers) + 16 for n in buckets]
        return 2.0 * (workers - 1) * sum(layout.sketch_bytes(n, int(value)) + 16 for n in blocks)
    if kind == "topk":
        counts = [(n, layout.count_of(n, float(value))) for n in buckets]
        return float(workers - 1) * sum(layout.topk_bytes(n, k) + 16 for n, k in counts)
    return None


def summary(turns: list[dict[str, Any]], rows: list[str], workers: int) -> list[dict[str, Any]]:
    """Medians over all iterations of a row, and relative to the first row's."""
    found: list[dict[str, Any]] = []
    for name in rows:
        mine = [each for each in turns if each["row"] == name]
        seconds = [s for each in mine for s in each["seconds"]]
        sent = statistics.fmean(each["sent_bytes"] for each in mine)
        allowed = limit(name, mine[-1]["buckets"], workers)
        found.append(
            {
                "row": name,
                "iteration_s": statistics.median(seconds),
                "samples_s": seconds,
                "sent_bytes": sent,
                "limit_bytes": allowed,
                "missed": allowed is not None and sent > SLACK * allowed + 20_000,
                "buckets": len(mine[-1]["buckets"]),
            }
        )
    for each in found:
        each["time_ratio"] = each["iteration_s"] / found[0]["iteration_s"]
        each["bytes_ratio"] = each["sent_bytes"] / found[0]["sent_bytes"]
    return found


COLUMNS = (
    "row",
    "iteration, ms",
    "least .. largest, ms",
    "of the first",
    "sent, MB",
    "of the first's bytes",
)


def table(rows: list[dict[str, Any]], model: str, spec: str, stretch: float) -> Printed:
    """Return the rows for printing, with notes on those slower than the first."""
    cells = [
        (
            each["row"],
            f"{1e3 * each['iteration_s']:.1f}",
            f"{1e3 * min(each['samples_s']):.1f} .. {1e3 * max(each['samples_s']):.1f}",
            f"{each['time_ratio']:.3f}",
            f"{each['sent_bytes'] / 1e6:.3f}",
            f"{each['bytes_ratio']:.4f}",
        )
        for each in rows
    ]
    notes = [
        f"behind: {each['row']} takes {each['time_ratio']:.3f} times as long as {rows[0]['row']}"
        for each in rows
        if each["time_ratio"] > 1
    ]
    notes += [
        f"missed: {each['row']} sends more than its payloads" for each in rows if each["missed"]
    ]
    notes.append(
        f"encoding: what grows with the model takes {codec_factor(model, stretch):g} times as long "
        f"as measured here, as on the whole model; the rest {stretch:g} times"
    )
    title = f"DDP's hooks: {model} on {spec}, slow motion of {stretch:g}"
    return Printed.of(title, COLUMNS, cells, notes)


def measure(args: argparse.Namespace) -> tuple[int, list[dict[str, Any]]]:
    """Run the workers on the lab; return their number, and each turn."""
    profile = paced.parse(args.model)
    spec = scaled(lab.LabSpec.parse(args.lab), profile.scale / args.stretch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.json"
        words = [sys.executable, __file__, "--worker", str(path), "--model", args.model]
        words += ["--rounds", str(args.rounds), "--iterations", str(args.iterations)]
        words += ["--warmup", str(args.warmup), "--stretch", str(args.stretch)]
        words += ["--rows", *args.rows]
        result = lab.run(spec, words, on_line=progress)
        if result.exit_code:
            sys.exit(result.exit_code)
        return spec.hosts, json.loads(path.read_text(encoding="utf-8"))


def launch(args: argparse.Namespace) -> int:
    about = machine.describe()
    hosts, turns = measure(args)
    rows = summary(turns, args.rows, hosts)
    report = {
        "command": sys.argv,
        "lab": args.lab,
        "stretch": args.stretch,
        "model": args.model,
        "machine": about,
        "versions": machine.versions(),
        "rows": rows,
        "turns": turns,
    }
    show(report, table(rows, args.model, args.lab, args.stretch))
    if args.json:
        write(args.json, report)
    return int(any(each["missed"] for each in rows))


def progress(_rank: int, line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def known(row: str) -> str:
    """Check one row's name."""
    kind, _, value = row.partition("@")
    if row in ("ddp", "ddp+fp16"):
        return row
    try:
        if kind == "topk":
            right = 0.0 < float(value) <= 1.0
        else:
            right = isinstance(compression.parse(row), compression.Sketch | compression.LowRank)
    except UsageError as err:
        raise argparse.ArgumentTypeError(str(err)) from None
    except ValueError:
        right = False
    if not right:
        raise argparse.ArgumentTypeError(
            f"{row!r}; allowed: ddp, ddp+fp16, sketch@1 to sketch@8 and lowrank@RANK, with options "
            "or without, topk@DENSITY"
        )
    return row


def main() -> int:
    """Parse the command line; inside the lab, act as a worker."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lab", default="star:4@1gbit", help="rates are scaled with the model")
    parser.add_argument("--model", default="paced:resnet50@0.1")
    parser.add_argument("--rows", nargs="+", type=known, default=list(ROWS))
    parser.add_argument("--stretch", type=float, default=1.0, help="slow motion (1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6, help="timed, in each turn")
    parser.add_argument("--warmup", type=int, default=3, help="iterations; DDP rebuilds buckets")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    try:
        models.parse(args.model, stretch=args.stretch)
    except UsageError as error:
        parser.error(str(error))
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
