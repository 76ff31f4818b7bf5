"""DiLoCo between replicas under FSDP2, against torchft's: weights, bytes of a host, step times.

Each host is a replica: `fully_shard` divides a transformer among its processes over gloo, and each
process averages its shards with its counterparts on the other hosts every `--every` steps, by
torchft's DiLoCo over gloo or by wingbeat's. All rows have the same data (characters of the standard
library's source), weights, inner optimizer (AdamW) and outer optimizer (Nesterov). Both of
torchft's forms are rows: an all-reduce for each parameter, and in buckets; its 8-bit quantisation
needs a GPU. Neither side encrypts. torchft's lighthouse, and wingbeat's generator, run on host 0.

The arbiter is the algorithm in plain torch, in one process, over the batches of all replicas.
Weights are compared with it in double precision. Differences in single precision, of the timed
rows, stand beside them: the gradient of the attention's key bias is zero but for rounding, which
AdamW turns into steps of full length. The relative difference is that of the worst tensor, by its
2-norm.

Rows take turns of `--every` steps, the outer step included, after one untimed turn of each. Bytes
are what a host sends, by the kernel's counters, mean over hosts. The loss is that of the shared
model at the end, on held-out text.

Exit code 1 if a limit is missed: the exact row's weights within 1e-6 of the arbiter's; sketched
rows' bytes at most 1/50 of torchft's; each row's step at most as long as torchft's faster form.
All rows average equally often, and torchft sends 32 bits where a 4-bit sketch sends 4, so 1/50 is
out of a sketch's reach at an equal interval; top-k of 2% in 2 bits stands beside it.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accuracy
import diloco
import torch
import torch.distributed as dist
from common import at_least_one, lab_of_replicas, refuse_unwritable, run_and_judge, show, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wingbeat
from wingbeat.errors import LabError
from wingbeat.strategies import parse
from wingbeat_lab import lab
from wingbeat_lab.bench.measure import Quantiles
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.bench.traffic import Sent

EXAMPLES = """examples:
  python benchmarks/diloco_replicas.py --json out/diloco_replicas.json
  python benchmarks/diloco_replicas.py --lab star:4@200mbit --per-host 2 --width 512 --every 50
  python benchmarks/diloco_replicas.py --codecs sketch@4 topk@0.02:bits=2 bf16
  python benchmarks/diloco_replicas.py --width 32 --every 4 --rounds 2    (a minute, to try it)
"""
INSTALL = "torchft is missing; install it with: pip install 'wingbeat[torchft]'"
PLAIN, BUCKETS = "torchft", "torchft, in buckets"
EXACT_ROUNDS = 3
"""Turns of the rows that are compared with the arbiter in double precision."""

WEIGHTS_LIMIT, BYTES_LIMIT, TIME_LIMIT = 1e-6, 1 / 50, 1.0
"""At most: relative difference of the exact row; of torchft's bytes; of torchft's step time."""

RATE, IDLE_S = 2e-3, 2.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lab", default="star:2@1gbit", help="hosts and links (star:2@1gbit)")
    add("--per-host", type=at_least_one, default=2, help="processes of a host (2)")
    add("--every", type=at_least_one, default=30, help="steps of a turn, H (30)")
    add("--rounds", type=at_least_one, default=10, help="timed turns of each row (10)")
    add("--outer-lr", type=float, default=0.7, help="(0.7)")
    add("--outer-momentum", type=float, default=0.9, help="(0.9)")
    add("--codecs", nargs="+", default=["sketch@4", "topk@0.02:bits=2"], metavar="C",
        help="of further rows (sketch@4 topk@0.02:bits=2)")  # fmt: skip
    add("--width", type=at_least_one, default=384, help="of the transformer, a multiple of 4 (384)")
    add("--length", type=at_least_one, default=16, help="characters of a window (16)")
    add("--batch", type=int, default=1, choices=[1, 2, 4, 8], help="windows of a process (1)")
    add("--seed", type=int, default=0, help="of weights and batches (0)")
    add("--json", type=Path, default=Path("out/diloco_replicas.json"))
    add("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    if importlib.util.find_spec("torchft") is None:
        print(f"diloco_replicas.py: {INSTALL}", file=sys.stderr)
        return 2
    refuse_unwritable(args.json)
    return run_and_judge(args.json, lambda report: measure(args, report))


def exact(args: argparse.Namespace) -> str:
    """The composition of the exact row."""
    own = f"diloco:every={args.every},outer_lr={args.outer_lr},outer_momentum={args.outer_momentum}"
    return f"{own},encrypted=False"


def rows_of(args: argparse.Namespace) -> list[str]:
    """Names of all rows: torchft's, the exact one, and one for each codec."""
    coded = [f"{exact(args)},compression={codec}" for codec in args.codecs]
    return [PLAIN, BUCKETS, exact(args), *coded]


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Run the workers and the arbiter; return the missed limits."""
    hosts = lab_of_replicas(args.lab).hosts
    names = rows_of(args)
    for name in names[2:]:
        parse(name)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--worker", folder]
        for key in ("lab", "per_host", "every", "rounds", "outer_lr", "outer_momentum", "width",
                    "length", "batch", "seed"):  # fmt: skip
            words += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
        words += ["--codecs", *args.codecs]
        ended = lab.run(
            args.lab,
            words,
            per_host=args.per_host,
            env={"WINGBEAT_TOP": "off", "OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
        )
        if ended.exit_code:
            raise LabError(f"{args.lab}: {ended.first_failure or ended.exit_code}")
        report |= json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        compare(args, hosts, Path(folder), report)
    report["missed"] = judge(report["rows"])
    show(report, table(args, report))
    write(args.json, report)
    return list(report["missed"])


def compare(args: argparse.Namespace, hosts: int, folder: Path, report: dict[str, Any]) -> None:
    """Add to each row the distance of its weights from the arbiter's, and its loss."""
    torch.set_num_threads(1)  # as in the workers, so that sums have their order
    task = diloco.text(args.length, args.batch)
    double = arbiter(args, task, hosts, torch.float64, EXACT_ROUNDS)
    single = arbiter(args, task, hosts, torch.float32, 1 + args.rounds)
    for number, row in enumerate(report["rows"].values()):
        weights = torch.load(folder / f"{number}.pt", weights_only=True)
        row["difference"] = difference(weights, single)
        row["loss"] = loss(task, args, weights)
        kept = folder / f"exact-{number}.pt"
        if kept.exists():
            row["difference_double"] = difference(torch.load(kept, weights_only=True), double)
    report["arbiter_loss"] = loss(task, args, single)


