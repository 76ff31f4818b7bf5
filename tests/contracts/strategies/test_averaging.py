"""What strategies that average models promise, whatever each worker does between its steps."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import (
    adamw,
    assert_same,
    backward,
    batch,
    net,
    on,
    sgd,
    train,
    weights,
)
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging import service
from wingbeat.strategies import parse
from wingbeat.transport import detector
from wingbeat.transport.detector import Deadlines

PATIENCE = 60.0

AVERAGING = (
    "ripples:encrypted=false",
    "ripples:policy=paper,encrypted=false",
    "ripples:policy=random,size=2,encrypted=false",
    "ripples:policy=buffered,size=2,encrypted=false",
    "localsgd:every=2,encrypted=false",
    "diloco:every=2,encrypted=false",
    "adpsgd:encrypted=false",
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have groups go on without a worker whose step takes some tenths of a second longer."""
    monkeypatch.setattr(detector, "TIMEOUT_FACTOR", 2.0)
    short = lambda *_, **__: Deadlines(0.2, first=0.5)  # noqa: E731
    monkeypatch.setattr(service, "Deadlines", short)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("counts", [(4, 3), (3, 6)])
@pytest.mark.parametrize("strategy", AVERAGING)
def test_models_are_one_after_uneven_steps_and_a_barrier(
    strategy: str, counts: tuple[int, int]
) -> None:
    together = threading.Barrier(2)

    def body(world: Any) -> list[Any]:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        found = []
        for turn in range(2):  # training goes on after a mean
            more = counts[(world.rank + turn) % 2]
            train(model, optimizer, range(10 * turn, 10 * turn + more))
            together.wait(PATIENCE)
            wingbeat.synchronize(model)
            found.append(weights(model))
        train(model, optimizer, range(20, 22))
        wingbeat.synchronize(model)
        return [*found, weights(model)]

    one, other = on(2, body, timeout=PATIENCE)
    for mine, theirs in zip(one, other, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("strategy", AVERAGING)
def test_last_worker_may_call_consensus_after_the_others_have_left(strategy: str) -> None:
    gone = threading.Event()

    def body(world: Any) -> None:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        train(model, optimizer, range(2))
        wingbeat.synchronize(model)
        if world.rank == 1:
            world.close()
            gone.set()
            return
        assert gone.wait(PATIENCE)
        before = weights(model)
        wingbeat.synchronize(model)
        assert all(torch.equal(before[name], value) for name, value in weights(model).items())

    on(2, body, timeout=PATIENCE)


# -- what is not trained, or not by the optimizer ------------------------------------------------


class Momentum(nn.Module):
    """A teacher of frozen parameters, which each forward moves towards the model."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.teacher, self.still = net(), net(1), net(2)
        self.teacher.requires_grad_(False)
        self.still.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.online.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1
        out: torch.Tensor = self.online(x) - self.teacher(x) + self.still(x)
        return out


@pytest.mark.parametrize(
    "strategy", [*AVERAGING, "localsgd:every=2,compression=bf16,encrypted=false"]
)
def test_frozen_parameters_that_each_rank_changes_are_their_mean_after_consensus(
    strategy: str,
) -> None:
    def body(world: Any) -> list[Any]:
        model: Any = Momentum()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.online.parameters()), parse(strategy), world=world
        )
        found = []
        for turn in range(2):
            train(model, optimizer, range(4 * turn, 4 * turn + 3))
            found.append(weights(model.teacher))
            wingbeat.synchronize(model)
            found.append(weights(model))
        return found

    one, other = on(2, body, timeout=PATIENCE)
    for own, level in ((0, 1), (2, 3)):
        assert_same(one[level], other[level])
        means = {f"teacher.{n}": (one[own][n] + other[own][n]) / 2 for n in one[own]}
        assert_same({name: one[level][name] for name in means}, means, 1e-6)
    still = {name: value for name, value in one[3].items() if name.startswith("still.")}
    assert_same(still, {f"still.{name}": value for name, value in weights(net(2)).items()})


@pytest.mark.parametrize("strategy", AVERAGING)
def test_parameter_replaced_in_training_is_refused_and_distributed_anew(strategy: str) -> None:
    def body(world: Any) -> Any:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        train(model, optimizer, range(2))
        new = nn.Parameter(torch.full((3, 7), 0.1 * world.rank))
        group = optimizer.param_groups[0]
        group["params"] = [new if p is model.head.weight else p for p in group["params"]]
        model.head.weight = new
        said = r"'head.weight', of shape \(3, 7\), .* at distribute\(\).*wingbeat.release"
        with pytest.raises(UsageError, match=said):
            train(model, optimizer, [2])
        wingbeat.release(model, optimizer)
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        train(model, optimizer, range(3, 5))
        wingbeat.synchronize(model)
        return weights(model)

    assert_same(*on(2, body, timeout=PATIENCE))


def by_own_hand(model: Any, rank: int, steps: Any) -> None:
    for step in steps:
        backward(model, rank, step)
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
                    param.grad = None


@pytest.mark.parametrize("strategy", AVERAGING)
def test_updates_made_by_hand_are_told_of_once_and_averaged_by_consensus(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(world: Any) -> Any:
        model = net()
        model, _ = wingbeat.distribute(model, sgd(model.parameters()), parse(strategy), world=world)
        by_own_hand(model, world.rank, range(10))
        wingbeat.synchronize(model)
        return weights(model)

    assert_same(*on(2, body, timeout=PATIENCE))
    lines = [r.getMessage() for r in caplog.records if "made manually" in r.getMessage()]
    assert len(lines) == 1, lines
    assert "optimizer.step() was never called" in lines[0]


@pytest.mark.parametrize("strategy", AVERAGING)
def test_forwards_without_changes_and_changes_between_steps_are_not_told_of(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(world: Any) -> None:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), parse(strategy), world=world
        )
        for step in range(8):  # accumulated
            backward(model, world.rank, step)
        optimizer.step()
        by_own_hand(model, world.rank, range(8, 16))

    on(2, body, timeout=PATIENCE)
    assert "made manually" not in caplog.text


# -- saved and resumed ---------------------------------------------------------------------------


class Convolutional(nn.Module):
    """With buffers that each worker counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.relu(self.norm(self.first(x.unsqueeze(1)))).flatten(1))
        return y


