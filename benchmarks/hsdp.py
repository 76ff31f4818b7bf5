"""wingbeat between replicas under FSDP2, against torch's own HSDP: time and bytes of a host.

    python benchmarks/hsdp.py --json out/hsdp.json
    python benchmarks/hsdp.py --lab star:2@1gbit --per-host 4

Each host is a replica: `fully_shard` divides the model among its processes over gloo, and each
process exchanges its shards with its counterparts on the other hosts, by torch's HSDP over gloo or
by a strategy. The model is a stack of blocks as in a transformer's feed-forward layers, which a
small batch crosses quickly, so the network is the bottleneck. Rows take turns. Bytes are those that
a host sends, by the kernel's counters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import at_least_one, lab_of_replicas, refuse_unwritable, run_and_judge, show, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wingbeat
from wingbeat import simulator
from wingbeat.errors import LabError
from wingbeat.strategies import parse
from wingbeat.types import TensorSpec
from wingbeat_lab import lab
from wingbeat_lab.bench import simulated
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.bench.traffic import Sent

REFERENCE = "hsdp"
ROWS = (
    REFERENCE,
    "allreduce:mb=4",
    "dear:plan=fixed,mb=4",
    "allreduce:mb=4,compression=sketch:auto_disable=false",
)
WIDTH, BLOCKS = 512, 4
WARMUP = 3
"""Iterations before the timed ones: `dear` learns the order of gradients in its first."""

DENSE_LIMIT, SKETCH_LIMIT = 1.0, 0.3
"""Of HSDP's bytes, and for dense rows of its time, at most."""

NOISE = 0.02
"""Share by which bytes of a row vary: headers, acknowledgements, the barriers between rows."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="star:2@1gbit", help="hosts and links (star:2@1gbit)")
    parser.add_argument("--per-host", type=at_least_one, default=2, help="processes (2)")
    parser.add_argument("--iterations", type=at_least_one, default=6, help="of each turn (6)")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="turns of each row (5)")
    parser.add_argument("--json", type=Path, default=Path("out/hsdp.json"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    if args.per_host < 2:
        parser.error("--per-host: replicas of one process have no shards; give at least 2")
    refuse_unwritable(args.json)
    return run_and_judge(args.json, lambda report: measure(args, report))


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Run the workers; return the missed limits."""
    lab_of_replicas(args.lab)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = ["--iterations", str(args.iterations), "--rounds", str(args.rounds)]
        options += ["--lab", args.lab, "--per-host", str(args.per_host), "--worker", str(result)]
        ended = lab.run(
            args.lab,
            [sys.executable, __file__, *options],
            per_host=args.per_host,
            env={"WINGBEAT_TOP": "off", "OMP_NUM_THREADS": "1"},
        )
        if ended.exit_code:
            raise LabError(f"{args.lab}: {ended.first_failure or ended.exit_code}")
        report |= json.loads(result.read_text(encoding="utf-8"))
    rows, first = report["rows"], report["rows"][REFERENCE]
    cells, missed = [], []
    for name, row in rows.items():
        row["virtual_s"] = None if name == REFERENCE else predicted_s(args, name)
        row["of_time"] = statistics.median(
            own / other for own, other in zip(row["s"], first["s"], strict=True)
        )
        row["of_bytes"] = row["bytes"] / first["bytes"]
        cells.append(
            (
                name,
                f"{1e3 * statistics.median(row['s']):.0f}",
                f"{row['of_time']:.2f}",
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['of_bytes']:.2f}",
                "" if row["virtual_s"] is None else f"{1e3 * row['virtual_s']:.0f}",
            )
        )
        limit = SKETCH_LIMIT if "sketch" in name else DENSE_LIMIT
        if name != REFERENCE and row["of_bytes"] > limit * (1 + NOISE):
            missed.append(f"{name}: {row['of_bytes']:.2f} of HSDP's bytes, limit {limit}")
        if name != REFERENCE and row["of_time"] > DENSE_LIMIT:
            missed.append(f"{name}: {row['of_time']:.2f} of HSDP's time, limit {DENSE_LIMIT}")
    columns = (
        "replicas exchange by",
        "iteration, ms",
        "of HSDP",
        "MB a host",
        "of HSDP's",
        "virtual time, ms",
    )
    title = f"FSDP2 in replicas of {args.per_host} processes on {args.lab}"
    notes = [
        f"{report['parameters'] / 1e6:.1f} M parameters; medians of {args.rounds} turns of "
        f"{args.iterations} iterations, rows in turn; of HSDP: median of the turns' ratios",
    ]
    show(report, Printed.of(title, columns, cells, notes))
    write(args.json, report)
    return missed


def predicted_s(args: argparse.Namespace, name: str) -> float:
    """Return the seconds of a row's iteration in virtual time, on this machine's processors."""
    tensors: list[TensorSpec] = []
    layers: list[simulator.TimedLayer] = []
    for block in stack():
        first = len(tensors)
        tensors += [
            TensorSpec(f"{len(layers)}.{key}", tuple(each.shape), "float32", 4)
            for key, each in block.named_parameters()
        ]
        layers.append(simulator.TimedLayer(0.0, 0.0, tuple(range(first, len(tensors)))))
    spec = lab.LabSpec.parse(args.lab)
    return simulator.simulate(
        simulator.Model(tuple(layers), tuple(tensors)),
        parse(name),
        spec.hosts,
        simulated.links_of(spec),
        work=simulated.work_inside(args.per_host),
        inside=args.per_host,
        cores=simulated.machine_cores(),
        one_machine=True,
    ).median_s


# -- a worker -----------------------------------------------------------------------------


def stack() -> nn.Sequential:
    """Return feed-forward blocks."""
    torch.manual_seed(1)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks)


def sharded(mesh: Any) -> Any:
    """Return the model with each block, and the whole, under ``fully_shard``."""
    model = stack()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work(args: argparse.Namespace) -> None:
    """Measure all rows in turn; rank 0 writes the figures."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120)
    spec = lab.LabSpec.parse(args.lab)
    hosts = dist.get_world_size() // args.per_host
    mesh = init_device_mesh("cpu", (hosts, args.per_host), mesh_dim_names=("dp_replicate", "shard"))
    rows: dict[str, tuple[Any, Any]] = {}
    for name in ROWS:
        own = name != REFERENCE
        model = sharded(mesh["shard"] if own else mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows[name] = (model, optimizer)
        if own:
            wingbeat.distribute(model, optimizer, parse(name), mesh=mesh)
    x = torch.randn(4, WIDTH)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    sent: dict[str, list[float]] = {name: [] for name in rows}
    for name in rows:
        steps(*rows[name], x, WARMUP)
    for _ in range(args.rounds):
        for name in rows:
            dist.barrier()
            before, begin = Sent.read(spec, classes=False).sent, time.perf_counter()
            steps(*rows[name], x, args.iterations)
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / args.iterations)
            after = Sent.read(spec, classes=False).sent
            sent[name].append((after - before) / args.iterations)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in stack().parameters())
        found = {
            name: {"s": seconds[name], "bytes": statistics.median(sent[name])} for name in rows
        }
        args.worker.write_text(
            json.dumps({"parameters": parameters, "rows": found}), encoding="utf-8"
        )
    dist.barrier()
    for name in ROWS[1:]:
        wingbeat.release(*rows[name])
    wingbeat.shutdown()


def steps(model: Any, optimizer: Any, x: torch.Tensor, count: int) -> None:
    """Train, and finish deferred updates, so that they count for this row."""
    for _ in range(count):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    if hasattr(model, "synchronize"):
        model.synchronize()


if __name__ == "__main__":
    sys.exit(main())
