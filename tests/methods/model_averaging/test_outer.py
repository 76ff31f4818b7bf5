"""The outer optimizer against torch's own, on models that one process trains one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import (
    adamw,
    assert_same,
    backward,
    batch,
    engine,
    net,
    on,
    sgd,
    state_of,
    train,
    weights,
)
from wingbeat.errors import UsageError

STEPS, EVERY = 13, 4
MOMENTUM, LR = 0.9, 0.7


def diloco(**options: Any) -> wingbeat.Strategy:
    given = {"every": EVERY, "outer_lr": LR, "outer_momentum": MOMENTUM, "encrypted": False}
    return wingbeat.DiLoCo(**(given | options))


def made(world: Any, strategy: Any, make: Any = sgd, model: Any = None) -> tuple[Any, Any]:
    model = net() if model is None else model
    return wingbeat.distribute(model, make(model.parameters()), strategy, world=world)


def fragments_of(model: Any) -> list[list[str]]:
    """The names of the parameters that are averaged at the same time."""
    update = engine(model).runtime.update
    names = {id(param): name for name, param in model.named_parameters()}
    return [[names[id(param)] for param in part] for part in update._model._fragments]


@dataclass
class Plain:
    """DiLoCo as its papers have it: ``size`` models in one place, and torch's SGD outside."""

    size: int
    make: Any
    fragments: list[list[str]]
    delay: int

    def __post_init__(self) -> None:
        self.models = [net() for _ in range(self.size)]
        self.inner = [self.make(model.parameters()) for model in self.models]
        self.shared = {n: nn.Parameter(p.detach().clone()) for n, p in self.now(0).items()}
        self.outer = [
            torch.optim.SGD(
                [self.shared[name] for name in part], lr=LR, momentum=MOMENTUM, nesterov=True
            )
            for part in self.fragments
        ]
        self.sent: dict[str, list[Tensor]] = {}
        self.begun = 0

    def now(self, rank: int) -> dict[str, Tensor]:
        return dict(self.models[rank].named_parameters())

    def train(self) -> None:
        for step in range(STEPS):
            count = step + 1
            turns = [
                number
                for number in range(len(self.fragments))
                if math.floor(number * EVERY / len(self.fragments)) == count % EVERY
            ]
            for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
                inner.zero_grad()
                backward(model, rank, step)
            if turns or count - self.begun >= self.delay:
                self.adopt()
            for inner in self.inner:
                inner.step()
            if turns:
                self.average(turns)
                self.begun = count
                if not self.delay:
                    self.adopt()

    def average(self, turns: list[int]) -> None:
        for number in turns:
            for name in self.fragments[number]:
                own = [self.now(rank)[name].detach().clone() for rank in range(self.size)]
                shared = self.shared[name]
                shared.grad = torch.stack([shared.detach() - each for each in own]).mean(0)
                self.sent[name] = own
            self.outer[number].step()

    @torch.no_grad()
    def adopt(self) -> None:
        for name, sent in self.sent.items():
            for rank, before in enumerate(sent):
                self.now(rank)[name].add_(self.shared[name] - before)
        self.sent.clear()


@pytest.mark.parametrize(
    ("size", "make", "options"),
    [
        (2, sgd, {}),
        (3, adamw, {}),
        (2, adamw, {"fragments": 3}),
        (3, sgd, {"delay": 2}),
        (2, sgd, {"fragments": 3, "delay": 1}),
    ],
)
def test_outer_step_equals_torch_nesterov_on_the_mean_difference(
    size: int, make: Any, options: dict[str, int]
) -> None:
    def body(world: Any) -> tuple[dict[str, Tensor], list[list[str]]]:
        model, optimizer = made(world, diloco(**options), make)
        train(model, optimizer, range(STEPS))
        return weights(model), fragments_of(model)

    found = on(size, body, timeout=60)
    fragments = found[0][1]
    assert len(fragments) == options.get("fragments", 1)
    plain = Plain(size, make, fragments, options.get("delay", 0))
    plain.train()
    for rank, (mine, _) in enumerate(found):
        assert_same(mine, {n: p.detach() for n, p in plain.now(rank).items()}, tolerance=2e-5)


