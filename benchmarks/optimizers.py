"""Which optimizers train as under DDP with which strategies.

    pip install muon-optimizer schedulefree adam-mini prodigyopt lion-pytorch pytorch-optimizer \
        bitsandbytes heavyball
    python benchmarks/optimizers.py

Trains a small network with each optimizer that is installed, on two workers of this machine, for
six steps: under DDP, and under each strategy from the same weights on the same batches.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import end_as_by_ctrl_c, show, write
from torch import nn

import wingbeat
from wingbeat.errors import WingbeatError
from wingbeat.transport.text import first_line
from wingbeat_lab import baselines
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed

STRATEGIES = (
    "allreduce",
    "dear",
    "dear:shard_optimizer=true",
    "geryon:update=server,servers=1",
    "canary:s=0",
    "localsgd:every=2",
    "diloco:every=2",
)
AVERAGED = ("localsgd:every=2", "diloco:every=2")
"""Workers' models differ between averages, so the weights differ by design."""

STEPS = 6
PATIENCE = 1500
"""Seconds for all workers of one run."""

Make = Callable[[Any, nn.Module], torch.optim.Optimizer]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The hidden ones, of one shape, as the distributed Muon gathers them over gloo."""
    return [p for p in model.parameters() if p.ndim == 2 and p.shape[0] == p.shape[1]]


def muon_and_adam(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of the muon package's optimizers for both kinds of parameters."""
    hidden = matrices(model)
    rest = [p for p in model.parameters() if all(p is not one for one in hidden)]
    return [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]


def by_parameters(name: str, **options: Any) -> Make:
    """An optimizer of this name in its module, over all parameters."""
    return lambda module, model: getattr(module, name)(model.parameters(), **options)


def of_matrices(name: str, **options: Any) -> Make:
    """The same over the matrices; the other parameters are not trained."""
    return lambda module, model: getattr(module, name)(matrices(model), **options)


OPTIMIZERS: dict[str, tuple[str, str, Make]] = {
    "torch.optim.AdamW": ("torch", "torch.optim", by_parameters("AdamW", lr=0.01)),
    "torch.optim.Muon": ("torch", "torch.optim", of_matrices("Muon", lr=0.02)),
    "torch.optim.Adafactor": ("torch", "torch.optim", by_parameters("Adafactor", lr=0.02)),
    "muon.SingleDeviceMuon": ("muon-optimizer", "muon", of_matrices("SingleDeviceMuon")),
    "muon.SingleDeviceMuonWithAuxAdam": (
        "muon-optimizer",
        "muon",
        lambda module, model: module.SingleDeviceMuonWithAuxAdam(muon_and_adam(model)),
    ),
    "muon.Muon": ("muon-optimizer", "muon", of_matrices("Muon")),
    "muon.MuonWithAuxAdam": (
        "muon-optimizer",
        "muon",
        lambda module, model: module.MuonWithAuxAdam(muon_and_adam(model)),
    ),
    "schedulefree.AdamWScheduleFree": (
        "schedulefree",
        "schedulefree",
        by_parameters("AdamWScheduleFree", lr=0.01),
    ),
    "schedulefree.SGDScheduleFree": (
        "schedulefree",
        "schedulefree",
        by_parameters("SGDScheduleFree", lr=0.1),
    ),
    "adam_mini.Adam_mini": (
        "adam-mini",
        "adam_mini",
        lambda module, model: module.Adam_mini(model.named_parameters(), lr=0.01, verbose=False),
    ),
    "prodigyopt.Prodigy": ("prodigyopt", "prodigyopt", by_parameters("Prodigy")),
    "lion_pytorch.Lion": ("lion-pytorch", "lion_pytorch", by_parameters("Lion", lr=1e-3)),
    "pytorch_optimizer.Lion": (
        "pytorch-optimizer",
        "pytorch_optimizer",
        by_parameters("Lion", lr=1e-3),
    ),
    "pytorch_optimizer.SOAP": (
        "pytorch-optimizer",
        "pytorch_optimizer",
        by_parameters("SOAP", lr=0.01),
    ),
    "pytorch_optimizer.Muon": (
        "pytorch-optimizer",
        "pytorch_optimizer",
        lambda module, model: module.Muon(muon_and_adam(model)),
    ),
    "pytorch_optimizer.Shampoo": (
        "pytorch-optimizer",
        "pytorch_optimizer",
        by_parameters("Shampoo", lr=0.01),
    ),
    "bitsandbytes.optim.AdamW8bit": (
        "bitsandbytes",
        "bitsandbytes.optim",
        by_parameters("AdamW8bit", lr=0.01),
    ),
    "heavyball.AdamW": ("heavyball", "heavyball", by_parameters("AdamW", lr=0.01)),
    "heavyball.SOAP": ("heavyball", "heavyball", by_parameters("SOAP", lr=0.01)),
    "heavyball.Muon": ("heavyball", "heavyball", by_parameters("Muon", lr=0.01)),
}
"""By name: the package on the registry, the module, and the constructor."""


