"""A script as a user writes it, in which something happens on one rank."""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import wingbeat
from wingbeat.transport import on_terminate

options = argparse.ArgumentParser()
options.add_argument("strategy")
options.add_argument("--event", default="")
options.add_argument("--rank", type=int, default=1)
options.add_argument("--save", default="")
options.add_argument("--grace", type=float, default=25.0)
options.add_argument("--steps", type=int, default=2000)
options.add_argument("--loader", default="")
options.add_argument("--files", type=int, default=0)
asked = options.parse_args()


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(8), torch.ones(2)


def loaded(method: str) -> Iterator[Any]:
    return iter(
        torch.utils.data.DataLoader(
            Samples(), 8, num_workers=2, persistent_workers=True, multiprocessing_context=method
        )
    )


def happen(event: str) -> None:
    match event:
        case "loader":
            raise ValueError("bad sample")
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(7)
        case "crash":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), 9)
        case "hang":
            time.sleep(1000)
        case "child":
            subprocess.run([sys.executable, "-c", "print('child')"], check=True)
            if os.fork() == 0:
                sys.exit(5)
            os.wait()


class Training:
    """The model and what happens to it; ``event`` is that of this rank."""

    def __init__(self) -> None:
        if asked.files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (asked.files, asked.files))
        method, _, moment = asked.loader.partition(":")
        self.batches = loaded(method) if moment == "before" else None
        self.event = asked.event if wingbeat.init(timeout=60).rank == asked.rank else ""
        if self.event == "setup":
            raise ValueError("bad setup")
        if self.event == "killed-in-setup":
            os.kill(os.getpid(), 9)
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        self.model: Any = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        strategy = eval(f"wingbeat.{asked.strategy}")
        wingbeat.distribute(self.model, self.optimizer, strategy)
        self.step = 0
        if asked.save:
            on_terminate(self.save, grace=asked.grace)
        if self.event == "hook":
            self.model[0].weight.register_hook(self.hook)
        if moment == "after":
            self.batches = loaded(method)

    def save(self) -> None:
        if asked.save == "raises":
            raise OSError("no space left on device")
        if asked.save == "hangs":
            time.sleep(1000)
        wingbeat.synchronize(self.model)
        print(f"saved {self.step}")

    def hook(self, _: torch.Tensor) -> None:
        if self.step == 5:
            raise ValueError("bad gradient")

    def train(self) -> None:
        event = ""
        for self.step in range(asked.steps):
            if self.step == 5:
                print("trains")
                event = self.event
                happen(event)
            x, y = next(self.batches) if self.batches else (torch.randn(8, 8), torch.ones(8, 2))
            time.sleep(0.01)
            self.optimizer.zero_grad()
            output = self.model(x[:, : 7 if event == "forward" else 8])
            if event == "loss":
                raise ValueError("bad loss")
            (output - y).square().mean().backward()
            if event == "step":
                self.optimizer.param_groups[0]["lr"] = "large"
            self.optimizer.step()
        wingbeat.synchronize(self.model)
        print("done")


if __name__ == "__main__":
    Training().train()
