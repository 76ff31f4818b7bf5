"""Legal uses of torch under servers, of either update: the weights are those of `AllReduce`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import wingbeat
import wingbeat_lab
from helpers.training import TINY_MB, Make, assert_same, on, weights

Body = Callable[[Any, Any, int], Any]

TOLERANCE = 1e-5


class Odd(nn.Module):
    """Batch norm, a parameter without elements, and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.norm = nn.BatchNorm1d(13)
        self.second = nn.Linear(13, 3)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x))) * self.scale)
        return out + self.empty.sum()


class Single(nn.Module):
    """One element, and more servers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum(1)


def backward(model: Any, rank: int, step: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    model(x).square().mean().backward()


def train(model: Any, optimizer: Any, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def plain(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, rank, range(5))


def averaged_model(model: Any, optimizer: Any, rank: int) -> Any:
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for step in range(4):
        train(model, optimizer, rank, [step])
        average.update_parameters(model)
    return [p.detach().clone() for p in average.parameters()]


def a_scheduler_of_momentum_too(model: Any, optimizer: Any, rank: int) -> None:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
    for step in range(6):
        train(model, optimizer, rank, [step])
        schedule.step()


def another_scheduler(model: Any, optimizer: Any, rank: int) -> None:
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(6):
        if step == 3:
            schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        train(model, optimizer, rank, [step])
        schedule.step()


def options_changed(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(6):
        for group in optimizer.param_groups:
            group.update(maximize=step in (2, 3), foreach=step % 2 == 0)
            group.update(weight_decay=0.1 * (step > 3), betas=(0.5, 0.9 + 0.01 * step))
        train(model, optimizer, rank, [step])


def frozen_for_a_while(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(7):
        for param in model.first.parameters():
            param.requires_grad_(step not in (2, 3, 4))
        train(model, optimizer, rank, [step])


def as_one_vector(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, rank, range(3))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(0.9 * vector, model.parameters())
    train(model, optimizer, rank, range(3, 5))


def clipped_in_two_parts(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model, rank, step)
        if step % 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()


def a_hook_that_raises(model: Any, optimizer: Any, rank: int) -> None:
    raised = []

    def hook(*_: Any) -> None:
        if not raised:
            raised.append(True)
            raise KeyError("once")

    optimizer.register_step_pre_hook(hook)
    for step in range(4):
        try:
            train(model, optimizer, rank, [step])
        except KeyError:
            continue


def evaluated_before_the_step(model: Any, optimizer: Any, rank: int) -> Any:
    found = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, rank, step)
        model.eval()
        with torch.inference_mode():
            found.append(model(torch.ones(2, 6)).clone())
        model.train()
        optimizer.step()
    return [each.clone() for each in found]


def the_state_from_before_the_first_step(model: Any, optimizer: Any, rank: int) -> None:
    before = optimizer.state_dict()
    train(model, optimizer, rank, range(2))
    optimizer.load_state_dict(before)
    train(model, optimizer, rank, range(2, 4))


def some_run_out_of_batches(model: Any, optimizer: Any, rank: int) -> None:
    with model.join():
        train(model, optimizer, rank, range(3 + rank))


BODIES: list[Body] = [
    averaged_model, a_scheduler_of_momentum_too, another_scheduler, options_changed,
    frozen_for_a_while, as_one_vector, clipped_in_two_parts, a_hook_that_raises,
    evaluated_before_the_step, the_state_from_before_the_first_step, some_run_out_of_batches,
]  # fmt: skip

MAKES: dict[str, Make] = {
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.02),
    "adadelta": torch.optim.Adadelta,
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.05, t0=3),
    "rprop": torch.optim.Rprop,
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "a_group_each": lambda params: torch.optim.SGD(
        [{"params": p, "lr": 0.01 * (i + 1), "weight_decay": 0.1 * (i % 2)}
         for i, p in enumerate(params)], lr=0.1, momentum=0.5, dampening=0.2,
    ),
}  # fmt: skip


def compare(make: Make, body: Body, kind: Callable[[], Any] = Odd) -> None:
    served = {"mb": TINY_MB, "servers": 3, "encrypted": False}
    strategies = [
        wingbeat.AllReduce(mb=TINY_MB),
        wingbeat.Geryon(**served),
        wingbeat.Geryon(update="server", **served),
        wingbeat_lab.TicTac(update="server", **served),
    ]
    outcomes = []
    for strategy in strategies:

        def run(world: Any, strategy: Any = strategy) -> Any:
            model = kind()
            with torch.no_grad():
                generator = torch.Generator().manual_seed(0)
                for param in model.parameters():
                    param.copy_(0.5 * torch.randn(param.shape, generator=generator))
            optimizer = make(model.parameters())
            wingbeat.distribute(model, optimizer, strategy, world=world)
            found = body(model, optimizer, world.rank)
            wingbeat.synchronize(model)
            result = weights(model), found
            wingbeat.release(model, optimizer)
            return result

        outcomes.append(on(2, run))
    for strategy, outcome in zip(strategies[1:], outcomes[1:], strict=True):
        for rank in range(2):
            try:
                assert_same(outcome[rank], outcomes[0][rank], TOLERANCE)
            except AssertionError as error:
                raise AssertionError(f"rank {rank}, {strategy}: {error}") from error


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_training_script_uses(body: Body) -> None:
    compare(adam, body)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_elementwise_optimizers_are_accepted(make: Make) -> None:
    compare(make, plain)


def test_fewer_elements_than_servers() -> None:
    compare(adam, plain, Single)