def test_moves_during_an_average_are_kept() -> None:
    """Another optimizer, or the user, between the step that sends and the one that takes over."""

    def body(world: Any) -> dict[str, Tensor]:
        strategy = wingbeat.LocalSGD(every=1, overlap=True, encrypted=False)
        model, optimizer = made(world, strategy, lambda p: torch.optim.SGD(p, lr=0.0))
        for step in range(3):
            train(model, optimizer, [step])
            with torch.no_grad():
                model.scale.add_(world.rank + 1)
        wingbeat.synchronize(model)
        return weights(model)

    first = float(net().scale.detach())
    for found in on(2, body):
        assert float(found["scale"]) == pytest.approx(first + 3 * 1.5)


def test_synchronization_leaves_the_outer_gradient_unchanged() -> None:
    """Gradients that do not depend on weights show it: the mean goes where it goes without."""

    def body(world: Any, often: bool) -> dict[str, Tensor]:
        strategy = diloco(fragments=2)
        model, optimizer = made(world, strategy, lambda p: torch.optim.SGD(p, lr=0.1))
        for step in range(9):
            for param in model.parameters():
                rng = torch.Generator().manual_seed(7 * step + world.rank)
                param.grad = torch.randn(param.shape, generator=rng)
            optimizer.step()
            if often and step % 2:
                wingbeat.synchronize(model)
        wingbeat.synchronize(model)
        return weights(model)

    seldom = on(2, lambda world: body(world, often=False), timeout=60)
    often = on(2, lambda world: body(world, often=True), timeout=60)
    assert_same(often[0], often[1])
    assert_same(often[0], seldom[0], tolerance=1e-5)


def test_uneven_batches_end_with_one_model() -> None:
    """Who ends early misses turns of the others'; later turns are of the same fragments."""

    def body(world: Any) -> list[Any]:
        model, optimizer = made(world, diloco(every=3, fragments=3))
        with model.join():
            train(model, optimizer, range(2 + 3 * world.rank))
        update = engine(model).runtime.update
        found = [update.steps, update.tensors()]
        train(model, optimizer, range(4))
        wingbeat.synchronize(model)
        return [*found, weights(model)]

    first, *others = on(3, body, timeout=60)
    assert first[0] == 5  # the mean of 2, 5 and 8
    for other in others:
        assert_same(other, first)


def test_skipped_step_of_one_worker_shifts_its_turns_only() -> None:
    """As a GradScaler has it, whose gradients were too large on one worker."""

    def body(world: Any) -> tuple[int, dict[str, Tensor]]:
        model, optimizer = made(world, diloco(every=2, fragments=2))
        for step in range(6):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            if (step, world.rank) != (2, 1):
                optimizer.step()
        steps = engine(model).runtime.update.steps
        wingbeat.synchronize(model)
        return steps, engine(model).runtime.update.tensors()

    first, second = on(2, body, timeout=60)
    assert (first[0], second[0]) == (6, 5)
    assert_same(first[1], second[1])


@pytest.mark.parametrize("delay", [0, 1])
def test_small_outer_steps_of_bf16_models_add_up(delay: int) -> None:
    """The shared model has more bits: a step that is less than one of bf16's is not rounded off."""

    def body(world: Any) -> float:
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        strategy = diloco(every=1, delay=delay, outer_lr=0.125, outer_momentum=0)
        model, optimizer = made(world, strategy, lambda p: torch.optim.SGD(p, lr=1.0), model)
        for _ in range(24):
            model.weight.grad = torch.full((1, 1), 2**-7, dtype=torch.bfloat16)
            optimizer.step()
        wingbeat.synchronize(model)
        assert model.weight.dtype is torch.bfloat16
        return float(engine(model).runtime.update.tensors()["shared"]["weight"])

    # A step of 1/128 is one of bf16's below 1, or two; an eighth of that is an outer step.
    made_steps = 24 - delay
    for found in on(2, body, timeout=60):
        assert found == pytest.approx(1 - made_steps * 2**-10, abs=2**-10)