def convolutional() -> nn.Module:
    made = Convolutional()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) - 0.5)
    return made


def resumed(strategy: str, *, own: bool, before: Any = None) -> tuple[list[Any], list[Any]]:
    """Train for nine steps; and for five, then from what was saved then for four.

    Args:
        strategy: by its name.
        own: whether each rank loads what it has saved itself; otherwise all load rank 0's.
        before: called with each model before it is saved, in both trainings.
    """

    def begun(world: Any) -> tuple[Any, Any]:
        model = convolutional()
        return wingbeat.distribute(model, adamw(model.parameters()), parse(strategy), world=world)

    def saving(world: Any, stop: bool) -> Any:
        model, optimizer = begun(world)
        train(model, optimizer, range(5))
        if before is not None:
            before(model)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if not stop:
            train(model, optimizer, range(5, 9))
            return copy.deepcopy(model.state_dict())
        return saved

    saved = on(2, functools.partial(saving, stop=True), timeout=PATIENCE)

    def going_on(world: Any) -> Any:
        model, optimizer = begun(world)
        state, optimizers = copy.deepcopy(saved[world.rank if own else 0])
        model.load_state_dict(state)
        optimizer.load_state_dict(optimizers)
        train(model, optimizer, range(5, 9))
        return copy.deepcopy(model.state_dict())

    whole = on(2, functools.partial(saving, stop=False), timeout=PATIENCE)
    return on(2, going_on, timeout=PATIENCE), whole


