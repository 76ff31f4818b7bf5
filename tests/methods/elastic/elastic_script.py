"""What a process of `test_elastic_training` runs: train, and write a line for each step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
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
PLACES = ("forward", "backward", "after backward", "between")


def net(seed: int, *, norm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 64)]
    if norm:
        layers.append(torch.nn.BatchNorm1d(64))
    for _ in range(4):
        layers += [torch.nn.Tanh(), torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(64, 4)).double()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=generator).double()
    return x, x[:, :4].sin()


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().numpy().tobytes())
    return found.hexdigest()[:16]


class Fault:
    """Kills this process in a step, at a place in it."""

    def __init__(self, step: int, place: str, model: torch.nn.Sequential) -> None:
        self._step, self._place, self._at = step, place, -1
        middle: Any = next(each for each in model[len(model) // 2 :] if list(each.parameters()))
        middle.register_forward_hook(lambda *_: self.reach("forward"))
        middle.weight.register_hook(lambda _: self.reach("backward"))

    def begin(self, step: int) -> None:
        self._at = step

    def reach(self, place: str) -> None:
        if (self._at, self._place) == (self._step, place):
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=options["timeout"])
    row, life, pace = options["row"], options["life"], options["pace"]
    model = net(world.rank + 7 * life, norm=options["norm"])
    optimizer = OPTIMIZERS[options["optimizer"]](model.parameters())
    fault = Fault(*options["fault"], model)
    wingbeat.distribute(model, optimizer, parse(row))
    engine: Any = engine_of(model)
    stop = folder / "stop"
    with (folder / f"log-{world.rank}-{life}").open("w", buffering=1) as out:
        while True:
            step = wingbeat.steps_made(model)
            if stop.exists() and step >= int(stop.read_text()):
                break
            fault.begin(step)
            x, y = batch(step, world.rank)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            time.sleep(pace)
            fault.reach("after backward")
            world_before = engine.world
            optimizer.step()
            line = {
                "step": step,
                "applied": not engine.dropped,
                "members": list(world_before.ranks),
            }
            line |= {"at": time.time(), "loss": float(loss.detach()), "returned": world.returned}
            if row.startswith("allreduce"):
                line["weights"] = digest(model)
            # Others may have been admitted, or this process again, with other weights.
            same = engine.world is world_before and wingbeat.steps_made(model) == step + 1
            line["same_members"] = same
            print(json.dumps(line), file=out)
            fault.reach("between")
        wingbeat.synchronize(model)
        values = [param.detach().flatten().tolist() for param in model.parameters()]
        buffers = [buffer.flatten().tolist() for buffer in model.buffers()]
        end = {
            "end": digest(model),
            "step": wingbeat.steps_made(model),
            "values": values,
            "buffers": buffers,
        }
        print(json.dumps(end), file=out)
    wingbeat.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
