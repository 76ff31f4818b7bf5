"""Averages of an optimizer's state with the model's: as by hand, kept, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import assert_same, backward, batch, net, on, state_of, train, weights
from wingbeat import parts
from wingbeat.errors import MismatchError, UsageError

STEPS = 7


def local(every: int = 1, **options: Any) -> wingbeat.Strategy:
    return wingbeat.LocalSGD(every=every, average_state=True, encrypted=False, **options)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, amsgrad=True)


def grouped(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    groups = [
        {"params": params[:2], "momentum": 0.0},
        {"params": params[2:5], "momentum": 0.9, "nesterov": True},
        {"params": params[5:], "momentum": 0.5, "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.1)


class Tied(nn.Module):
    """Two layers of one weight, one that is frozen, and one whose use is up to the rank."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=rng) * 0.4)
        self.again.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.use_spare = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.tanh(self.again(torch.tanh(self.first(x)))))
        out: Tensor = self.spare(x) if self.use_spare else x
        return out


def trained(params: Any) -> list[nn.Parameter]:
    return [param for param in params if param.requires_grad]


@dataclass
class ByHand:
    """Models in one place, averaged with all that is remembered of each element."""

    size: int
    model: Callable[[], Any]
    make: Callable[[Any], Any]
    every: int = 1

    def __post_init__(self) -> None:
        self.models = [self.model() for _ in range(self.size)]
        self.optimizers = [self.make(model.parameters()) for model in self.models]

    def train(self, steps: int, before: Callable[[Any, int, int], None]) -> None:
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                optimizer.zero_grad()
                before(model, rank, step)
                backward(model, rank, step)
                optimizer.step()
            if (step + 1) % self.every == 0:
                self.average()

    @torch.no_grad()
    def average(self) -> None:
        for params in zip(*(model.parameters() for model in self.models), strict=True):
            self.level([param for param in params if param.requires_grad])
            states = [opt.state.get(p, {}) for opt, p in zip(self.optimizers, params, strict=True)]
            for name in {name for state in states for name in state} - {"step"}:
                self.level([state[name] for state in states if state.get(name) is not None])

    def level(self, tensors: list[Tensor]) -> None:
        if tensors:
            mean = torch.stack(tensors).mean(0)
            for tensor in tensors:
                tensor.copy_(mean)


def as_usual(_model: Any, _rank: int, _step: int) -> None:
    pass


def spare_late(model: Any, rank: int, step: int) -> None:
    """Rank 0 uses the spare layer from the first step on, others have no state of it for long."""
    model.use_spare = step >= 2 * rank


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("model", "make", "every", "before"),
    [
        (net, momentum, 1, as_usual),
        (net, momentum, 3, as_usual),
        (net, adamw, 2, as_usual),
        (net, grouped, 2, as_usual),
        (Tied, momentum, 1, spare_late),
        (Tied, adamw, 1, spare_late),
    ],
)
def test_averaged_state_equals_averages_by_hand(
    size: int, model: Any, make: Any, every: int, before: Any
) -> None:
    def body(world: Any) -> tuple[Any, Any]:
        mine = model()
        optimizer = make(mine.parameters())
        mine, optimizer = wingbeat.distribute(mine, optimizer, local(every), world=world)
        for step in range(STEPS):
            before(mine, world.rank, step)
            train(mine, optimizer, [step])
        return weights(mine), state_of(optimizer)["state"]

    hand = ByHand(size, model, make, every)
    hand.train(STEPS, before)
    for rank, (mine, state) in enumerate(on(size, body, timeout=60)):
        assert_same(mine, weights(hand.models[rank]), tolerance=1e-5)
        assert_same(state, hand.optimizers[rank].state_dict()["state"], tolerance=1e-5)


