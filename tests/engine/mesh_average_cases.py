"""What workers run in `test_mesh_averages`: models that are averaged between replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import batch, net, replicas, sharded, train, weights
from torch import nn

import wingbeat
from wingbeat.strategies import parse


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def put(model: nn.Module, values: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


class OneProcess:
    """Replicas of two ranks each in one process, averaged every ``every`` steps.

    With an outer optimizer of this learning rate and momentum; an average is adopted ``delay``
    steps late.
    """

    def __init__(
        self, count: int, every: int, lr: float = 1.0, momentum: float = 0.0, delay: int = 0
    ) -> None:
        self.models = [net() for _ in range(count)]
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in self.models
        ]
        self.every, self.lr, self.momentum, self.delay = every, lr, momentum, delay
        self.shared, self.velocity = flat(self.models[0]), torch.zeros_like(flat(self.models[0]))
        self.sent: list[torch.Tensor] = []

    def step(self, step: int) -> None:
        for number, model in enumerate(self.models):
            model.zero_grad()
            for part in range(2):
                x, y = batch(step, 2 * number + part)
                (F.mse_loss(model(x), y) / 2).backward()
        if self.sent and (step + 1 - self.delay) % self.every == 0:
            self.adopt()
        for optimizer in self.optimizers:
            optimizer.step()
        if (step + 1) % self.every == 0:
            self.sent = [flat(model) for model in self.models]
            if not self.delay:
                self.adopt()

    def adopt(self) -> None:
        gradient = self.shared - torch.stack(self.sent).mean(0)
        self.velocity.mul_(self.momentum).add_(gradient)
        self.shared.sub_(self.lr * (gradient + self.momentum * self.velocity))
        for model, sent in zip(self.models, self.sent, strict=True):
            put(model, self.shared + flat(model) - sent)
        self.sent = []


def compared_with_one_process(strategy: str, steps: int, options: dict[str, Any]) -> list[float]:
    """Relative differences of weights to the process above, before and after a synchronization."""
    wingbeat.init(timeout=60)
    try:
        mesh = replicas()
        one = OneProcess(mesh.shape[0], **options)
        model: Any = sharded(net(), mesh["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
        for step in range(steps):
            one.step(step)
        train(model, optimizer, range(steps))
        found = []
        theirs = flat(one.models[dist.get_rank() // 2]).double()
        found.append(float((theirs - weights(model)).norm() / theirs.norm()))
        wingbeat.synchronize(model)
        if one.sent:
            one.adopt()
        theirs = torch.stack([flat(m).double() for m in one.models]).mean(0)
        found.append(float((theirs - weights(model)).norm() / theirs.norm()))
        wingbeat.release(model, optimizer)
        return found
    finally:
        wingbeat.shutdown()
