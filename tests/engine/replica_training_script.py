"""What a process of `test_replica_training` runs: train until a file says to stop."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mesh_cases
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import wingbeat
from wingbeat.engine.upgrade import engine_of
from wingbeat.strategies import parse


def put(path: Path, value: Any) -> None:
    part = path.with_suffix(".new")
    part.write_text(json.dumps(value))
    part.rename(path)


def main(folder: Path, row: str) -> None:
    world = wingbeat.init(timeout=100)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    model: Any = mesh_cases.sharded(mesh_cases.net(seed=world.rank // 2 + 7 * int(life)), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wingbeat.distribute(model, optimizer, parse(row), mesh=mesh)
    update: Any = engine_of(model).update  # type: ignore[union-attr]
    begun, said, stop = int(update.steps), False, torch.zeros(1)
    while not stop.item():
        x, y = mesh_cases.batch(int(update.steps), world.rank)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if not said and update.steps >= begun + 10:
            said = True
            report = {"pid": os.getpid(), "returned": world.returned, "steps": begun}
            put(folder / f"{life}-{world.rank}", report)
        stop.fill_((folder / "stop").exists())
        dist.all_reduce(stop)
    wingbeat.synchronize(model)
    ours = [getattr(p, "_local_tensor", p).detach().flatten().tolist() for p in model.parameters()]
    put(folder / f"end-{world.rank}", ours)
    wingbeat.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
