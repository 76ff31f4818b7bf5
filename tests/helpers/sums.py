"""A model whose gradients do not depend on its weights and are whole numbers.

So plain SGD ends, once all is sent, with the sum of all gradients to the last bit, whatever came
when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import wingbeat
import wingbeat_lab

SIZE = 4
TINY_MB = 0.0001
SHAPES = {"a": (5, 3), "b": (7,), "c": (), "d": (4, 2)}


class Sums(nn.Module):
    """The sum of its parameters' products with given numbers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        products = [(getattr(self, name) * numbers).sum() for name, numbers in given.items()]
        return torch.stack(products).sum()


def given(step: int, rank: int, used: Sequence[str] = tuple(SHAPES)) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(100 * step + rank)
    each = {name: torch.randint(-9, 10, shape, generator=rng) for name, shape in SHAPES.items()}
    return {name: each[name].float() for name in used}


NOTHING = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def made(world: Any, strategy: Any = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = Sums(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    strategy = wingbeat_lab.Ako(mb=TINY_MB, first_mb=TINY_MB) if strategy is None else strategy
    return wingbeat.distribute(model, optimizer, strategy, world=world)


def step(model: Any, optimizer: Any, numbers: dict[str, Tensor]) -> None:
    optimizer.zero_grad()
    model(numbers).backward()
    optimizer.step()


def drain(model: Any, optimizer: Any, iterations: int = SIZE) -> None:
    for _ in range(iterations):
        step(model, optimizer, NOTHING)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_on(each: Sequence[dict[str, Tensor]], size: int = SIZE) -> dict[str, Tensor]:
    """The weights of one process that has seen all this."""
    found = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for numbers in each:
        for name, gradient in numbers.items():
            found[name] -= 0.5 * gradient / size
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, want in wanted.items():
        assert torch.equal(found[name].float(), want), name