def loss(task: accuracy.Task, args: argparse.Namespace, weights: dict[str, torch.Tensor]) -> float:
    """Nats per character of held-out text."""
    buffers = dict(transformer(args, torch.float32).named_buffers())
    return diloco.judged(task, args, weights | buffers)["loss"]


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest relative 2-norm of a tensor's difference; NaN if a value is NaN."""
    if found.keys() != wanted.keys():
        raise ValueError(f"tensors differ: {sorted(found.keys() ^ wanted.keys())}")
    ratios = [float((found[k] - t).norm() / t.norm()) for k, t in wanted.items() if t.norm() > 0]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios)


def arbiter(
    args: argparse.Namespace, task: accuracy.Task, hosts: int, dtype: torch.dtype, rounds: int
) -> dict[str, torch.Tensor]:
    """DiLoCo (Douillard et al., 2023, Algorithm 1) in one process; return the shared weights."""
    workers = hosts * args.per_host
    batches = [task.batches(rank, workers, args.seed) for rank in range(workers)]
    shared = transformer(args, dtype)
    replicas = [copy.deepcopy(shared) for _ in range(hosts)]
    inner = [torch.optim.AdamW(replica.parameters(), lr=RATE) for replica in replicas]
    velocity = [torch.zeros_like(p) for p in shared.parameters()]
    for _ in range(rounds):
        for _, (number, replica) in itertools.product(range(args.every), enumerate(replicas)):
            inner[number].zero_grad()
            own = batches[number * args.per_host : (number + 1) * args.per_host]
            losses = [accuracy.loss_of(replica, *next(each))[0] for each in own]
            (sum(losses) / args.per_host).backward()
            inner[number].step()
        with torch.no_grad():
            each = zip(shared.parameters(), velocity, *(r.parameters() for r in replicas),
                       strict=True)  # fmt: skip
            for mean, moved, *own_weights in each:
                change = sum(mean - own for own in own_weights) / hosts
                moved.mul_(args.outer_momentum).add_(change)
                mean.sub_(args.outer_lr * (change + args.outer_momentum * moved))
                for own in own_weights:
                    own.copy_(mean)
    return {name: p.detach() for name, p in shared.named_parameters()}


