"""Small trainings on worlds that are threads of this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import wingbeat
from wingbeat.engine.engine import Engine
from wingbeat.engine.upgrade import engine_of
from wingbeat.transport import loopback
from wingbeat.transport.world import World

T = TypeVar("T")
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

Body = Callable[[Any, Any, int], None]
"""What a rank does with its model and its optimizer."""

TINY_MB = 0.0004
"""One parameter or so a bucket."""


class Net(nn.Module):
    """Layers of uneven sizes, a scalar parameter, and a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.second = nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.spare = nn.Linear(7, 7)
        self.head = nn.Linear(7, 3)
        self.use_spare = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        if self.use_spare:
            x = torch.tanh(self.spare(x))
        out: Tensor = self.head(x)
        return out


def net(seed: int = 0) -> Any:
    """A `Net` with the weights of ``seed``; threads share torch's own generator."""
    made = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.5)
    return made


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, amsgrad=True)


def distributed(
    world: World, make: Make = adamw, model: Any = None, **options: Any
) -> tuple[Any, Any]:
    """A model and an optimizer under ``DeAR(shard_optimizer=True)``, unless told otherwise."""
    model = net() if model is None else model
    chosen = {"plan": "fixed", "mb": TINY_MB, "shard_optimizer": True} | options
    strategy = wingbeat.DeAR(**chosen)
    return wingbeat.distribute(model, make(model.parameters()), strategy, world=world)


def engine(target: Any) -> Any:
    """The engine behind a distributed model or optimizer."""
    found: Engine | None = engine_of(target)
    assert found is not None
    return found


def batch(step: int, rank: int) -> Tensor:
    """Rank ``rank``'s inputs of iteration ``step``."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: Any, rank: int, step: int) -> None:
    model(batch(step, rank)).square().mean().backward()


def train(model: Any, optimizer: Any, steps: Iterable[int], rank: int | None = None) -> None:
    """The loop every user writes, on this rank's batches."""
    rank = engine(model).world.rank if rank is None else rank
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def state_of(optimizer: Any) -> dict[str, Any]:
    """A copy of the whole state dict."""
    found: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    return found


def assert_same(a: Any, b: Any, tolerance: float = 0.0) -> None:
    """Compare nested dicts, lists and tensors; bit for bit without a ``tolerance``."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{set(a)} is not {set(b)}"
        for key in a:
            assert_same(a[key], b[key], tolerance)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y, tolerance)
    elif isinstance(a, Tensor):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if tolerance:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(a, b), f"differs by {(a - b).abs().max()}"
    else:
        assert a == b


def on(size: int, body: Callable[[World], T], timeout: float = 20.0) -> list[T]:
    """Run ``body`` on every rank of a world of ``size``; its results by rank."""
    worlds = loopback.worlds(size, timeout=timeout)
    try:
        return loopback.run(worlds, body)
    finally:
        for world in worlds:
            world.close()


def outcome(world: Any, make: Make, sharded: bool, body: Body, **options: Any) -> Any:
    """Train with and without shards; return the weights and the whole state."""
    model, optimizer = distributed(world, make, shard_optimizer=sharded, **options)
    body(model, optimizer, world.rank)
    result = weights(model), state_of(optimizer)
    wingbeat.release(model, optimizer)
    return result


def compare(size: int, make: Make, body: Body, tolerance: float = 0.0, **options: Any) -> None:
    """Train with and without shards; demand the same weights and state, down to the bits."""
    want = on(size, lambda world: outcome(world, make, False, body, **options))
    got = on(size, lambda world: outcome(world, make, True, body, **options))
    for rank in range(size):
        assert_same(got[rank], want[rank], tolerance)
