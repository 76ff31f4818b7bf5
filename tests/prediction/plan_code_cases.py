"""What workers run in `test_plan_candidates`: the code that a plan prints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import wingbeat
from wingbeat.engine.upgrade import engine_of


def train_by(code: str) -> tuple[str, int, float]:
    """Run ``code`` on a small model, and train four steps.

    Returns:
        The strategy, the number of ranks that divide the model, and how far a weight has moved.
    """
    torch.manual_seed(0)
    made: dict[str, Any] = {"model": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))}
    exec(code, made)
    try:
        model, optimizer = made["model"], made["optimizer"]
        weight = model[0].weight
        before = weight.to_local().clone()
        for step in range(4):
            torch.manual_seed(made["world"].size * step + made["world"].rank)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
        wingbeat.synchronize(model)
        moved = float((weight.to_local() - before).abs().sum())
        return repr(engine_of(model).strategy), weight.device_mesh.size(), moved
    finally:
        wingbeat.shutdown()
