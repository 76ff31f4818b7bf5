"""Seeded random models: random sharing, freezing, order of use and branches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models import train
from ..registry import ALL, LARGE, TINY, Grid, add
from ..sides import Side

SEEDS = range(20)
WIDTH = 8


def _block(rng: random.Random) -> nn.Module:
    """One module from (rows, 8) to (rows, 8)."""
    kind = rng.choice(("linear", "thin", "norm", "deep", "conv", "scale"))
    if kind == "linear":
        return nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
    if kind == "thin":
        return nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, WIDTH))
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    if kind == "deep":
        return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))
    if kind == "conv":
        return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten(1))
    return Scale()


class Scale(nn.Module):
    """One number and one vector, used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.1))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


class RandomNet(nn.Module):
    """A random program over random blocks.

    Every instruction is ``(block, residual, who)``; ``who`` says in which iterations and on
    which ranks it runs, so that parameters go unused here, there or everywhere.
    """

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.blocks = nn.ModuleList(_block(rng) for _ in range(rng.randint(2, 7)))
        self.lent = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.head = nn.Linear(WIDTH, 3)
        self.rank, self.turn = rank, 0
        count = rng.randint(2, 9)
        self.program = [
            (rng.randrange(len(self.blocks)), rng.random() < 0.3, self._who(rng))
            for _ in range(count)
        ]
        self.borrow = rng.randrange(count) if rng.random() < 0.5 else -1
        self._share(rng)
        for p in self.blocks.parameters():
            if rng.random() < 0.1:
                p.requires_grad_(False)

    @staticmethod
    def _who(rng: random.Random) -> Callable[[int, int], bool]:
        period, phase = rng.randint(2, 4), rng.randint(0, 3)
        return rng.choice(
            (
                lambda turn, rank: True,
                lambda turn, rank: True,
                lambda turn, rank: (turn + phase) % period == 0,
                lambda turn, rank: (rank + phase) % period == 0,
                lambda turn, rank: (turn + rank + phase) % period == 0,
                lambda turn, rank: False,
            )
        )

    def _share(self, rng: random.Random) -> None:
        """Tie the weights of two equal layers, now and then."""
        linears = [m for m in self.blocks.modules() if isinstance(m, nn.Linear)]
        equal = [m for m in linears if m.weight.shape == (WIDTH, WIDTH)]
        if len(equal) > 1 and rng.random() < 0.6:
            one, other = rng.sample(equal, 2)
            one.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        for index, (block, residual, who) in enumerate(self.program):
            if index == self.borrow:
                x = torch.tanh(F.linear(x, self.lent))
            if who(self.turn, self.rank):
                y = torch.tanh(self.blocks[block](x))
                x = (x + y) / 2 if residual else y
        out: Tensor = self.head(x)
        return out


def _trained(seed: int) -> Callable[[Side], None]:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.double()), y)

    def play(side: Side) -> None:
        bare = RandomNet(seed, side.rank).double()
        trained = [p for p in bare.parameters() if p.requires_grad]
        random.Random(seed).shuffle(trained)
        optimizer: Any
        if seed % 2:
            optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)
        else:
            optimizer = torch.optim.AdamW(trained, lr=0.01)
        model, optimizer = side.setup(bare, optimizer)
        for step in range(7):
            bare.turn = step
            train(side, model, optimizer, [step], loss_of)

    return play


for _seed in SEEDS:
    _mb = random.Random(1000 + _seed).choice((TINY, 0.0007, 0.001, 0.002, LARGE))
    add(
        _trained(_seed),
        f"random_model_{_seed}",
        Grid(
            worlds=(2, 3) if _seed % 4 else (3, 4),
            strategies=(*ALL, ("allreduce-mesh", "dear-mesh", "dear-sharded-mesh")[_seed % 3]),
            mbs=(_mb,),
        ),
        tolerance=1e-9,
        floor=1e-6,
    )
