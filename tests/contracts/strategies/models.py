"""Small models and the usual training loop, shared by the scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .sides import Side

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def mlp(width: int = 8, hidden: int = 24, classes: int = 3) -> nn.Sequential:
    """Three linear layers; smooth, so that rounding is never amplified."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.Tanh(),
        nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()),
        nn.Linear(hidden, classes),
    )


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """SGD with momentum and weight decay over everything that is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=lr, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    """AdamW over everything that is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.05)


def cross_entropy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of most scenarios."""
    return F.cross_entropy(model(x).float(), y)


def train(
    side: Side,
    model: Any,
    optimizer: Any,
    steps: Iterable[int] = range(6),
    loss_of: Loss = cross_entropy,
    rows: int = 4,
) -> None:
    """The loop every user writes; notes the loss of each iteration."""
    for step in steps:
        x, y = side.batch(step, rows)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        if not side.sees_everything:  # else it is the loss of another batch
            side.note(f"loss {step}", loss)


def evaluation(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """What an optimizer's ``step`` takes to evaluate the loss by itself."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        return loss

    return closure


def note_parameters(side: Side, model: Any, what: str) -> None:
    """Note every parameter as the user reads it now."""
    for name, value in side.bare(model).named_parameters():
        side.note(f"{what}: {name}", value)


def note_gradients(side: Side, model: Any, what: str) -> None:
    """Note every gradient as the user reads it now; a missing one as NaN."""
    for name, value in side.bare(model).named_parameters():
        side.note(f"{what}: {name}", float("nan") if value.grad is None else value.grad)
