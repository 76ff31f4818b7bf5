"""Ripples between replicas under FSDP2 with one slow process, against torch's HSDP.

Each host is a replica: `fully_shard` divides a paced model among its processes over gloo, in
`--groups` groups of layers that are kept after forward. Replicas average by Ripples' groups, or
train by torch's HSDP (`fully_shard` with the whole mesh) over gloo. Rates of the lab are scaled
with the model, as in `wingbeat bench`.

One process sleeps before each of its forwards, `--slowness` times a normal iteration, in addition
to its work (Ripples, section 7.4). A normal iteration is that of Ripples with equal processes, in
this run, as in `ripples.py`; with ``--normal compute`` it is the model's computation alone, as for
`wingbeat bench --slow`. Both rows sleep the same seconds.

Turns: each row with equal processes, then each with the slow one. A turn lasts `--seconds`, from a
common start; the slow process is slow from the first step of its turn on, so what Ripples needs to
find out is on the clock. Steps a second are a replica's steps over the time to its last one; the
slow replica's are not among those of the others.

Exit code 1 if a limit is missed: the other replicas keep 0.85 of their steps a second with equal
processes; all replicas together make 3 times HSDP's steps a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import at_least_one, lab_of_replicas, refuse_unwritable, run_and_judge, show, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wingbeat
from wingbeat.errors import LabError, UsageError
from wingbeat.strategies import parse
from wingbeat_lab import lab
from wingbeat_lab.bench import models
from wingbeat_lab.bench.config import scaled
from wingbeat_lab.bench.measure import Quantiles
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.paced import PacedModel

EXAMPLES = """examples:
  python benchmarks/ripples_replicas.py --json out/ripples_replicas.json
  python benchmarks/ripples_replicas.py --lab star:8@10gbit --model paced:bert_base@0.05
  python benchmarks/ripples_replicas.py --lab star:4@10gbit --normal compute
  python benchmarks/ripples_replicas.py --seconds 8 --rounds 1 --model paced:resnet50@0.02
