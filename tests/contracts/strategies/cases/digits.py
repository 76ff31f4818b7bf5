"""Fifty steps of a small convolutional network on scikit-learn's handwritten digits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..registry import LARGE, TINY, Grid, add
from ..sides import Side

STEPS, ROWS = 50, 16
BUCKETS = (TINY * 10, LARGE)


@functools.cache
def _data() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    return images, torch.tensor(digits.target)


class DigitsNet(nn.Module):
    """Two convolutions, a dropout-free head; 8 x 8 images in, ten classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(16 * 16, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


def _fifty_steps(make: Callable[[Any], Any]) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        images, labels = _data()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(3))
        model: Any = DigitsNet()
        model, optimizer = side.setup(model, make(model))
        losses: list[float] = []
        for step in range(STEPS):
            start = (step * side.size + side.rank) * ROWS
            chosen = order[torch.arange(start, start + ROWS) % len(order)]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
        assert last < 0.7 * first, f"the network does not learn: loss {first:.2f} to {last:.2f}"

    return play


def _sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def _adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


for _make in (_sgd, _adamw):
    # The weights are the promise; Adam's second moments are squares, so their relative
    # rounding is twice that of the gradients and is not held to the same line.
    add(
        _fifty_steps(_make),
        f"digits{_make.__name__}",
        Grid(worlds=(2, 4), mbs=BUCKETS),
        state_of="every" if _make is _sgd else None,
    )
