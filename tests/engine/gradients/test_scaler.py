"""A GradScaler finds what it needs in each worker's own blocks, without whole gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.failing import FailsInBackward
from wingbeat.errors import UsageError
from wingbeat.schedules import Dear
from wingbeat.transport import loopback


def _train(rank: int, world: Any, optimizer: str, bad_rank: int | None) -> tuple[Any, float, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    fused = {"fused": True} if optimizer == "fused" else {}
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, **fused)
    strategy = wingbeat.DeAR(plan="fixed", mb=1e-4)
    model, adam = wingbeat.distribute(model, adam, strategy, world=world)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    skipped = 0
    for step in range(4):
        adam.zero_grad()
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(data).square().mean()
        if step == 2 and rank == bad_rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(adam)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    weights = [p.detach().clone() for p in model.parameters()]
    wingbeat.release(model, adam)
    return weights, scaler.get_scale(), skipped


@pytest.mark.parametrize("bad_rank", [None, 0, 2])
def test_all_workers_skip_the_same_steps(bad_rank: int | None) -> None:
    results = loopback.run(
        loopback.worlds(3), lambda world: _train(world.rank, world, "adamw", bad_rank)
    )
    for weights, scale, skipped in results[1:]:
        assert scale == results[0][1]
        assert skipped == results[0][2] == (bad_rank is not None)
        for a, b in zip(weights, results[0][0], strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_infinite_element_reaches_all_workers(value: float) -> None:
    """It is in the reduced block of one worker only, and the others have nothing to see."""

    def body(world: Any) -> tuple[list[torch.Tensor], list[float]]:
        model = nn.Linear(5, 4)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scales = []

        def keep(grad: torch.Tensor) -> torch.Tensor:
            return grad

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            grad[3, 4] = value
            return grad

        for step in range(4):
            optimizer.zero_grad()
            handle = model.weight.register_hook(spoil if world.rank == 1 and step == 2 else keep)
            scaler.scale(model(torch.full((2, 5), 1.0 + world.rank)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            handle.remove()
            scales.append(scaler.get_scale())
        return [p.detach().clone() for p in model.parameters()], scales

    results = loopback.run(loopback.worlds(3), body)
    for weights, scales in results:
        assert scales == [64.0, 64.0, 32.0, 32.0]
        for got, first in zip(weights, results[0][0], strict=True):
            assert got.isfinite().all()
            assert torch.equal(got, first)


# Only the first step shows that gradients are unscaled between backward and step.
@pytest.mark.parametrize(("optimizer", "gathers"), [("adamw", 1), ("fused", 4)])
def test_only_an_optimizer_that_unscales_by_itself_needs_whole_gradients(
    optimizer: str, gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Dear] = []
    gather = Dear._gather

    def counted(schedule: Dear) -> Any:
        seen.append(schedule)
        return gather(schedule)

    monkeypatch.setattr(Dear, "_gather", counted)
    loopback.run(loopback.worlds(2), lambda world: _train(world.rank, world, optimizer, None))
    assert list(Counter(map(id, seen)).values()) == [gathers, gathers]


def test_a_read_without_a_scaler_makes_gradients_whole() -> None:
    def body(world: Any) -> float:
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        model(torch.full((1, 4), float(world.rank))).sum().backward()
        (group,) = optimizer.param_groups
        return float(group["params"][0].grad.sum())

    assert loopback.run(loopback.worlds(2), body) == [2.0, 2.0]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_small_gradients_are_unscaled_where_they_have_room(wire: str) -> None:
    def body(world: Any) -> float:
        model = nn.Linear(50, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = wingbeat.DeAR(plan="fixed", compression=wire)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(model(torch.full((1, 50), 1e-8)).sum()).backward()
        scaler.step(optimizer)
        model.synchronize()
        return float(model.weight.detach().mean())

    for weight in loopback.run(loopback.worlds(2), body):
        assert weight == pytest.approx(-1e-8, rel=0.01)


@pytest.mark.parametrize("size", [2, 3])
def test_a_worker_without_batches_follows_those_that_scale(size: int) -> None:
    def body(world: Any) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed", mb=1e-4)
        model, adam = wingbeat.distribute(model, adam, strategy, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        with model.join():
            for step in range(1 + 2 * world.rank):
                adam.zero_grad()
                loss = model(torch.ones(2, 6) * (step + world.rank)).square().mean()
                scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
                scaler.step(adam)
                scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    first, *others = loopback.run(loopback.worlds(size), body)
    assert all(weight.isfinite().all() for weight in first)
    for weights in others:
        assert all(torch.equal(a, b) for a, b in zip(first, weights, strict=True))


def test_an_infinity_on_one_worker_skips_the_step_on_all() -> None:
    """After the sum it is in one worker's block only."""

    def body(world: Any) -> tuple[float, bool]:
        model = nn.Linear(9, 7, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        if world.rank == 1:
            spot = torch.zeros(7, 9)
            spot[0, 0] = float("inf")
            model.weight.register_hook(lambda grad: grad + spot)
        scaler.scale(model(torch.ones(2, 9)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        model.synchronize()
        return scaler.get_scale(), bool(model.weight.isfinite().all())

    assert loopback.run(loopback.worlds(3), body) == [(4.0, True)] * 3


@pytest.mark.parametrize("bad", [False, True])
def test_workers_without_a_block_of_their_own_take_part(bad: bool) -> None:
    """There are fewer elements than workers."""

    def body(world: Any) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):  # in the first it is learnt that parts are looked at
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).square().mean()
            scaler.scale(loss * float("inf") if bad and step else loss).backward()
            scaler.unscale_(optimizer)
            norm = optimizer.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            assert (bad and step) or float(norm) == pytest.approx([1.0, 0.9][step])
        model.synchronize()
        return scaler.get_scale(), model.weight.item()

    wanted = (4.0, pytest.approx(0.45)) if bad else (8.0, pytest.approx(0.4))
    assert loopback.run(loopback.worlds(3), body) == [wanted] * 3


class Unscales(torch.optim.SGD):
    """Says for all of its class that it unscales by itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        scale = getattr(self, "grad_scale", None)
        scales.append(None if scale is None else float(scale))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and scale is not None:
                    param.grad.div_(scale)
        if scale is not None:
            self.grad_scale = self.found_inf = None  # SGD's own step refuses them
        return super().step(closure)


scales: list[float | None] = []
"""What optimizers that unscale by themselves were told."""


def _run(size: int, body: Any) -> list[Any]:
    return loopback.run(loopback.worlds(size, timeout=5.0), body)


def _made(world: Any, make: Any = torch.optim.SGD) -> tuple[Any, Any]:
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(0.1 * (number + 1))
    optimizer = make(model.parameters(), lr=0.1)
    return wingbeat.distribute(model, optimizer, wingbeat.DeAR(plan="fixed", mb=1e-5), world=world)


def test_an_optimizer_whose_class_unscales_unscales_itself() -> None:
    def body(world: Any) -> torch.Tensor:
        model, optimizer = _made(world, Unscales)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found: torch.Tensor = model[0].weight.detach().clone()
        return found

    scales.clear()
    first, second = _run(2, body)
    assert torch.equal(first, second)
    assert scales[-4:] == [64.0] * 4, "the scaler has unscaled in its place"


def test_groups_without_a_scaler_have_whole_gradients_again() -> None:
    def body(world: Any) -> list[str]:
        model, optimizer = _made(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            (scaler.scale(loss) if step < 2 else loss).backward()
            seen.append(type(optimizer.param_groups[0]["params"][0].grad).__name__)
            if step < 2:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        return seen

    whole, pending = "Tensor", "PendingGradient"
    assert _run(2, body) == [[whole, pending, pending, whole, whole]] * 2


def test_a_rank_with_a_removed_gradient_takes_part_in_unscaling() -> None:
    def body(world: Any) -> list[float]:
        model, optimizer = _made(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            if step and world.rank:
                model[0].bias.grad = None
            scaler.step(optimizer)
            scaler.update()
        found: list[float] = model[1].weight.detach().flatten().tolist()
        return found

    first, second = _run(2, body)
    assert len(first) == len(second), "nobody has waited in vain"


def test_gradients_of_a_backward_that_failed_are_not_unscaled() -> None:
    def body(world: Any) -> None:
        model, optimizer = _made(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        loss = scaler.scale(model[1](FailsInBackward.apply(model[0](torch.ones(2, 4)))).sum())
        with pytest.raises(ArithmeticError):
            loss.backward()
        with pytest.raises((UsageError, AssertionError)):
            scaler.step(optimizer)

    _run(2, body)