"""
REFERENCE = "hsdp"
ROWS = (REFERENCE, "ripples:policy=smart")
EQUAL, SLOW = "equal", "one slow"
WARMUP = 3
"""Steps of each row before its first turn, with equal processes."""
KEPT_LIMIT, TIMES_LIMIT = 0.85, 3.0
"""At least: of the other replicas' steps a second; times HSDP's."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lab", default="star:4@1gbit", help="hosts and links, before scaling (star:4@1gbit)")
    add("--per-host", type=at_least_one, default=2, help="processes of a host (2)")
    add("--model", default="paced:resnet50@0.1", help="a paced model (%(default)s)")
    add("--stretch", type=float, default=1.0, help="slow motion (1)")
    add("--groups", type=at_least_one, default=4, help="of layers that are sharded together (4)")
    add("--rows", nargs="+", default=list(ROWS), help=f"compositions; {REFERENCE} must be first")
    add("--slowness", type=float, default=4.0, help="normal iterations that it sleeps (4)")
    add("--normal", choices=("iteration", "compute"), default="iteration", help="(iteration)")
    add("--slow-rank", type=int, help="which process sleeps (the last of the second replica)")
    add("--seconds", type=float, default=60.0, help="of a turn (60)")
    add("--rounds", type=at_least_one, default=3, help="turns of each row of each kind (3)")
    add("--json", type=Path, default=Path("out/ripples_replicas.json"))
    add("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    refuse_unwritable(args.json)
    return run_and_judge(args.json, lambda report: measure(args, report))


def check(args: argparse.Namespace) -> lab.LabSpec:
    """Raise UsageError for invalid values; return the lab as it is built."""
    spec, model = lab_of_replicas(args.lab), models.parse(args.model, stretch=args.stretch)
    if model.profile is None:
        raise UsageError(f"--model {args.model}: allowed are paced models, such as paced:resnet50")
    if args.rows[0] != REFERENCE or len(args.rows) < 2:
        raise UsageError(f"--rows {' '.join(args.rows)}: {REFERENCE} must be first, and others too")
    for row in args.rows[1:]:
        parse(row)
    if args.slow_rank is None:
        args.slow_rank = 2 * args.per_host - 1
    if not 0 <= args.slow_rank < spec.hosts * args.per_host:
        last = spec.hosts * args.per_host - 1
        raise UsageError(f"--slow-rank {args.slow_rank}: allowed are 0 to {last}")
    return scaled(spec, model.link_scale)


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Run the workers; return the missed limits."""
    built = check(args)
    minutes = 2 * len(args.rows) * args.rounds * args.seconds / 60
    print(f"takes about {minutes + 1:.0f} min", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = [sys.executable, __file__, "--worker", str(result), "--rows", *args.rows]
        for key in ("lab", "per_host", "model", "stretch", "groups", "slowness", "normal",
                    "slow_rank", "seconds", "rounds"):  # fmt: skip
            words += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
        ended = lab.run(
            built,
            words,
            per_host=args.per_host,
            env={"WINGBEAT_TOP": "off", "OMP_NUM_THREADS": "1"},
        )
        if ended.exit_code:
            raise LabError(f"{args.lab}: {ended.first_failure or ended.exit_code}")
        report |= json.loads(result.read_text(encoding="utf-8"))
    report |= {"lab": str(built), "asked_lab": args.lab}
    report["figures"] = figures(report["turns"], args.slow_rank // args.per_host)
    report["missed"] = judge(report["figures"])
    show(report, table(args, report))
    write(args.json, report)
    return list(report["missed"])


def figures(turns: dict[str, dict[str, list[list[float]]]], slow: int) -> dict[str, Any]:
    """Steps a second of each row by turn: of all replicas, and of all but the slow one.

    Args:
        turns: by row and kind, for each turn each replica's steps a second.
        slow: the slow replica.
    """
    made = {}
    for row, kinds in turns.items():
        own: dict[str, Any] = {}
        for kind, rates in kinds.items():
            others = [[r for i, r in enumerate(each) if i != slow] for each in rates]
            own[kind] = {
                "total": [sum(each) for each in rates],
                "others": [sum(each) for each in others],
                "slow": [each[slow] for each in rates],
            }
        own["kept"] = _ratios(own[SLOW]["others"], own[EQUAL]["others"])
        made[row] = own
    for own in made.values():
        own["of_reference"] = _ratios(own[SLOW]["total"], made[REFERENCE][SLOW]["total"])
    return made


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def judge(found: dict[str, Any]) -> list[str]:
    """The missed limits."""
    missed = []
    for row, own in found.items():
        if not row.startswith("ripples"):
            continue
        kept, times = statistics.median(own["kept"]), statistics.median(own["of_reference"])
        if kept < KEPT_LIMIT:
            missed.append(f"{row}: the others keep {kept:.2f}, limit {KEPT_LIMIT}")
        if times < TIMES_LIMIT:
            missed.append(f"{row}: {times:.2f} times HSDP's steps a second, limit {TIMES_LIMIT:g}")
    return missed


def table(args: argparse.Namespace, report: dict[str, Any]) -> Printed:
    cells = []
    for row, own in report["figures"].items():
        kept, times = Quantiles.of(own["kept"]), Quantiles.of(own["of_reference"])
        cells.append(
            (
                row,
                f"{statistics.median(own[EQUAL]['total']):.2f}",
                f"{statistics.median(own[SLOW]['total']):.2f}",
                f"{statistics.median(own[SLOW]['slow']):.3f}",
                f"{kept.median:.2f}",
                f"{kept.p10:.2f} .. {kept.p90:.2f}",
                f"{times.median:.2f}",
                f"{times.p10:.2f} .. {times.p90:.2f}",
            )
        )
    columns = (
        "strategy",
        "steps a second, equal",
        "one slow",
        "of these the slow replica",
        "others keep",
        "p10 .. p90",
        "times HSDP",
        "p10 .. p90 ",
    )
    title = (
        f"FSDP2 in replicas of {args.per_host} processes, {args.model} on {report['lab']}, one "
        f"process +{args.slowness:g}x"
    )
    notes = [
        f"the slow process is rank {args.slow_rank}; it sleeps {report['sleep_s']:.3f} s before "
        f"each step, {args.slowness:g} times a normal {args.normal} ({report['normal_s']:.3f} s)",
        f"steps a second of all replicas; medians of {args.rounds} turns of {args.seconds:g} s; "
        "p10 .. p90: of the turns' ratios",
    ]
    return Printed.of(title, columns, cells, [*(f"MISSED: {m}" for m in report["missed"]), *notes])


# -- a worker -----------------------------------------------------------------------------


def sharded(args: argparse.Namespace, mesh: Any, rank: int) -> Any:
    """Return the paced model under ``fully_shard``."""
    spec = models.parse(args.model, stretch=args.stretch)
    assert spec.profile is not None
    model: Any = PacedModel(spec.profile, rank=rank, time_scale=args.stretch)
    layers = list(model.children())
    # fully_shard replaces the parameters whose hooks spend the time of backward.
    for layer, costs in zip(layers, spec.profile.layers, strict=True):
        layer.own_backward_s = costs.backward_ms * 1e-3 * args.stretch
    size = -(-len(layers) // args.groups)
    for first in range(0, len(layers), size):
        fully_shard(layers[first : first + size], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


class Turns:
    """A row's model and its turns.

    Attributes:
        model: the sharded model.
    """

    def __init__(self, row: str, args: argparse.Namespace, mesh: Any) -> None:
        own = row != REFERENCE
        rank = dist.get_rank()
        self.model = sharded(args, mesh["shard"] if own else mesh, rank)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if own:
            wingbeat.distribute(self.model, self.optimizer, parse(row), mesh=mesh)
        # Ranks that must make the same number of steps: those of a replica, or all in lockstep.
        free = own and parse(row).traits.bound == "local"
        self.group = mesh.get_group("shard") if free else None
        self.leader = rank - rank % args.per_host if free else 0
        self.own = own

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(None).backward()
        self.optimizer.step()

    def run(self, seconds: float, sleep_s: float) -> float:
        """Train so long; return this replica's steps a second."""
        dist.barrier()
        begin = last = time.perf_counter()
        count = 0
        while self.again(begin + seconds):
            time.sleep(sleep_s)
            self.step()
            count, last = count + 1, time.perf_counter()
        if self.own:
            wingbeat.synchronize(self.model)  # the others may still be in a step
        dist.barrier()
        return count / (last - begin) if count else 0.0

    def again(self, end: float) -> bool:
        """Whether to make another step: as the leader's clock says, on all ranks of the group."""
        going = torch.tensor([time.perf_counter() < end])
        dist.broadcast(going, self.leader, group=self.group)
        return bool(going)

    def close(self) -> None:
        if self.own:
            wingbeat.release(self.model, self.optimizer)


def work(args: argparse.Namespace) -> None:
    """Run all turns; rank 0 writes the figures."""
    torch.set_num_threads(1)
    wingbeat.init(timeout=120, encrypted=False)
    hosts = dist.get_world_size() // args.per_host
    mesh = init_device_mesh("cpu", (hosts, args.per_host), mesh_dim_names=("dp_replicate", "shard"))
    rows = {row: Turns(row, args, mesh) for row in args.rows}
    found = taken(rows, args)
    if dist.get_rank() == 0:
        args.worker.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    for each in rows.values():
        each.close()
    wingbeat.shutdown()


def taken(rows: dict[str, Turns], args: argparse.Namespace) -> dict[str, Any]:
    """Take all turns; return each replica's steps a second, and what the slow process slept."""
    rank = dist.get_rank()
    turns: dict[str, dict[str, list[list[float]]]] = {row: {EQUAL: [], SLOW: []} for row in rows}

    def turn(row: str, kind: str, sleep_s: float) -> None:
        mine = sleep_s if rank == args.slow_rank else 0.0
        rate = torch.tensor(rows[row].run(args.seconds, mine), dtype=torch.float64)
        rates = [torch.zeros_like(rate) for _ in range(dist.get_world_size())]
        dist.all_gather(rates, rate)
        turns[row][kind].append([float(each) for each in rates[:: args.per_host]])
        if rank == 0:
            said = " ".join(f"{each:.2f}" for each in turns[row][kind][-1])
            print(f"{row}, {kind}: {said} steps a second", flush=True)

    for each in rows.values():
        for _ in range(WARMUP):
            each.step()
        dist.barrier()
    normal_s = sleep_s = 0.0
    for _ in range(args.rounds):
        for row in rows:
            turn(row, EQUAL, 0.0)
        if not normal_s:
            normal_s = normal(args, lambda: turns[args.rows[1]][EQUAL][0])
            sleep_s = args.slowness * normal_s
        for row in rows:
            turn(row, SLOW, sleep_s)
    return {"turns": turns, "normal_s": normal_s, "sleep_s": sleep_s}


def normal(args: argparse.Namespace, rates: Callable[[], list[float]]) -> float:
    """Seconds of a normal iteration; ``rates`` are Ripples' steps a second with equal processes."""
    if args.normal == "compute":
        return sum(models.parse(args.model, stretch=args.stretch).compute_s() or ())
    return 1 / statistics.fmean(rates())


if __name__ == "__main__":
    sys.exit(main())