def test_user_actions_between_steps_have_the_same_effect_as_without_averages() -> None:
    """Averages of weights swapped in and out, copies, frozen parameters, a second optimizer."""

    def body(world: Any) -> tuple[dict[str, Tensor], Tensor]:
        model = net()
        model.first.bias.requires_grad_(False)
        others = [model.head.weight, model.head.bias]
        rest = [
            p for p in model.parameters() if p.requires_grad and all(p is not o for o in others)
        ]
        optimizer, second = torch.optim.LBFGS(rest, max_iter=2), torch.optim.Adam(others, lr=0.01)
        wingbeat.distribute(model, optimizer, diloco(every=2), world=world)
        frozen = model.first.bias.detach().clone()
        for step in range(5):

            def closure(step: int = step) -> Tensor:
                model.zero_grad()
                loss: Tensor = model(batch(step, world.rank)).square().mean()
                loss.backward()
                return loss

            assert float(optimizer.step(closure).detach()) > 0
            second.step()
            kept = {name: p.data for name, p in model.named_parameters()}
            for param in model.parameters():
                param.data = torch.zeros_like(param)  # as a moving average for evaluation
            assert not copy.deepcopy(model)(batch(step, 0)).any()
            for name, param in model.named_parameters():
                param.data = kept[name]
        wingbeat.release(model, optimizer)
        assert type(optimizer) is torch.optim.LBFGS
        assert "wingbeat" not in optimizer.state_dict()
        assert torch.equal(model.first.bias, frozen)
        after = weights(model)
        wingbeat.distribute(model, optimizer, diloco(every=2), world=world)
        for step in range(3):
            optimizer.step(lambda step=step: closure(step))
        wingbeat.synchronize(model)
        return after, weights(model)["head.weight"]

    first, second = on(2, body, timeout=60)
    assert_same(first, second)


# -- state -------------------------------------------------------------------------------------


def half(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: make().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"fragments": 2}, net),
        ({"compression": "sketch@4"}, net),
        ({"compression": wingbeat.TopK(density=0.1, bits=2)}, net),
        ({}, half(net)),
    ],
)
def test_resumed_run_continues_bit_for_bit(
    options: dict[str, Any], model: Callable[[], Any]
) -> None:
    def loop(pair: Any, rank: int, steps: range) -> None:
        trained, optimizer = pair
        dtype = next(trained.parameters()).dtype
        for step in steps:
            optimizer.zero_grad()
            trained(batch(step, rank).to(dtype)).square().mean().backward()
            optimizer.step()

    def whole(world: Any) -> dict[str, Tensor]:
        pair = made(world, diloco(**options), model=model())
        loop(pair, world.rank, range(11))
        return weights(pair[0])

    def first(world: Any) -> tuple[Any, Any]:
        pair = made(world, diloco(**options), model=model())
        loop(pair, world.rank, range(6))
        return copy.deepcopy(pair[0].state_dict()), state_of(pair[1])

    saved = on(2, first, timeout=60)

    def second(world: Any) -> dict[str, Tensor]:
        pair = made(world, diloco(**options), model=model())
        loop(pair, world.rank, range(1))  # is forgotten
        weights_then, state = saved[world.rank]
        pair[1].load_state_dict(state)
        pair[0].load_state_dict(weights_then)
        loop(pair, world.rank, range(6, 11))
        return weights(pair[0])

    assert_same(on(2, second, timeout=60), on(2, whole, timeout=60))