@pytest.mark.parametrize(
    "strategy",
    [
        "localsgd:every=2,encrypted=false",
        "localsgd:every=2,average_state=true,encrypted=false",
        "diloco:every=3,encrypted=false",
        "canary:s=0,encrypted=false",
    ],
)
def test_training_resumed_with_what_each_rank_has_saved_ends_with_the_same_bits(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_same(*resumed(strategy, own=True))
    assert "load_state_dict()" not in caplog.text


@pytest.mark.parametrize(
    ("strategy", "met", "said"),
    [
        ("diloco:every=3,encrypted=false", False, "what its model had moved"),
        ("diloco:every=3,encrypted=false", True, "rank 1 loads what rank 0 has saved"),
        ("localsgd:every=2,encrypted=false", False, "what its model had moved"),
        ("ripples:encrypted=false", False, "what its model had moved"),
        ("adpsgd:encrypted=false", False, "what its model had moved"),
        ("canary:encrypted=false", False, "call model.synchronize() on all ranks before"),
    ],
)
def test_training_resumed_without_what_it_needs_says_so_once(
    strategy: str, met: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    resumed(strategy, own=False, before=wingbeat.synchronize if met else None)
    lines = [r.getMessage() for r in caplog.records if "load_state_dict()" in r.getMessage()]
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert ("moved" in lines[0]) == (said.startswith("what its model"))


@pytest.mark.parametrize(
    "strategy",
    [
        "canary:s=2,p=none,compression=fp32,encrypted=false",
        "localsgd:every=2,average_state=true,encrypted=false",
    ],
)
def test_training_resumed_with_what_all_share_lacks_nothing(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    resumed(strategy, own=False, before=lambda model: model.synchronize())
    assert "load_state_dict()" not in caplog.text


# -- optimizers that step in another way ---------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as the widely used implementation has it."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.02)
        self.param_groups = self.base_optimizer.param_groups

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for param in self._params():
            self.state[param]["old_p"] = param.data.clone()
            param.add_(param.grad, alpha=self.defaults["rho"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for param in self._params():
            param.data = self.state[param]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        self.first_step(zero_grad=True)
        loss = torch.enable_grad()(closure)()
        self.second_step()
        return loss


def by_closure(model: Any, optimizer: Any, step: int) -> None:
    """The closure evaluates uphill only: the first gradients are there already."""

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(batch(step, 0)).square().mean()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)
    optimizer.zero_grad()


def by_hand(model: Any, sam: Any, step: int) -> None:
    """Both steps called by the loop, as most scripts do."""
    backward(model, 0, step)
    sam.first_step(zero_grad=True)
    backward(model, 0, step)
    sam.second_step(zero_grad=True)


ALIKE = (
    "localsgd:every=1,encrypted=false",
    "localsgd:every=1,overlap=true,encrypted=false",
    "diloco:every=2,outer_lr=1.0,outer_momentum=0.0,encrypted=false",
    "diloco:every=2,delay=1,outer_lr=1.0,outer_momentum=0.0,encrypted=false",
    "ripples:encrypted=false",
    "ripples:overlap=true,encrypted=false",
)
"""With which workers of the same batches train as one does."""


@pytest.mark.parametrize("loop", [by_closure, by_hand])
@pytest.mark.parametrize("strategy", ALIKE)
def test_sharpness_aware_steps_are_those_of_one_process(strategy: str, loop: Any) -> None:
    """No average takes the weights that are uphill, or puts its own in place of those kept."""
    alone = net()
    plain = Sam(alone.parameters())
    for step in range(4):
        loop(alone, plain, step)

    def body(world: Any) -> Any:
        model = net()
        sam = Sam(model.parameters())
        steps = sam if loop is by_closure else sam.base_optimizer
        model, steps = wingbeat.distribute(model, steps, parse(strategy), world=world)
        for step in range(4):
            loop(model, steps if loop is by_closure else sam, step)
        before = weights(model)
        wingbeat.synchronize(model)
        return before, weights(model)

    for before, after in on(2, body, timeout=PATIENCE):
        assert_same(before, weights(alone), 1e-5)
        assert_same(after, weights(alone), 1e-5)


@pytest.mark.parametrize("strategy", AVERAGING)
def test_step_of_an_optimizer_inside_of_the_distributed_one_is_refused(strategy: str) -> None:
    """It would be made, and no average after it."""

    def body(world: Any) -> None:
        model = net()
        model, sam = wingbeat.distribute(
            model, Sam(model.parameters()), parse(strategy), world=world
        )
        backward(model, 0, 0)
        sam.first_step(zero_grad=True)
        backward(model, 0, 0)
        said = r"Sam\.base_optimizer.*distribute\(model, optimizer\.base_optimizer"
        with pytest.raises(UsageError, match=said):
            sam.second_step()

    on(2, body, timeout=PATIENCE)


def test_optimizers_that_step_in_backward_are_averaged_at_the_distributed_ones_steps() -> None:
    def body(world: Any) -> Any:
        model = net()
        params = list(model.parameters())
        inner = {p: torch.optim.SGD([p], lr=0.1) for p in params}

        def step(param: Any) -> None:
            inner[param].step()
            inner[param].zero_grad()

        for param in params:
            param.register_post_accumulate_grad_hook(step)
        model, optimizer = wingbeat.distribute(
            model, sgd(params), parse("localsgd:every=1,encrypted=false"), world=world
        )
        for number in range(3):
            backward(model, world.rank, number)
            optimizer.step()
        return weights(model)

    models = [net(), net()]
    for number in range(3):
        for rank, model in enumerate(models):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            backward(model, rank, number)
            optimizer.step()
        with torch.no_grad():
            for one, other in zip(*(m.parameters() for m in models), strict=True):
                one.copy_((one + other) / 2)
                other.copy_(one)
    for found in on(2, body, timeout=PATIENCE):
        assert_same(found, weights(models[0]), 1e-5)
