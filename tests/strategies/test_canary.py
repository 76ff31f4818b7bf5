"""Training under bounded staleness: sums, the bound, and unsupported uses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wingbeat
from helpers.training import assert_same, backward, batch, engine, net, on, sgd, train, weights
from helpers.waiting import is_collected
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.messages.frames import Limits
from wingbeat_lab.bench import models

SIZE = 4
PLAIN: dict[str, Any] = {"s": 2, "p": None, "compression": "fp32", "encrypted": False}


def canary(**options: Any) -> wingbeat.Strategy:
    return wingbeat.Canary(**{**PLAIN, **options})


def made(world: Any, strategy: Any = None, make: Any = sgd, model: Any = None) -> tuple[Any, Any]:
    model = net() if model is None else model
    strategy = canary(s=0) if strategy is None else strategy
    return wingbeat.distribute(model, make(model.parameters()), strategy, world=world)


def communication(model: Any) -> Any:
    return engine(model).runtime.exchange._communication


def test_canary_default_p_with_few_layers_is_proportional(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="wingbeat")

    def worker(world: Any) -> int:
        strategy = wingbeat.Canary(encrypted=False)
        model, _ = made(world, strategy, lambda params: torch.optim.SGD(params, 0.1), Layers())
        p: int = engine(model).runtime.exchange.machine.bound.p
        return p

    assert on(2, worker) == [2, 2]  # of 4, as 6 of 10
    assert "4 colayers: p=2, s=18, in_flight=2" in caplog.text


class Layers(nn.Module):
    """Layers of one parameter each, with given gradients that are whole numbers."""

    SIZES = (5, 3, 7, 2)

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, size, bias=False) for size in sizes)
        with torch.no_grad():
            for param in self.parameters():
                param.zero_()
        self.before: Callable[[int], object] = lambda layer: None

    def forward(self, numbers: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(())
        for number, (layer, given) in enumerate(zip(self.layers, numbers, strict=True)):
            weight: Any = layer.weight
            product = (weight * given).sum()
            product.register_hook(functools.partial(self._reached, number))
            total = product + 1 * total
        return total

    def _reached(self, layer: int, _grad: Tensor) -> None:
        self.before(layer)


def given(step: int, rank: int, sizes: Sequence[int] = Layers.SIZES) -> list[Tensor]:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-9, 10, (size, 1), generator=rng).float() for size in sizes]


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def iterate(model: Any, optimizer: Any, numbers: Sequence[Tensor]) -> None:
    optimizer.zero_grad()
    model(numbers).backward()
    optimizer.step()


def repeat(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        iterate(model, optimizer, given(step, 1))


def total(
    each: Sequence[tuple[int, int]], size: int, sizes: Sequence[int] = Layers.SIZES
) -> dict[str, Tensor]:
    """Return the weights after the gradients of these (step, rank), exact in any order."""
    found = weights(Layers(sizes))
    for step, rank in each:
        for weight, gradient in zip(found.values(), given(step, rank, sizes), strict=True):
            weight -= 0.5 * gradient / size
    return found


# -- synchronous -------------------------------------------------------------------------


def one_process(steps: int, size: int) -> tuple[Any, Any]:
    """Train on the sum of scaled gradients, added in the order of ranks."""
    model = net()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        sums: list[Any] = [None] * len(list(model.parameters()))
        for rank in range(size):
            optimizer.zero_grad()
            backward(model, rank, step)
            for i, param in enumerate(model.parameters()):
                if param.grad is not None:
                    part = param.grad * (1 / size)
                    sums[i] = part if sums[i] is None else sums[i] + part
        for param, gradient in zip(model.parameters(), sums, strict=True):
            param.grad = gradient
        optimizer.step()
        scheduler.step()
    return model, optimizer


@pytest.mark.parametrize(("size", "colayers"), [(2, 1), (3, 10)])
def test_canary_bsp_equals_synchronous_training_bitwise(size: int, colayers: int) -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=0, colayers=colayers))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):
            train(model, optimizer, [step])
            scheduler.step()
        state = copy.deepcopy(optimizer.state_dict()["state"])  # without waiting for others
        found = weights(model), state
        wingbeat.release(model, optimizer)
        return found

    model, optimizer = one_process(5, size)
    for found in on(size, body):
        assert_same(found, (weights(model), optimizer.state_dict()["state"]))


def test_canary_no_sync_gradients_are_sent_once() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, make=plain_sgd, model=Layers())
        for step in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                model(given(2 * step, world.rank)).backward()
            model(given(2 * step + 1, world.rank)).backward()
            optimizer.step()
        found = weights(model)
        wingbeat.release(model, optimizer)
        return found

    wanted = total([(step, rank) for step in range(4) for rank in range(2)], 2)
    for found in on(2, body):
        assert_same(found, wanted)


def test_canary_unused_parameters_are_updated_as_by_ddp() -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world)
        before = weights(model)
        for step in range(2):
            model.use_spare = world.rank == 0 and step == 1
            train(model, optimizer, [step])
            if step == 0:
                assert torch.equal(model.spare.weight, before["spare.weight"])
        found = weights(model)
        assert not torch.equal(found["spare.weight"], before["spare.weight"])
        wingbeat.release(model, optimizer)
        return found

    first, *others = on(2, body)
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("used", [True, False])
def test_canary_zero_gradients_count_as_gradients(used: bool) -> None:
    """An unused parameter continues with its momentum, as under DDP."""

    def trained(model: Any, optimizer: Any, ranks: Sequence[int]) -> dict[str, Tensor]:
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            for rank in ranks:
                model.use_spare = used and step == 0 and rank == 1
                (model(batch(step, rank)).square().mean() / len(ranks)).backward()
            optimizer.step()
        return weights(model)

    def body(world: Any) -> Any:
        model, optimizer = made(world)
        found = trained(model, optimizer, [world.rank])
        wingbeat.release(model, optimizer)
        return found

    model = net()
    wanted = trained(model, sgd(model.parameters()), [0, 1])
    for found in on(2, body):
        assert_same(found, wanted, 1e-5)


# -- asynchronous -------------------------------------------------------------------------


@pytest.mark.parametrize("s", [0, 1, None])
def test_canary_synchronize_applies_each_gradient_once(s: int | None) -> None:
    """Also with different numbers of batches; twice, with synchronize() between."""
    counts = [[6, 3, 5, 4], [1, 4, 2, 0]]

    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=s), plain_sgd, Layers())
        found = []
        for epoch, batches in enumerate(counts):
            for step in range(batches[world.rank]):
                iterate(model, optimizer, given(10 * epoch + step, world.rank))
            model.synchronize()
            found.append(weights(model))
        wingbeat.release(model, optimizer)
        assert type(model) is Layers
        return found

    each: list[tuple[int, int]] = []
    results = on(SIZE, body)
    for epoch, batches in enumerate(counts):
        each += [(10 * epoch + n, rank) for rank in range(SIZE) for n in range(batches[rank])]
        for found in results:
            assert_same(found[epoch], total(each, SIZE))


def held_up(strategy: Any, steps: int, colayers_before: int) -> list[Any]:
    """Rank 1 pauses in its first backward until rank 0 has made some steps, then makes another."""
    go_on = threading.Event()

    def body(world: Any) -> Any:
        model, optimizer = made(world, strategy, plain_sgd, Layers())
        if world.rank == 1:
            last = len(Layers.SIZES) - 1 - colayers_before

            def wait(layer: int) -> None:
                if layer == last:
                    assert go_on.wait(20.0)

            model.before = wait
            iterate(model, optimizer, given(0, 1))
            model.before = lambda layer: None
            iterate(model, optimizer, given(1, 1))  # which is not outdated
        else:
            made_here = 0
            try:
                while made_here < steps:
                    iterate(model, optimizer, given(made_here, 0))
                    made_here += 1
            except PeerError as error:
                return str(error), made_here
            finally:
                go_on.set()
        model.synchronize()
        machine = communication(model).machine
        found = weights(model), machine.last_dropped, machine.pulls
        wingbeat.release(model, optimizer)
        return found

    return on(2, body)


def test_canary_outdated_worker_drops_its_iteration() -> None:
    strategy = canary(s=2, p=3)
    (mine, *nothing), (theirs, dropped, pulls) = held_up(strategy, steps=9, colayers_before=1)
    assert_same(mine, theirs)
    assert nothing == [None, 0]
    assert dropped == (0, 1)
    assert pulls == 1  # five of the nine rounds may be buffered
    wanted = total([*((step, 0) for step in range(9)), (1, 1)], 2)
    sent = given(0, 1)[-1]
    wanted["layers.3.weight"] -= 0.5 * sent / 2  # the colayer that was sent counts
    assert_same(mine, wanted)


def test_canary_worker_with_p_colayers_is_waited_for() -> None:
    (said, made_here), _ = held_up_and_failing(canary(s=2, p=3), colayers_before=3)
    assert "cannot begin the next iteration after 0.5 s: waiting for rank 1" in said
    assert made_here < 4


@pytest.mark.parametrize("s", [0, 2])
def test_canary_ssp_workers_stay_within_bound(s: int) -> None:
    (said, made_here), _ = held_up_and_failing(canary(s=s), colayers_before=0)
    assert "waiting for rank 1" in said
    assert made_here == s


def test_canary_asp_neither_waits_nor_drops() -> None:
    (mine, *nothing), (theirs, *dropped) = held_up(canary(s=None), steps=9, colayers_before=1)
    assert nothing == dropped == [None, 0]
    assert_same(mine, theirs)
    assert_same(mine, total([*((step, 0) for step in range(9)), (0, 1), (1, 1)], 2))


def held_up_and_failing(strategy: Any, colayers_before: int) -> list[Any]:
    """As `held_up`, but rank 0 gives up: rank 1 continues, or ends if loss is not tolerated."""
    go_on, there = threading.Event(), threading.Event()

    def body(world: Any) -> Any:
        model, optimizer = made(world, strategy, plain_sgd, Layers())
        mine = communication(model)
        if world.rank == 1:
            last = len(Layers.SIZES) - 1 - colayers_before

            def wait(layer: int) -> None:
                if layer == last:
                    there.set()
                    go_on.wait(20.0)

            model.before = wait
            left = "rank 1: lost a worker before training ended: rank 0 has left"
            ends = (
                pytest.raises(PeerError, match=left) if strategy.exchange.s == 0 else nullcontext()
            )
            with ends:
                repeat(model, optimizer, 3)
            return None
        assert there.wait(20.0)  # rank 1 has sent its colayers
        mine._timeout = 0.05
        made_here = 0
        try:
            for step in range(9):
                iterate(model, optimizer, given(step, 0))
                made_here += 1
        except PeerError as error:
            spent = engine(model).meter.spent
            assert spent["exchange"] > 0.4 > spent["update"]
            mine.close(quick=True)
            go_on.set()
            return str(error), made_here
        raise AssertionError("nobody was waited for")

    return on(2, body)


# -- through a codec ----------------------------------------------------------------------


def test_canary_codec_sums_and_residuals_add_up_to_gradients() -> None:
    wire, sizes = wingbeat.Sketch(bits=2, auto_disable=False), (90, 60)

    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=1, compression=wire), plain_sgd, Layers(sizes))
        for step in range(6):
            iterate(model, optimizer, given(step, world.rank, sizes))
        model.synchronize()
        found = weights(model), optimizer.residual_state_dict()["residuals"]
        wingbeat.release(model, optimizer)
        return found

    (mine, kept), (theirs, other) = on(2, body)
    assert_same(mine, theirs)
    everything = total([(step, rank) for step in range(6) for rank in range(2)], 2, sizes)
    for name, wanted in everything.items():
        lacking = (kept[name] + other[name]).reshape(wanted.shape)
        torch.testing.assert_close(mine[name] - 0.5 * lacking, wanted, rtol=1e-4, atol=1e-3)
    assert any(bool(residual.any()) for residual in kept.values())


def test_canary_dropped_iteration_leaves_residual_unchanged() -> None:
    (mine, *_), (theirs, dropped, _) = held_up(
        canary(s=2, p=3, compression=wingbeat.Sketch(auto_disable=False)),
        steps=6,
        colayers_before=1,
    )
    assert dropped == (0, 1)
    assert_same(mine, theirs)


# -- real data ----------------------------------------------------------------------------


def test_canary_learns_digits() -> None:
    """The order of sums differs in each run; all replicas end equal."""
    images, answers, test_images, test_answers = models.data()
    start = models.network(0).state_dict()

    def body(world: Any) -> tuple[float, dict[str, Tensor]]:
        model = models.network(0)
        model.load_state_dict(start)
        model, optimizer = made(world, canary(s=2), plain_sgd, model)
        optimizer.param_groups[0]["lr"] = 0.2
        own = models.batches(images, answers, rank=world.rank, workers=2, seed=1)
        for _, (x, y) in zip(range(250), own, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.synchronize()
        staleness, exchanged = engine(model).meter.sections
        assert staleness.cells["iteration"] >= 100
        assert len(exchanged.cells) == 1 + 4, "a row number, and a cell for each colayer"
        found = models.accuracy(model, test_images, test_answers), weights(model)
        wingbeat.release(model, optimizer)
        return found

    (accuracy, mine), (_, theirs) = on(2, body)
    assert accuracy > 0.5, "ten digits: a tenth by chance"
    assert_same(mine, theirs)


# -- state --------------------------------------------------------------------------------


def test_canary_training_continues_from_loaded_state() -> None:
    loading = threading.Event()

    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=None), plain_sgd, Layers())
        if world.rank == 1:
            assert loading.wait(20.0)
        for step in range(3):
            iterate(model, optimizer, given(step, world.rank))
        loading.set()
        model.load_state_dict(Layers().state_dict())  # no earlier round is applied after it
        optimizer.load_state_dict(plain_sgd(Layers().parameters()).state_dict())
        iterate(model, optimizer, given(7, world.rank))
        model.synchronize()
        found = weights(model)
        wingbeat.release(model, optimizer)
        return found

    for found in on(2, body):
        assert_same(found, total([(7, 0), (7, 1)], 2))


def test_canary_buffers_are_local_until_synchronize() -> None:
    """Rank 0 begins when rank 1 has trained; in lockstep rank 1 would wait for its buffers."""
    trained = threading.Event()

    def body(world: Any) -> Any:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        model, optimizer = made(world, canary(s=None), plain_sgd, model)
        assert engine(model).control is None
        if world.rank == 0:
            assert trained.wait(10.0)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().mean().backward()
            optimizer.step()
        trained.set()
        before = model[1].running_mean.clone()
        model.synchronize()
        found = before, model[1].running_mean.clone()
        wingbeat.release(model, optimizer)
        return found

    (own, mine), (other, theirs) = on(2, body)
    assert not torch.equal(own, other)
    assert torch.equal(mine, own)
    assert torch.equal(theirs, own)


def test_canary_deleted_model_is_freed_and_peers_are_served() -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=None), plain_sgd, Layers())
        iterate(model, optimizer, given(0, world.rank))
        reference = weakref.ref(model)
        del model, optimizer
        return is_collected(reference)

    assert on(2, body) == [True, True]


# -- uses that an all-reduce supports ------------------------------------------------------


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in an option, as schedule-free ones do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.defaults["k"] = self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None, factor: float = 1.0) -> Any:
        self.param_groups[0]["k"] += 1
        self.param_groups[0]["lr"] = factor * 0.1 / self.param_groups[0]["k"]
        return super().step(closure)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


def rate_in_a_tensor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=torch.tensor(0.1))


def some(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[1:], lr=0.1)


def simply(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def by_closure(model: Any, optimizer: Any, x: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def sharpness_aware(model: Any, optimizer: Any, x: Tensor) -> None:
    """Train as SAM does: the first gradient moves weights, the second one makes the step."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    moved = [(p, p.grad * 0.05) for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for param, by in moved:
            param.add_(by)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for param, by in moved:
            param.sub_(by)
    optimizer.step()


