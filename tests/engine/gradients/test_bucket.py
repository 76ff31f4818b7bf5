"""A bucket's memory: taken once, and again only where somebody keeps old gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import backward, batch, engine, net, on, sgd
from wingbeat.engine.gradients.bucket import Bucket, Slot, _factor, fill
from wingbeat.transport.world import World

STRATEGIES = {
    "allreduce": wingbeat.AllReduce(mb=0.0004),
    "dear": wingbeat.DeAR(plan="fixed", mb=0.0004),
    "dear-sharded": wingbeat.DeAR(plan="fixed", mb=0.0004, shard_optimizer=True),
    "dear-bf16": wingbeat.DeAR(plan="fixed", mb=0.0004, compression="bf16"),
}


def _places(model: Any) -> list[int]:
    return [bucket.flat.data_ptr() for bucket in engine(model).buckets]


KEEPING = [(name, True) for name in STRATEGIES if name != "dear-sharded"]
"""A divided step uses gradients up: reading them later is refused."""


@pytest.mark.parametrize(("name", "keep"), [*((n, False) for n in STRATEGIES), *KEEPING])
def test_buffers_are_reused_unless_gradients_are_referenced(name: str, keep: bool) -> None:
    def body(world: World) -> None:
        model = net()
        params = list(model.parameters())
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), STRATEGIES[name], world=world
        )
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        places: list[list[int]] = []
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().mean().backward()
            if keep:
                kept += [(p.grad, p.grad.clone()) for p in params if p.grad is not None]
            optimizer.step()
            places.append(_places(model))
        # The first backward shows the order of the gradients, and buckets are made by it once.
        assert (places[1] == places[2] == places[3] == places[4]) is not keep
        for grad, then in kept:
            assert torch.equal(grad, then), "a gradient that was kept has changed"
        wingbeat.release(model, optimizer)

    on(2, body)


@pytest.mark.parametrize("name", STRATEGIES)
def test_values_assigned_to_a_gradient_are_exchanged(name: str) -> None:
    """``p.grad.data = ...`` leaves the object in place, but takes its memory away."""

    def body(world: World) -> Any:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), STRATEGIES[name], world=world
        )
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            weight = model.head.weight
            weight.grad.data = torch.full((3, 7), 10.0)
            backward(model, world.rank, 50 + step)
            seen.append(weight.grad.clone())
            optimizer.zero_grad()
            backward(model, world.rank, 50 + step)
            seen[-1] -= weight.grad
        return seen

    for seen in on(2, body):
        for added in seen:
            torch.testing.assert_close(added, torch.full((3, 7), 10.0), rtol=0.0, atol=0.05)


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_after_release_have_their_own_memory(name: str) -> None:
    """One that is kept does not keep a whole bucket."""

    def body(world: World) -> None:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), STRATEGIES[name], world=world
        )
        backward(model, world.rank, 0)
        wingbeat.release(model, optimizer)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(grads) == 7
        for grad in grads:
            assert grad.untyped_storage().nbytes() == grad.nbytes

    on(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1 / 3, 0.1, 1 / 7, 1e-30])
def test_gradients_are_scaled_as_by_a_python_number(dtype: torch.dtype, scale: float) -> None:
    made = torch.randn(1001, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    param = torch.nn.Parameter(torch.zeros(1001, dtype=dtype))
    slot = Slot(0, "p", param)
    bucket = Bucket(0, [slot])
    for _ in range(2):  # into the view, and then in it
        grad = (made * 1e-6).to(dtype) if param.grad is None else slot.shown.clone()
        if param.grad is None:
            param.grad = grad.clone()
        fill([slot], scale)
        assert torch.equal(slot.view, grad * scale)
        param.grad = slot.shown
    assert bucket.flat.dtype is dtype


def test_scaling_under_a_mode_leaves_nothing_of_it_behind() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert type(_factor(0.123456, torch.float32, "cpu")) is torch.Tensor
    assert _factor(0.5, torch.float32, "cuda") == 0.5
