"""What bounded staleness (Canary) promises, whatever a script does to weights between its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import wingbeat
from helpers.training import adamw, assert_same, backward, net, on, sgd, train, weights
from wingbeat.errors import UsageError
from wingbeat.strategies import parse

PATIENCE = 60.0
APART = "canary:s=2,encrypted=false"


def begun(world: Any, strategy: str = APART, model: Any = None, make: Any = sgd) -> tuple[Any, Any]:
    model = net() if model is None else model
    params = [param for param in model.parameters() if param.requires_grad]
    return wingbeat.distribute(model, make(params), parse(strategy), world=world)


# -- what each rank makes of weights by itself ---------------------------------------------------


def own_state(model: Any, optimizer: Any, rank: int) -> None:
    """As each rank has saved it, between two flushes."""
    state = copy.deepcopy(optimizer.state_dict())
    for kept in state["state"].values():
        kept["exp_avg"].add_(rank)
    optimizer.load_state_dict(state)
    del model


def own_weights(model: Any, optimizer: Any, rank: int) -> None:
    model.load_state_dict({name: value + rank for name, value in model.state_dict().items()})
    del optimizer


@pytest.mark.parametrize(
    ("load", "named"),
    [(own_state, r"the optimizer's state of parameter '\w+"), (own_weights, r"parameter '\w+")],
)
@pytest.mark.parametrize("flushed", [False, True])
def test_states_that_differ_between_ranks_are_refused_in_the_next_step(
    load: Callable[[Any, Any, int], None], named: str, flushed: bool
) -> None:
    def body(world: Any) -> None:
        model, optimizer = begun(world, make=adamw)
        train(model, optimizer, range(3))
        if flushed:
            model.synchronize()
        load(model, optimizer, world.rank)
        optimizer.zero_grad()
        backward(model, world.rank, 3)
        with pytest.raises(UsageError, match=rf"^{named}.* differs between workers \(Canary\)"):
            optimizer.step()

    on(2, body, timeout=PATIENCE)


def test_one_state_loaded_by_all_ranks_is_trained_on() -> None:
    def body(world: Any) -> Any:
        model, optimizer = begun(world, make=adamw)
        train(model, optimizer, range(3))
        model.synchronize()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for turn in range(2):
            train(model, optimizer, range(3, 5 + turn))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, range(5, 7))
        model.synchronize()
        return weights(model)

    assert_same(*on(2, body, timeout=PATIENCE))


def test_write_past_autograd_on_one_rank_is_refused_by_the_next_flush_on_all() -> None:
    def body(world: Any) -> None:
        model, optimizer = begun(world)
        train(model, optimizer, range(3))
        if world.rank:
            model.head.weight.data.mul_(0.9)
        train(model, optimizer, range(3, 5))
        with pytest.raises(UsageError, match=r"'head.weight' differs between workers \(Canary\)"):
            model.synchronize()

    on(2, body, timeout=PATIENCE)


def test_weights_given_by_a_vector_are_refused_in_the_next_step() -> None:
    """As a line search does it: ``p.data`` is another tensor, which counts no change."""

    def body(world: Any) -> None:
        model, optimizer = begun(world)
        train(model, optimizer, range(2))
        with torch.no_grad():
            vector_to_parameters(parameters_to_vector(model.parameters()) * 0.9, model.parameters())
        with pytest.raises(UsageError, match=r"'scale' was changed after optimizer.step\(\)"):
            train(model, optimizer, [2])
        wingbeat.release(model, optimizer)

    on(2, body, timeout=PATIENCE)


def test_weights_may_be_written_between_two_flushes_without_a_step() -> None:
    def body(world: Any) -> Any:
        model, optimizer = begun(world)
        train(model, optimizer, range(2))
        for factor in (0.9, 0.8):
            model.synchronize()
            vector_to_parameters(
                parameters_to_vector(model.parameters()) * factor, model.parameters()
            )
        model.synchronize()
        train(model, optimizer, range(2, 4))
        model.synchronize()
        return weights(model)

    assert_same(*on(2, body, timeout=PATIENCE))


def test_flush_does_not_wait_for_a_rank_whose_script_has_ended() -> None:
    def body(world: Any) -> Any:
        model, optimizer = begun(world)
        train(model, optimizer, range(2))
        if world.rank == 2:
            world.close()
            return None
        train(model, optimizer, range(2, 5))
        model.synchronize()
        return weights(model)

    first, second, _ = on(3, body, timeout=PATIENCE)
    assert_same(first, second)


def test_another_optimizer_in_training_is_refused_and_distributed_after_release() -> None:
    def body(world: Any) -> Any:
        model, optimizer = begun(world)
        train(model, optimizer, range(2))
        new = adamw(model.parameters())
        new.zero_grad()
        said = r"zero_grad\(\) of the optimizer that distribute\(\) has returned"
        with pytest.raises(UsageError, match=said):
            backward(model, world.rank, 2)
        wingbeat.release(model, optimizer)
        model, new = wingbeat.distribute(model, new, parse(APART), world=world)
        train(model, new, range(3, 5))
        model.synchronize()
        return weights(model)

    assert_same(*on(2, body, timeout=PATIENCE))


# -- what follows the weights --------------------------------------------------------------------


class Momentum(nn.Module):
    """A teacher of frozen parameters, which each forward moves towards the model."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.teacher = net(), net(1)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.online.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1
        out: Tensor = self.online(x) - self.teacher(x)
        return out


def test_frozen_parameters_that_follow_the_weights_are_the_same_after_a_flush() -> None:
    def body(world: Any) -> list[Any]:
        model, optimizer = begun(world, model=Momentum())
        found = []
        for turn in range(2):
            train(model, optimizer, range(4 * turn, 4 * turn + 4 - world.rank))
            model.synchronize()
            found.append(weights(model))
        return found

    assert_same(*on(2, body, timeout=PATIENCE))


class Observed(nn.Module):
    """Rounds what it computes to a grid that follows it, as training for quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.register_buffer("range", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            self.range.mul_(0.9).add_(hidden.abs().max(), alpha=0.1)
        grid = self.range / 15 + 1e-3
        rounded = hidden + (torch.round(hidden / grid) * grid - hidden).detach()
        out: Tensor = self.head(rounded)
        return out


def observed() -> Observed:
    made = Observed()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) - 0.5)
    return made


def test_buffers_that_forwards_read_are_rank_zeros_where_each_step_is_flushed() -> None:
    """Without the flush each rank rounds to a grid of its own, also with s=0."""

    def trained(strategy: str) -> list[Any]:
        def body(world: Any) -> Any:
            model, optimizer = begun(world, strategy, observed())
            for step in range(5):
                train(model, optimizer, [step])
                model.synchronize()
            return weights(model)

        return on(2, body, timeout=PATIENCE)

    for found in trained("canary:s=0,encrypted=false"):
        assert_same(found, trained("allreduce")[0], 1e-6)
