"""Servers that update by gradients that come through a cast or a codec."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from helpers.server_update import compare, distributed, momentum
from helpers.training import Make, adamw, backward, engine, on, train, weights
from wingbeat.wires import LowRank, Sketch

WIRES = {
    "bf16": "bf16",
    "fp16": "fp16",
    "sketch": Sketch(bits=2, auto_disable=False),
    "lowrank": LowRank(rank=1, auto_disable=False),
}


def steps(model: Any, optimizer: Any, rank: int) -> None:
    """In which all parameters are used: of others' residuals each keeps another part."""
    model.use_spare = True
    train(model, optimizer, range(6))


def looked_at(model: Any, optimizer: Any, rank: int) -> None:
    """Clipped, dropped, saved, loaded, and read on one rank alone."""
    model.use_spare = True
    for step in range(6):
        optimizer.zero_grad()
        backward(model, rank, step)
        if step == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step == 3:
            continue
        if step == 4:
            _ = next(model.parameters()).grad if rank else None
        optimizer.step()
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize(
    ("body", "pull", "make"),
    [(steps, "ready", adamw), (looked_at, "start", momentum())],
    ids=["steps", "looked_at"],
)
def test_compressed_server_update_equals_worker_update(
    body: Any, pull: str, make: Make, wire: Any
) -> None:
    """To the bit: the same is pushed and summed, and workers alone keep what gradients lack."""
    compare(2, make, body, compression=wire, back="dense", pull=pull)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_other_dtype_than_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    first = nn.Linear(9, 5).to(dtype)  # threads share torch's random numbers

    def outcome(world: Any, update: str) -> Any:
        model = copy.deepcopy(first)
        options = {"compression": WIRES["sketch"], "back": "dense", "update": update}
        model, optimizer = distributed(world, momentum(), model, **options)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + world.rank))
            model(x.to(dtype)).square().mean().backward()
            optimizer.step()
        return weights(model)

    want, got = (on(2, lambda world, u=u: outcome(world, u)) for u in ("worker", "server"))
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_small_updates_survive_gradient_rounding() -> None:
    """Parameters keep their own dtype at servers and on their way back."""

    def body(world: Any) -> Any:
        model = nn.Linear(8, 1, bias=False)
        nn.init.ones_(model.weight)
        options = {"compression": "bf16", "update": "server"}
        make = lambda params: torch.optim.SGD(params, lr=2.0**-14)  # noqa: E731
        model, optimizer = distributed(world, make, model, **options)
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        return weights(model)["weight"]

    for found in on(2, body):
        assert torch.equal(found, torch.full((1, 8), 1 - 16 * 2.0**-14)), "bf16 has no such numbers"


@pytest.mark.parametrize("back", ["wire", "dense"])
def test_gradients_are_compressed_and_parameters_are_not(back: str) -> None:
    """``back`` is of sums, and none comes back."""

    def body(world: Any) -> tuple[float, bool]:
        model = nn.Linear(200, 100)
        model, optimizer = distributed(world, model=model, compression=WIRES["sketch"], back=back)
        client = engine(model).runtime.exchange._client
        moved = []
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + world.rank))
            model(x).square().mean().backward()
            optimizer.step()
            model.synchronize()
            moved.append((sum(client.sent.values()), sum(client.received.values())))
        (a, b), (c, d) = moved[-2:]
        return (c - a) / (d - b), bool(engine(model).runtime.exchange._uncollected)

    for ratio, due in on(2, body):
        assert 1 / 17 < ratio < 1 / 13, "two bits for 32"
        assert not due, "servers keep nothing that would have to be asked for"