def clip_and_scale(model: Any, optimizer: Any, x: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.clip_grad_norm_(0.05)
    scaler.step(optimizer)


def accumulate(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    model(x + 1).square().mean().backward()
    optimizer.step()
    optimizer.step()


def with_an_argument(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step(factor=0.5)


@pytest.mark.parametrize(
    ("make", "play"),
    [
        (rate_in_a_tensor, simply),
        (Counting, simply),
        (some, simply),
        (lbfgs, by_closure),
        (sgd, sharpness_aware),
        (sgd, clip_and_scale),
        (sgd, accumulate),
        (Counting, with_an_argument),
    ],
)
def test_canary_synchronous_supports_what_allreduce_does(make: Any, play: Any) -> None:
    def body(world: Any, strategy: Any) -> Any:
        model, optimizer = made(world, strategy, make)
        for step in range(4):
            model.use_spare = step == 2 and world.rank == 1
            play(model, optimizer, batch(step, world.rank))
        model.synchronize()
        found = weights(model)
        wingbeat.release(model, optimizer)
        return found

    (wanted, _) = on(2, lambda world: body(world, wingbeat.AllReduce()))
    first, second = on(2, lambda world: body(world, canary(s=0)))
    assert_same(first, second)
    assert_same(first, wanted, 1e-6)


def test_canary_synchronous_skipped_step_is_found_by_all() -> None:
    def body(world: Any) -> str:
        model, optimizer = made(world, canary(s=0))
        with pytest.raises(UsageError, match=r"steps \(rank 0 3, rank 1 2\)") as caught:
            skip(model, optimizer, world.rank)
        return str(caught.value)

    on(2, body)


def skip(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(5):
        optimizer.zero_grad()
        backward(model, rank, step)
        if step != 2 or rank == 0:
            optimizer.step()


def test_canary_synchronous_unrepeatable_steps_are_rejected_on_all() -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world, canary(s=0))
        for step in range(2 + world.rank):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            optimizer.clip_grad_norm_(0.01)
            optimizer.step()
        with pytest.raises(UsageError, match="a worker that has run out of batches repeats"):
            model.synchronize()

    on(2, body)


# -- unsupported uses ---------------------------------------------------------------------


def after_backward(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model, 0, 0)


def clipped(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clipped_by_the_optimizer(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    optimizer.clip_grad_norm_(1.0)


def read(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    print(model.head.weight.grad.norm())


def replaced(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    model.head.weight.grad = torch.ones(3, 7)
    optimizer.step()


def dropped(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    optimizer.zero_grad()
    backward(model, 0, 0)


def dropped_and_stepped(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    optimizer.zero_grad()
    optimizer.step()


def twice(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    backward(model, 0, 0)


def stepped_twice(model: Any, optimizer: Any) -> None:
    train(model, optimizer, [0], 0)
    optimizer.step()


def checkpointed_reentrantly(model: Any, optimizer: Any) -> None:
    hidden = torch.tanh(model.first(batch(0, 0)))
    for layer in (model.second, model.head):
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    hidden.sum().backward()


def without_zero_grad(model: Any, optimizer: Any) -> None:
    train(model, optimizer, [0], 0)
    backward(model, 0, 0)


def only_under_no_sync(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        backward(model, 0, 0)
    optimizer.step()


def scaled(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(batch(0, 0)).mean()).backward()
    scaler.step(optimizer)


def with_a_closure(model: Any, optimizer: Any) -> None:
    optimizer.step(lambda: backward(model, 0, 0))


def joined(model: Any, optimizer: Any) -> None:
    with model.join():
        pass


def flushed_between(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    model.synchronize()


def loaded_between(model: Any, optimizer: Any) -> None:
    after_backward(model, optimizer)
    model.load_state_dict(net().state_dict())


def after_an_exception(model: Any, optimizer: Any) -> None:
    def fail(_grad: Tensor) -> None:
        raise KeyError("no memory")

    hidden = model.first(batch(0, 0))
    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        model.head(model.second(torch.tanh(hidden))).sum().backward()
    optimizer.zero_grad()
    backward(model, 0, 0)


def changed_after_a_step(model: Any, optimizer: Any) -> None:
    train(model, optimizer, [0], 0)
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)
    train(model, optimizer, [1], 0)


def changed_before_a_flush(model: Any, optimizer: Any) -> None:
    train(model, optimizer, [0], 0)
    nn.init.zeros_(model.head.bias)
    model.synchronize()


def forgotten_state(model: Any, optimizer: Any) -> None:
    train(model, optimizer, [0, 1], 0)
    optimizer.state.clear()
    train(model, optimizer, [2], 0)


REFUSED: dict[Callable[[Any, Any], None], str] = {
    clipped: "was read, changed or added to after backward",
    clipped_by_the_optimizer: r"clip_grad_norm_\(\): under bounded staleness",
    read: "the gradient of parameter 'head.weight' was read",
    replaced: "gradients were changed or dropped after backward",
    dropped: "a second backward before optimizer.step",
    dropped_and_stepped: "gradients were changed or dropped after backward",
    twice: "a backward has added to the gradient of parameter '.*', or read it",
    checkpointed_reentrantly: r"a backward has added to .*use checkpoint\(.*use_reentrant=False",
    stepped_twice: r"a second optimizer.step\(\) after one backward",
    without_zero_grad: r"without zero_grad\(\)",
    only_under_no_sync: r"has not been sent: the last backward .* outside of no_sync\(\)",
    scaled: "GradScaler under bounded staleness",
    with_a_closure: r"optimizer.step\(closure\) under bounded staleness",
    joined: r"join\(\) under bounded staleness",
    flushed_between: r"between backward\(\) and step\(\)",
    loaded_between: r"between backward\(\) and step\(\)",
    changed_after_a_step: "parameter 'head.weight' was changed after optimizer.step",
    changed_before_a_flush: "parameter 'head.bias' was changed after optimizer.step",
    forgotten_state: "optimizer's state of parameter '.*' was changed after optimizer.step",
    after_an_exception: "a part of it if an exception has cut it short",
}


@pytest.mark.parametrize("act", REFUSED, ids=lambda act: act.__name__)
def test_canary_unsupported_use_is_rejected(act: Callable[[Any, Any], None]) -> None:
    def body(world: Any) -> str:
        model, optimizer = made(world, canary(s=None))
        if world.rank:
            return ""
        with pytest.raises(UsageError, match=REFUSED[act]) as caught:
            act(model, optimizer)
        return str(caught.value)

    said, _ = on(2, body)
    assert "\n" not in said


@pytest.mark.parametrize("act", REFUSED, ids=lambda act: act.__name__)
def test_canary_release_after_error_ends_iteration(act: Callable[[Any, Any], None]) -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=None))
        with pytest.raises(UsageError):
            act(model, optimizer)
        wingbeat.release(model, optimizer)
        model, optimizer = made(world, canary(s=None), model=model)
        train(model, optimizer, range(2))
        model.synchronize()
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second)


@pytest.mark.parametrize("s", [0, 2])
def test_canary_weights_may_be_changed_after_flush(s: int) -> None:
    """After a flush, and with s=0 after each step, equally on all workers."""

    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=s))
        for step in range(3):
            train(model, optimizer, [step])
            if s:
                model.synchronize()
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.3, 0.3)
        model.synchronize()
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second)
    assert max(float(weight.abs().max()) for weight in first.values()) == pytest.approx(0.3)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("s", [1, 2])
def test_canary_changed_param_groups_are_rejected_on_all(s: int, groups: int) -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world, canary(s=s))
        train(model, optimizer, [0])
        (group,) = optimizer.param_groups
        first, *others = group["params"]
        parts = [[*others, first]] if groups == 1 else [[first], others]
        optimizer.param_groups = [{**group, "params": part} for part in parts]
        with pytest.raises(UsageError, match="hold other parameters than at distribute"):
            train(model, optimizer, [1])

    on(2, body)


def train_and_flush(model: Any, optimizer: Any) -> None:
    train(model, optimizer, range(3))
    model.synchronize()


def test_canary_optimizer_that_changes_options_is_rejected_on_all() -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world, canary(s=1), Counting)
        with pytest.raises(UsageError, match=r"Counting\.step\(\) changes its option"):
            train_and_flush(model, optimizer)

    on(2, body)


class Ignoring(Layers):
    """A model that hides a trained parameter from synchronisation, as DDP permits."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["layers.0.weight"]


@pytest.mark.parametrize(
    ("model", "make", "strategy", "words"),
    [
        (net, lbfgs, canary(), "LBFGS evaluates the loss in its step"),
        (net, rate_in_a_tensor, canary(), r"Adam: lr=tensor\(0.1000\) of group 0"),
        (net, some, canary(), "parameter 'scale' is not the optimizer's"),
        (Ignoring, plain_sgd, canary(), "1 parameters of the optimizer are not synchronised"),
        (Layers, plain_sgd, canary(s=2, p=5), "p=5 of 4 colayers; allowed: 1 to 4"),
        (
            lambda: net().bfloat16(),
            plain_sgd,
            canary(),
            "is torch.bfloat16: bounded staleness",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
            plain_sgd,
            canary(colayers=1),
            r"colayers=1: '1\.\w+' \(float64 on cpu\) and '0",
        ),
    ],
)
def test_canary_unsupported_model_is_rejected_on_all(
    model: Any, make: Any, strategy: Any, words: str
) -> None:
    def body(world: Any) -> None:
        with pytest.raises(UsageError, match=words):
            made(world, strategy, make, model())

    on(2, body)


def test_canary_with_too_many_workers_for_its_messages_is_refused_unless_synchronous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = dataclasses.replace(Limits(), message=200)
    monkeypatch.setattr("wingbeat.methods.bounded_staleness.exchange.Limits", lambda: limits)

    def body(world: Any) -> None:
        with pytest.raises(UsageError, match=r"Canary with 2 workers .* above the limit of 200"):
            made(world, canary(s=2))
        made(world, canary(s=0))

    on(2, body)


def test_canary_single_worker_trains_locally() -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world, canary(s=2))
        optimizer.zero_grad()
        backward(model, 0, 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.synchronize()
        return weights(model)

    model = net()
    optimizer = sgd(model.parameters())
    backward(model, 0, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert_same(on(1, body), [weights(model)])