def judge(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Add each row's ratios to torchft's faster form; return the missed limits."""
    first = min((rows[PLAIN], rows[BUCKETS]), key=lambda row: statistics.median(row["step_s"]))
    fewest = min(rows[PLAIN]["bytes"], rows[BUCKETS]["bytes"])
    missed = []
    for name, row in rows.items():
        ratios = [a / b for a, b in zip(row["step_s"], first["step_s"], strict=True)]
        row["of_time"] = statistics.median(ratios)
        row["of_bytes"] = row["bytes"] / fewest
        if name in (PLAIN, BUCKETS):
            continue
        double = row.get("difference_double")
        if double is not None and not double <= WEIGHTS_LIMIT:
            missed.append(f"{name}: weights differ by {double:.1e}, limit {WEIGHTS_LIMIT:g}")
        if "sketch" in name and row["of_bytes"] > BYTES_LIMIT:
            share = f"{row['of_bytes']:.4f} of torchft's bytes, limit {BYTES_LIMIT:g}"
            missed.append(f"{name}: {share}")
        if row["of_time"] > TIME_LIMIT:
            missed.append(f"{name}: {row['of_time']:.2f} of torchft's step, limit {TIME_LIMIT:g}")
    return missed


def table(args: argparse.Namespace, report: dict[str, Any]) -> Printed:
    cells = []
    for name, row in report["rows"].items():
        steps, outer = Quantiles.of(row["step_s"]), Quantiles.of(row["outer_s"])
        double = row.get("difference_double")
        cells.append(
            (
                name.replace(exact(args), "diloco"),
                f"{1e3 * steps.median:.1f}",
                f"{1e3 * steps.p10:.1f} .. {1e3 * steps.p90:.1f}",
                f"{row['of_time']:.2f}",
                f"{1e3 * outer.median:.0f}",
                f"{row['bytes'] / 1e3:.1f}",
                f"{row['of_bytes']:.4f}",
                "" if double is None else f"{double:.1e}",
                f"{row['difference']:.1e}",
                f"{row['loss']:.4f}",
            )
        )
    columns = (
        "replicas average by",
        "step, ms",
        "p10 .. p90",
        "of torchft",
        "outer step, ms",
        "kB a step and host",
        "of torchft's",
        "from the arbiter, double",
        "single",
        "loss",
    )
    title = f"DiLoCo of FSDP2 replicas of {args.per_host} processes on {args.lab}"
    notes = [
        f"{report['parameters'] / 1e6:.2f} M parameters, an average every {args.every} steps; "
        f"medians of {args.rounds} turns of {args.every} steps, rows in turn, after one turn each; "
        "of torchft: median of the turns' ratios to the faster of its two forms",
        f"the arbiter's loss: {report['arbiter_loss']:.4f}; an idle host sends "
        f"{report['idle_bytes_per_s'] / 1e3:.2f} kB/s, which all rows include",
        f"torchft {report['torchft']}; neither side encrypts; diloco: {exact(args)}",
    ]
    return Printed.of(title, columns, cells, [*(f"MISSED: {m}" for m in report["missed"]), *notes])


# -- a worker -----------------------------------------------------------------------------


def transformer(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    return diloco.Transformer(args.seed, args.width, args.length).to(dtype)


@dataclass
class Row:
    """A model that trains in one way.

    Attributes:
        model: the transformer under ``fully_shard``.
        optimizer: the inner one; its `step` also averages, every so many steps.
        batches: of this rank.
        manager: torchft's; None for other rows.
    """

    model: Any
    optimizer: Any
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
    manager: Any = None

    def turn(self, steps: int) -> float:
        """Train; return the seconds of the last step, which averages."""
        for _ in range(steps):
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            accuracy.loss_of(self.model, *next(self.batches))[0].backward()
            self.optimizer.step()
        return time.perf_counter() - begin

    def save(self, path: Path, turns: int) -> None:
        """Write the whole weights from rank 0; called on all ranks.

        SystemExit if torchft has discarded one of the turns, as it does after an error.
        """
        if self.manager is not None and self.manager.current_step() != turns:
            done = self.manager.current_step()
            raise SystemExit(f"torchft has kept {done} of {turns} averages; see its errors above")
        whole = {name: p.detach().full_tensor() for name, p in self.model.named_parameters()}
        if dist.get_rank() == 0:
            torch.save(whole, path)


def opened(name: str, args: argparse.Namespace, mesh: Any, dtype: Any, stack: ExitStack) -> Row:
    """Return a new row; the ``stack`` ends it."""
    model = transformer(args, dtype)
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
    manager = None
    if name in (PLAIN, BUCKETS):
        manager = torchft(model, optimizer, args, mesh, in_buckets=name == BUCKETS, stack=stack)
    else:
        model, optimizer = wingbeat.distribute(model, optimizer, parse(name), mesh=mesh)
        stack.callback(wingbeat.release, model, optimizer)
    task = diloco.text(args.length, args.batch)
    batches = task.batches(dist.get_rank(), dist.get_world_size(), args.seed)
    return Row(model, optimizer, batches, manager)


def torchft(
    model: Any,
    optimizer: Any,
    args: argparse.Namespace,
    mesh: Any,
    *,
    in_buckets: bool,
    stack: ExitStack,
) -> Any:
    """Let torchft average: a lighthouse on rank 0, a store and a manager for each replica.

    Returns the manager.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    replica, local = mesh.get_coordinate()
    host, lighthouse, port = socket.gethostname(), "", 0
    if dist.get_rank() == 0:
        server = LighthouseServer(bind="[::]:0", min_replicas=mesh.size(0))
        stack.callback(server.shutdown)
        lighthouse = server.address()
    if local == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        stack.callback(lambda: store)  # lives as long as the row
        port = store.port
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (lighthouse, host, port))
    minute = datetime.timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=minute),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=mesh.size(0),
        use_async_quorum=False,  # DiLoCo requires it
        timeout=minute,
        rank=local,
        world_size=mesh.size(1),
        store_addr=told[replica * mesh.size(1)][1],
        store_port=told[replica * mesh.size(1)][2],
        lighthouse_addr=told[0][0],
        replica_id=f"replica_{replica}",
        heartbeat_interval=datetime.timedelta(seconds=1),  # less to count in other rows
        init_sync=False,  # weights are equal
    )
    stack.callback(manager.shutdown, wait=False)
    outer = torch.optim.SGD(
        model.parameters(), lr=args.outer_lr, momentum=args.outer_momentum, nesterov=True
    )
    stack.enter_context(
        DiLoCo(
            manager,
            [model],
            optimizer,
            outer,
            sync_every=args.every,
            use_bucketization=in_buckets,
        )
    )
    return manager


