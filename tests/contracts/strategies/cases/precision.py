"""Autocast, gradient scaling, low-precision and mixed parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import ALL, Grid, add, scenario
from ..sides import Side


def _scaled(
    make: Any, clip: bool, unscale: bool, bad: Callable[[int, int], bool]
) -> Callable[[Side], None]:
    """The loop of torch's GradScaler manual; ``bad(step, rank)`` makes that loss infinite."""

    def play(side: Side) -> None:
        model = mlp()
        model, optimizer = side.setup(model, make(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(8):
            x, y = side.batch(step)
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            if bad(step, side.rank):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                side.note("total norm", side.clip(model, optimizer, 0.05))
            scaler.step(optimizer)
            scaler.update()
            side.note("scale", scaler.get_scale())

    return play


def _never(step: int, rank: int) -> bool:
    return False


def _on_one_rank(step: int, rank: int) -> bool:
    return (step, rank) in {(0, 1), (3, 0), (4, 1)}


add(_scaled(sgd, False, False, _never), "scaler_sgd")
add(_scaled(adamw, False, False, _never), "scaler_adamw")
add(_scaled(adamw, True, True, _never), "scaler_unscale_clip_adamw")
add(_scaled(sgd, False, False, _on_one_rank), "scaler_inf_on_one_rank_sgd")
add(_scaled(adamw, False, True, _on_one_rank), "scaler_inf_on_one_rank_unscaled_adamw")


@scenario()
def scaler_inf_on_one_rank_with_torch_clip(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(6):
        x, y = side.batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        if _on_one_rank(step, side.rank):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        side.note("scale", scaler.get_scale())


@scenario()
def scaler_with_fused_optimizer(side: Side) -> None:
    """A fused optimizer unscales inside its own step."""
    model = mlp()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model, optimizer = side.setup(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(6):
        x, y = side.batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        if _on_one_rank(step, side.rank):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        side.note("scale", scaler.get_scale())


@scenario()
def scaler_with_accumulation(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad()
        with side.no_sync(model):
            scaler.scale(cross_entropy(model, *side.batch(10 * step))).backward()
        scaler.scale(cross_entropy(model, *side.batch(10 * step + 1))).backward()
        scaler.step(optimizer)
        scaler.update()


def _autocast(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    return nn.functional.cross_entropy(out.float(), y)


@scenario()
def autocast_sgd(side: Side) -> None:
    model = mlp()
    train(side, *side.setup(model, sgd(model)), range(8), _autocast)


@scenario()
def autocast_adamw(side: Side) -> None:
    model = mlp()
    train(side, *side.setup(model, adamw(model)), range(8), _autocast)


def _low(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x.bfloat16()).float(), y)


# bfloat16 keeps 8 bits: sums in another order differ by 2**-8 of a gradient, and weights by as
# much of themselves once a rounding falls the other way.
@scenario(tolerance=2e-2, floor=1e-2)
def bf16_parameters(side: Side) -> None:
    model = mlp().bfloat16()
    train(side, *side.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)), range(5), _low)


@scenario(tolerance=2e-2, floor=1e-2)
def bf16_parameters_with_momentum_and_clipping(side: Side) -> None:
    model = mlp().bfloat16()
    model, optimizer = side.setup(model, sgd(model, lr=0.05))
    for step in range(5):
        optimizer.zero_grad()
        _low(model, *side.batch(step)).backward()
        side.note("total norm", float(side.clip(model, optimizer, 0.2)))
        optimizer.step()


class Mixed(nn.Module):
    """Parameters of three dtypes in one model, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 16).double()
        self.c = nn.Linear(16, 16).bfloat16()
        self.d = nn.Linear(16, 16).double()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.b(x.double()))
        x = torch.tanh(self.c(x.bfloat16()))
        x = torch.tanh(self.d(x.double()))
        out: Tensor = self.head(x.float())
        return out


@scenario(tolerance=2e-2, floor=1e-2)
def three_dtypes_in_one_model(side: Side) -> None:
    model: Any = Mixed()
    model, optimizer = side.setup(model, sgd(model, lr=0.05))
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        side.note("total norm", float(side.clip(model, optimizer, 0.5)))
        optimizer.step()


def _double(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x.double()), y)


@scenario(Grid(strategies=ALL), tolerance=1e-12)  # codecs work in float32
def float64(side: Side) -> None:
    model = mlp().double()
    train(side, *side.setup(model, adamw(model)), range(8), _double)