class Given(nn.Module):
    """A model whose gradients are what it is given, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradient(step: int, rank: int) -> Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(100 * step + rank))


OPTIONS: dict[str, Any] = {"average_state": True, "encrypted": False}
STRATEGIES = {
    **{p: wingbeat.Ripples(policy=p, size=2, **OPTIONS) for p in ("smart", "random", "static")},
    "overlap": wingbeat.Ripples(overlap=True, **OPTIONS),
    "every": wingbeat.Ripples(every=3, overlap=True, **OPTIONS),
    "pairs": wingbeat.ADPSGD(**OPTIONS),
    "pairs at rest": wingbeat.ADPSGD(overlap=False, **OPTIONS),
    "pairs, bf16": wingbeat.ADPSGD(compression="bf16", **OPTIONS),
    "groups, bf16": wingbeat.Ripples(compression="bf16", **OPTIONS),
    "local": wingbeat.LocalSGD(every=4, **OPTIONS),
    "local, bf16": wingbeat.LocalSGD(every=2, overlap=True, compression="bf16", **OPTIONS),
    "delayed": wingbeat.Strategy(
        plan=parts.Layers(count=2),
        exchange=parts.Groups(policy="all", encrypted=False),
        schedule=parts.Local(every=5, delay=3),
        update=parts.Averaged(state=True),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_gradient_is_in_the_mean_of_all_momenta_once(name: str) -> None:
    """Averages leave means as they are, and here a momentum forgets nothing."""
    size = 4

    def body(world: Any) -> tuple[Tensor, Any]:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
        wingbeat.distribute(model, optimizer, STRATEGIES[name], world=world)
        for step in range(12):
            optimizer.zero_grad()
            model(gradient(step, world.rank)).backward()
            optimizer.step()
        wingbeat.synchronize(model)
        state = state_of(optimizer)["state"][0]["momentum_buffer"]
        wingbeat.release(model, optimizer)
        return model.weight.detach(), state

    whole = sum(gradient(step, rank) for step in range(12) for rank in range(size))
    found = on(size, body, timeout=60)
    for weight, state in found:
        assert torch.equal(weight, torch.zeros(5))
        assert torch.equal(state, found[0][1])
        torch.testing.assert_close(state, whole / size, rtol=1e-4, atol=1e-4)


def test_state_stays_local_without_average_state() -> None:
    def body(world: Any) -> Tensor:
        model = net()
        optimizer = momentum(model.parameters())
        strategy = wingbeat.LocalSGD(every=1, encrypted=False)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        train(model, optimizer, range(3))
        wingbeat.synchronize(model)
        found: Tensor = state_of(optimizer)["state"][0]["momentum_buffer"]
        return found

    first, second = on(2, body, timeout=60)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "strategy",
    [
        wingbeat.ADPSGD(**OPTIONS),
        wingbeat.ADPSGD(compression="bf16", **OPTIONS),
        wingbeat.LocalSGD(every=1, compression="bf16", **OPTIONS),
        wingbeat.Ripples(policy="random", compression="bf16", **OPTIONS),
    ],
)
def test_second_moments_stay_positive_with_uneven_gradients(strategy: Any) -> None:
    """Also through bf16: what rounding takes is less than any share that a worker has."""

    def body(world: Any) -> float:
        model = Given()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.6))
        wingbeat.distribute(model, optimizer, strategy, world=world)
        least = 1.0
        for step in range(60):
            optimizer.zero_grad()
            scale = 10.0 ** ((step * 7 + world.rank * 5) % 9 - 6) * (step % 4 != world.rank)
            model(gradient(step, world.rank) * scale).backward()
            optimizer.step()
            least = min(least, float(optimizer.state[model.weight]["exp_avg_sq"].min()))
        wingbeat.synchronize(model)
        assert torch.isfinite(model.weight).all()
        return min(least, float(optimizer.state[model.weight]["exp_avg_sq"].min()))

    assert min(on(3, body, timeout=60)) >= 0


# -- state that is saved, loaded, taken over ---------------------------------------------------


def test_run_resumes_from_the_checkpoint_of_rank_0_after_synchronization() -> None:
    """All have the same state then, so that any number of workers can load one."""

    def first(world: Any) -> tuple[Any, Any]:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), local(2), world=world
        )
        train(model, optimizer, range(5))
        wingbeat.synchronize(model)
        return copy.deepcopy(model.state_dict()), state_of(optimizer)

    saved = on(2, first, timeout=60)
    assert_same(saved[0], saved[1])

    def second(world: Any) -> Any:
        model = net(3)
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), local(2), world=world
        )
        train(model, optimizer, range(1))  # is forgotten
        model.load_state_dict(saved[0][0])
        optimizer.load_state_dict(saved[0][1])
        train(model, optimizer, range(5, 9))
        wingbeat.synchronize(model)
        return weights(model), state_of(optimizer)

    found = on(3, second, timeout=60)
    for each in found:
        assert_same(each, found[0])


def test_state_loaded_during_training_is_averaged_from_then_on() -> None:
    def body(world: Any) -> Any:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, momentum(model.parameters()), local(1, overlap=True), world=world
        )
        train(model, optimizer, range(3))
        state = state_of(optimizer)
        for kept in state["state"].values():
            kept["momentum_buffer"].fill_(world.rank)
        begun = len(state["state"])
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group.update(lr=0.0, momentum=1.0, weight_decay=0.0)
        for _ in range(3):
            for param in optimizer.state:
                param.grad = torch.zeros_like(param)
            optimizer.step()
        wingbeat.synchronize(model)
        assert len(optimizer.state) == begun
        return state_of(optimizer)["state"]

    for state in on(2, body, timeout=60):
        for kept in state.values():
            assert (kept["momentum_buffer"] == 0.5).all()


def test_changed_options_that_add_state_are_refused() -> None:
    def body(world: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, local(), world=world)
        train(model, optimizer, range(2))
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(
            UsageError, match=r"'momentum_buffer' of parameter '\w+\.\w+' is present"
        ):
            train(model, optimizer, [2])

    on(2, body, timeout=60)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: wingbeat.Ripples(average_state=1), "average_state=1.*True and False"),
        (lambda: parts.Averaged(state="yes"), "state='yes'.*True and False"),
        (
            lambda: wingbeat.LocalSGD(compression="sketch@4", average_state=True),
            "which codecs and a quorum need",
        ),
        (
            lambda: wingbeat.LocalSGD(quorum=2, average_state=True),
            r"LocalSGD\(quorum=2, average_state=True\).*without a quorum",
        ),
        (lambda: wingbeat.DiLoCo(average_state=True), "average_state"),
    ],
)
def test_invalid_average_state_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_optimizer_without_average_of_its_state_is_refused_at_distribute() -> None:
    def body(world: Any) -> None:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(UsageError, match="LBFGS cannot be averaged"):
            wingbeat.distribute(model, optimizer, local(), world=world)
        assert type(optimizer) is torch.optim.LBFGS

    on(2, body, timeout=60)


def test_different_optimizers_on_workers_are_reported() -> None:
    def body(world: Any) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * world.rank)
        with pytest.raises(MismatchError, match=r"momentum_buffer \(float32\) of 'scale'"):
            wingbeat.distribute(model, optimizer, local(), world=world)

    on(2, body, timeout=60)


def test_state_of_a_second_optimizer_stays_local() -> None:
    def body(world: Any) -> list[Any]:
        model = net()
        optimizer = momentum([*model.first.parameters(), *model.second.parameters()])
        other = torch.optim.AdamW(model.head.parameters(), lr=0.01)
        wingbeat.distribute(model, optimizer, local(), world=world)
        for step in range(3):
            model.zero_grad()
            model(batch(step, world.rank)).square().mean().backward()
            other.step()
            optimizer.step()
        wingbeat.synchronize(model)
        return [state_of(optimizer)["state"], other.state_dict()["state"], weights(model)]

    first, second = on(2, body, timeout=60)
    assert_same(first[0], second[0])
    assert_same(first[2], second[2])
    assert not torch.equal(first[1][0]["exp_avg"], second[1][0]["exp_avg"])