def test_run_with_another_number_of_workers_keeps_shared_model_and_momentum() -> None:
    def first(world: Any) -> tuple[Any, Any]:
        model, optimizer = made(world, diloco())
        train(model, optimizer, range(6))
        wingbeat.synchronize(model)
        return copy.deepcopy(model.state_dict()), state_of(optimizer)

    model_state, state = on(2, first, timeout=60)[0]

    def second(world: Any) -> Any:
        model, optimizer = made(world, diloco(fragments=2))
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(1))
        found = state_of(optimizer)["wingbeat"]["averages"]
        train(model, optimizer, range(7))
        wingbeat.synchronize(model)
        return found, weights(model)

    found = on(3, second, timeout=60)
    assert found[0][0]["steps"] == 7
    for each in found:
        assert_same(each[0]["shared"], state["wingbeat"]["averages"]["shared"])
        assert_same(each[0]["velocity"], state["wingbeat"]["averages"]["velocity"])
        assert_same(each[1], found[0][1])


def test_checkpoint_without_averages_shares_the_loaded_model() -> None:
    plain = net(3)
    state = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9).state_dict()

    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, diloco())
        train(model, optimizer, range(5))
        optimizer.load_state_dict(state)
        model.load_state_dict(plain.state_dict())
        kept = state_of(optimizer)["wingbeat"]["averages"]
        assert kept["steps"] == 0
        assert not any(value.any() for value in kept["velocity"].values())
        shared: dict[str, Tensor] = kept["shared"]
        return shared

    for found in on(2, body):
        assert_same(found, weights(plain))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda kept: kept.update(steps=-1), "number of steps"),
        (lambda kept: kept.update(format="other"), "wingbeat averages, version 1"),
        (lambda kept: kept.pop("velocity"), "without"),
        (lambda kept: kept["shared"].pop("scale"), "'scale' is in one of them only"),
        (lambda kept: kept["shared"].update(scale=torch.ones(2)), r"has shape \(2,\) there"),
        (lambda kept: kept["velocity"].update(scale=torch.tensor(math.nan)), "not finite"),
        (lambda kept: kept["velocity"].update(scale=3), "no tensor of floats"),
    ],
)
def test_damaged_state_is_refused_and_changes_nothing(
    spoil: Callable[[Any], Any], said: str
) -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world, diloco())
        train(model, optimizer, range(2))
        state = state_of(optimizer)
        spoil(state["wingbeat"]["averages"])
        with pytest.raises(UsageError, match=said):
            optimizer.load_state_dict(state)
        assert engine(model).runtime.update.steps == 2

    on(2, body)


@pytest.mark.parametrize("synchronize", [False, True])
def test_weights_changed_on_some_workers_before_the_first_step_raise(
    synchronize: bool,
) -> None:
    """Their shared models would differ for ever; after synchronize they are one."""

    def body(world: Any) -> Any:
        model, optimizer = made(world, diloco(every=2, fragments=2))
        if world.rank == 0:
            model.load_state_dict(net(7).state_dict())
        if synchronize:
            wingbeat.synchronize(model)
            train(model, optimizer, range(5))
            return engine(model).runtime.update.tensors()["shared"]
        said = rf"rank {world.rank} and rank {1 - world.rank} started with different weights"
        with pytest.raises(UsageError, match=said):
            train(model, optimizer, range(2))
        return None

    first, second = on(2, body, timeout=60)
    if synchronize:
        assert_same(first, second)


def test_weights_loaded_on_all_workers_before_the_first_step_are_shared() -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world, diloco(every=2), lambda p: torch.optim.SGD(p, lr=0.0))
        model.load_state_dict(net(7).state_dict())
        train(model, optimizer, range(4))
        wingbeat.synchronize(model)
        return weights(model)

    for found in on(2, body, timeout=60):
        assert_same(found, weights(net(7)), tolerance=1e-6)
