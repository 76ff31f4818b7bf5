"""What a process of `test_elastic_training` runs: train, and write a line for each step."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import wingbeat
from wingbeat.engine.upgrade import engine_of
from wingbeat.strategies import parse

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def net(seed: int, *, norm: bool) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 64)]
    if norm:
        layers.append(torch.nn.BatchNorm1d(64))
    for _ in range(4):
        layers += [torch.nn.Tanh(), torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(64, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=generator)
    return x, x[:, :4].sin()


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main(folder: Path, row: str, optimizer_name: str, life: int, pace: float, norm: int) -> None:
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=8)
    model = net(world.rank + 7 * life, norm=bool(norm))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    wingbeat.distribute(model, optimizer, parse(row))
    engine: Any = engine_of(model)
    progress = engine.recovery.progress
    out = (folder / f"log-{world.rank}-{life}").open("w", buffering=1)
    stop = folder / "stop"
    while True:
        step = progress.steps
        if stop.exists() and step >= int(stop.read_text()):
            break
        x, y = batch(step, world.rank)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        time.sleep(pace)
        loss.backward()
        time.sleep(pace)
        members = list(engine.world.ranks)
        optimizer.step()
        line = {
            "step": step, "applied": not engine.dropped, "members": members, "at": time.time(),
            "returned": world.returned,
        }  # fmt: skip
        if row.startswith("allreduce"):
            line["weights"] = digest(model)
        print(json.dumps(line), file=out)
    wingbeat.synchronize(model)
    print(json.dumps({"end": digest(model), "step": progress.steps}), file=out)
    out.close()
    wingbeat.shutdown()


if __name__ == "__main__":
    folder, row, optimizer_name, life, pace, norm = sys.argv[1:]
    main(Path(folder), row, optimizer_name, int(life), float(pace), int(norm))