def work(args: argparse.Namespace) -> None:
    """Train the exact rows in double precision, then time all; rank 0 writes the figures."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120, encrypted=False)
    hosts = dist.get_world_size() // args.per_host
    mesh = init_device_mesh("cpu", (hosts, args.per_host), mesh_dim_names=("dp_replicate", "shard"))
    names = rows_of(args)
    for number, name in enumerate(names[:3]):
        with ExitStack() as stack:
            row = opened(name, args, mesh, torch.float64, stack)
            for _ in range(EXACT_ROUNDS):
                row.turn(args.every)
            row.save(args.worker / f"exact-{number}.pt", EXACT_ROUNDS)
            dist.barrier()
    with ExitStack() as stack:
        rows = {name: opened(name, args, mesh, torch.float32, stack) for name in names}
        found = timed(rows, args)
        for number, row in enumerate(rows.values()):
            row.save(args.worker / f"{number}.pt", 1 + args.rounds)
        if dist.get_rank() == 0:
            found["torchft"] = importlib.metadata.version("torchft")
            found["parameters"] = sum(
                p.numel() for p in transformer(args, torch.float32).parameters()
            )
            (args.worker / "result.json").write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    wingbeat.shutdown()


def timed(rows: dict[str, Row], args: argparse.Namespace) -> dict[str, Any]:
    """Time all rows in turn."""
    spec = lab.LabSpec.parse(args.lab)

    def sent() -> float:
        return Sent.read(spec, classes=False).sent

    def mean(own: float) -> float:
        total = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total / dist.get_world_size())

    found: dict[str, dict[str, list[float]]] = {
        name: {"step_s": [], "outer_s": [], "bytes": []} for name in rows
    }
    for row in rows.values():
        row.turn(args.every)
    dist.barrier()
    before = sent()
    time.sleep(IDLE_S)
    idle = mean((sent() - before) / IDLE_S)
    for _, (name, row) in itertools.product(range(args.rounds), rows.items()):
        dist.barrier()
        before, begin = sent(), time.perf_counter()
        outer = row.turn(args.every)
        dist.barrier()
        seconds, nbytes = time.perf_counter() - begin, sent() - before
        found[name]["step_s"].append(seconds / args.every)
        found[name]["outer_s"].append(outer)
        found[name]["bytes"].append(mean(nbytes) / args.every)
    made: dict[str, Any] = {
        name: {**each, "bytes": statistics.median(each["bytes"])} for name, each in found.items()
    }
    return {"rows": made, "idle_bytes_per_s": idle}


if __name__ == "__main__":
    sys.exit(main())
