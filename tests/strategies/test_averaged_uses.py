"""What people do with torch beside a plain loop, where models are averaged: all end equal."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import wingbeat
from helpers.training import batch, net, on, train, weights
from wingbeat.errors import MismatchError
from wingbeat.strategies import parse

STRATEGIES = [
    "ripples:encrypted=false",
    "adpsgd:encrypted=false",
    "localsgd:every=2,encrypted=false",
    "diloco:every=4,fragments=2,delay=1,encrypted=false",
]
WORKERS = 3
Tensors = dict[str, Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def made(world: Any, strategy: str, model: Any = None, make: Make = plain) -> tuple[Any, Any]:
    model = net() if model is None else copy.deepcopy(model)
    return wingbeat.distribute(model, make(model.parameters()), parse(strategy), world=world)


def all_end_equal(body: Callable[[Any], Tensors]) -> None:
    found = on(WORKERS, body, timeout=60.0)
    for each in found:
        assert each.keys() == found[0].keys()
        for name, value in each.items():
            assert value.isfinite().all(), name
            assert torch.equal(value, found[0][name]), name


def ended(model: Any) -> Tensors:
    wingbeat.synchronize(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def steps(model: Any, optimizer: Any, inputs: Callable[[int], Tensor], count: int = 7) -> None:
    for step in range(count):
        optimizer.zero_grad(set_to_none=False)
        model(inputs(step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_optimizer_that_evaluates_the_loss_itself_works(strategy: str) -> None:
    def body(world: Any) -> Tensors:
        model, optimizer = made(
            world, strategy, make=lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3)
        )
        for step in range(5):
            inputs = batch(step, world.rank)

            def closure(x: Tensor = inputs) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return ended(model)

    all_end_equal(body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty_parameters_and_integer_buffers_work(strategy: str) -> None:
    first = net()
    first.nothing = nn.Parameter(torch.zeros(0, 4))
    first.register_buffer("none", torch.zeros(0))
    first.register_buffer("table", torch.arange(3))

    def body(world: Any) -> Tensors:
        model, optimizer = made(world, strategy, first)
        train(model, optimizer, range(7))
        return ended(model)

    all_end_equal(body)


class Mixed(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 5).double(), nn.Linear(5, 4).bfloat16()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.narrow(self.wide(x.double()).bfloat16()).float())
        return found


@pytest.mark.parametrize("strategy", [*STRATEGIES[:3], "diloco:every=3,encrypted=false"])
def test_model_of_several_dtypes_works(strategy: str) -> None:
    first = Mixed()

    def body(world: Any) -> Tensors:
        model, optimizer = made(world, strategy, first)
        train(model, optimizer, range(7))
        return ended(model)

    all_end_equal(body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sparse_gradients_stay_local(strategy: str) -> None:
    first = nn.Sequential(nn.Embedding(20, 4, sparse=True))

    def body(world: Any) -> Tensors:
        model, optimizer = made(
            world, strategy, first, lambda params: torch.optim.SparseAdam(list(params), lr=0.1)
        )
        chance = torch.Generator().manual_seed(world.rank)
        steps(model, optimizer, lambda _: torch.randint(0, 20, (5,), generator=chance))
        return ended(model)

    all_end_equal(body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_skipped_by_a_scaler_on_one_worker_work(strategy: str) -> None:
    def body(world: Any) -> Tensors:
        model, optimizer = made(world, strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(model(batch(step, world.rank)).square().mean()).backward()
            if (world.rank, step) in ((1, 2), (1, 5)):
                model.first.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return ended(model)

    all_end_equal(body)


class Failing(torch.optim.SGD):
    """Raises in one step."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("a step that fails")
        return super().step(closure)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_that_raises_does_not_count(strategy: str) -> None:
    def body(world: Any) -> Tensors:
        model, optimizer = made(world, strategy, make=lambda params: Failing(params, lr=0.05))
        train(model, optimizer, range(3))
        if world.rank == 1:
            optimizer.fails = True
            with pytest.raises(ArithmeticError):
                train(model, optimizer, range(1))
            optimizer.fails = False
        train(model, optimizer, range(6))
        return ended(model)

    all_end_equal(body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_can_be_used_one_after_the_other(strategy: str) -> None:
    def body(world: Any) -> Tensors:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for each in (strategy, "allreduce", "diloco:every=2,encrypted=false", strategy):
            wingbeat.distribute(model, optimizer, parse(each), world=world)
            train(model, optimizer, range(3))
            wingbeat.release(model, optimizer)
        return weights(model)

    all_end_equal(body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_uneven_batches_and_further_training_work(strategy: str) -> None:
    def body(world: Any) -> Tensors:
        model, optimizer = made(world, strategy)
        train(model, optimizer, range(3 + 4 * world.rank))
        first = ended(model)
        train(model, optimizer, range(6))
        return first | {f"{name} later": value for name, value in ended(model).items()}

    all_end_equal(body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moving_averages_schedules_and_copies_work(strategy: str) -> None:
    def body(world: Any) -> Tensors:
        model, optimizer = made(world, strategy)
        moving = torch.optim.swa_utils.AveragedModel(model)
        schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01)
        for step in range(5):
            train(model, optimizer, [step])
            wingbeat.synchronize(model)
            moving.update_parameters(model)
            schedule.step()
        torch.save(moving, io.BytesIO())
        again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert type(again) is type(net())
        return dict(moving.module.state_dict()) | ended(model)

    all_end_equal(body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_computed_from_parameters_work(strategy: str) -> None:
    first = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 3)),
    )

    def body(world: Any) -> Tensors:
        model, optimizer = made(world, strategy, first)
        train(model, optimizer, range(7))
        found = ended(model)
        return found | {"out": model.eval()(torch.ones(2, 6)).detach()}

    all_end_equal(body)


def test_optimizers_of_other_classes_are_refused() -> None:
    def body(world: Any) -> None:
        make = torch.optim.Adam if world.rank == 0 else torch.optim.SGD
        said = (
            r"rank 0's optimizer is a torch\.optim\.adam\.Adam, rank 1's a torch\.optim\.sgd\.SGD"
        )
        with pytest.raises(MismatchError, match=said):
            made(world, STRATEGIES[0], make=lambda params: make(params, lr=0.1))

    on(2, body)