def network() -> nn.Sequential:
    """Four layers, the same weights everywhere; hidden ones are large enough for 8-bit state."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(2) for layer in (nn.Tanh(), nn.Linear(64, 64))]
    return nn.Sequential(nn.Linear(16, 64), *hidden, nn.Tanh(), nn.Linear(64, 4))


def train(
    make: Make, module: Any, strategy: str | None, rank: int
) -> tuple[list[torch.Tensor], bool]:
    """Weights after some steps, and whether all workers have the same."""
    model = network()
    optimizer: Any = make(module, model)
    whole: Any = model
    if strategy is None:
        whole = nn.parallel.DistributedDataParallel(model)
    else:
        wingbeat.distribute(model, optimizer, baselines.parse(strategy))
    try:
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        for step in range(STEPS):
            numbers = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(8, 16, generator=numbers)
            answers = torch.randint(0, 4, (8,), generator=numbers)
            optimizer.zero_grad()
            nn.functional.cross_entropy(whole(x), answers).backward()
            optimizer.step()
        if strategy is not None:
            wingbeat.synchronize(model)
        weights = [p.detach().clone() for p in model.parameters()]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, [w.flatten().tolist() for w in weights])
    finally:
        if strategy is not None:
            wingbeat.release(model, optimizer)
    return weights, all(each == found[0] for each in found)


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def tried(make: Make, module: Any, rank: int) -> dict[str, Any]:
    """The results of each strategy with one optimizer."""
    start = [p.detach().clone() for p in network().parameters()]
    try:
        theirs, same = train(make, module, None, rank)
    except Exception as error:
        return {"ddp": {"error": f"{type(error).__name__}: {first_line(error)}"}}
    out: dict[str, Any] = {"ddp": {"same_everywhere": same, "moved": difference(theirs, start)}}
    for strategy in STRATEGIES:
        try:
            ours, same = train(make, module, strategy, rank)
        except WingbeatError as error:
            out[strategy] = {"refused": first_line(error)}
            continue
        except Exception as error:
            out[strategy] = {"error": f"{type(error).__name__}: {first_line(error)}"}
            continue
        out[strategy] = {"difference": difference(ours, theirs), "same_everywhere": same}
    return out


def try_all(path: Path, names: list[str]) -> None:
    """Run as one of the workers; rank 0 writes the results."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wingbeat.init(timeout=60.0)
    rank = dist.get_rank()
    rows: list[dict[str, Any]] = []
    for name in names:
        package, where, make = OPTIMIZERS[name]
        row: dict[str, Any] = {"optimizer": name, "package": package}
        try:
            module = importlib.import_module(where)
            row["version"] = importlib.metadata.version(package)
        except Exception as error:
            row["skipped"] = f"{type(error).__name__}: {first_line(error)}"
        else:
            if where == "heavyball":
                module.utils.compile_mode = None  # compiling takes minutes
            row["strategies"] = tried(make, module, rank)
        rows.append(row)
        if rank == 0:
            print(progress(row), file=sys.stderr, flush=True)
            path.write_text(json.dumps(rows), encoding="utf-8")
    wingbeat.shutdown()


def verdict(strategy: str, found: dict[str, Any]) -> str:
    """A table's cell."""
    if "error" in found:
        return "fails"
    if "refused" in found:
        return "refused"
    if not found.get("same_everywhere", True):
        return "WORKERS DIFFER"
    if strategy in AVERAGED:
        return "trains"
    return "=" if found["difference"] == 0 else f"{found['difference']:.0e}"


def progress(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['optimizer']:34} skipped: {row['skipped']}"
    found = row["strategies"]
    if "error" in found["ddp"]:
        return f"{row['optimizer']:34} fails under DDP: {found['ddp']['error']}"
    return f"{row['optimizer']:34} " + "  ".join(
        f"{strategy}: {verdict(strategy, found[strategy])}" for strategy in STRATEGIES
    )


_DIVIDED = re.compile(r"cannot be divided among the \w+: (.*); [^;]*$")
"""The reason in a refusal to divide an optimizer's work."""


def table(rows: list[dict[str, Any]]) -> Printed:
    """Return the results of each strategy with each optimizer for printing, with the reasons."""
    cells: list[list[str]] = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row['optimizer']} ({row['package']} {row.get('version', 'not installed')})"
        found = row.get("strategies", {})
        if "ddp" not in found or "error" in found["ddp"]:
            said = row.get("skipped") or f"fails under DDP: {found['ddp']['error']}"
            cells.append([name, *("" for _ in STRATEGIES)])
            reasons.setdefault(said, []).append(row["optimizer"])
            continue
        cells.append([name, *(verdict(strategy, found[strategy]) for strategy in STRATEGIES)])
        for strategy in STRATEGIES:
            said = found[strategy].get("refused") or found[strategy].get("error")
            if said:
                divided = _DIVIDED.search(said)
                who = reasons.setdefault(divided.group(1) if divided else said, [])
                who += [name for name in [row["optimizer"]] if name not in who]
    notes = [f"{'; '.join(who)}: `{said}`" for said, who in reasons.items()]
    return Printed.of(
        "optimizers beside DDP, two workers", ["optimizer", *STRATEGIES], cells, notes
    )


# -- workers --------------------------------------------------------------------------------


def run(size: int, words: list[str]) -> list[dict[str, Any]]:
    """Start workers of this program on this machine; return rank 0's results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.json"
        command = [sys.executable, __file__, "--worker", str(path), *words]
        place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        workers = [
            subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)})
            for rank in range(size)
        ]
        try:
            codes = [worker.wait(PATIENCE) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            sys.exit(f"optimizers.py: a worker has ended with {codes}")
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optimizers", nargs="*", default=[], help="which (default: all)")
    parser.add_argument("--json", type=Path, help="keep what was found here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.optimizers or list(OPTIMIZERS)
    unknown = [name for name in names if name not in OPTIMIZERS]
    if unknown:
        parser.error(f"--optimizers {unknown[0]}: allowed are {', '.join(OPTIMIZERS)}")
    if options.worker:
        try_all(options.worker, names)
        return 0
    end_as_by_ctrl_c()  # ends the workers as well
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    report["results"] = run(2, ["--optimizers", *names])
    show(report, table(report["results"]))
    if options.json:
        write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
