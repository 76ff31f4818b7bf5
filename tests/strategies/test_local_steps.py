"""Models that are averaged: nothing is lost, whoever meets whom, and what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import assert_same, batch, engine, net, sgd, train, weights
from wingbeat import parts
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.pair_machine import is_active
from wingbeat.strategies import parse
from wingbeat.transport import loopback

SIZE, STEPS = 4, 9
PATIENCE = 20.0

GROUPS = {
    policy: wingbeat.Ripples(policy=policy, size=2, encrypted=False)
    for policy in ("smart", "random", "buffered", "divided", "inter-intra", "static")
}
OTHERS: dict[str, Any] = {
    "overlap": wingbeat.Ripples(overlap=True, encrypted=False),
    "pairs": wingbeat.ADPSGD(encrypted=False),
    "pairs at rest": wingbeat.ADPSGD(overlap=False, encrypted=False),
    "every": wingbeat.Ripples(every=3, overlap=True, encrypted=False),
    "bf16": wingbeat.Ripples(compression="bf16", encrypted=False),
    "bf16 of all": wingbeat.LocalSGD(every=2, overlap=True, compression="bf16", encrypted=False),
    "local": wingbeat.LocalSGD(every=4, encrypted=False),
    "local overlap": wingbeat.LocalSGD(every=2, overlap=True, encrypted=False),
    "outer": wingbeat.DiLoCo(every=4, outer_lr=1, outer_momentum=0, encrypted=False),
    "fragments": wingbeat.DiLoCo(
        every=4, fragments=3, delay=1, outer_lr=1, outer_momentum=0, encrypted=False
    ),
}


class Given(nn.Module):
    """A model whose gradients are what it is given, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, size, bias=False) for size in (4, 2, 5))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.layers, gradients, strict=True)
        return torch.stack([(layer.weight * g).sum() for layer, g in pairs]).sum()


def gradients(step: int, rank: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-9, 10, (size, 3), generator=rng).float() for size in (4, 2, 5)]


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.125)


def made(world: Any, strategy: Any, make: Any = sgd, model: Any = None) -> tuple[Any, Any]:
    model = net() if model is None else model
    return wingbeat.distribute(model, make(model.parameters()), strategy, world=world)


def on(size: int, body: Callable[[Any], Any], timeout: float = 60.0) -> list[Any]:
    worlds = loopback.worlds(size, timeout=timeout)
    try:
        return loopback.run(worlds, body)
    finally:
        for world in worlds:
            world.close()


def drive(model: Any, optimizer: Any, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(gradients(step, rank)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", [*GROUPS, *OTHERS])
def test_each_gradient_is_in_the_mean_of_all_models_once(name: str) -> None:
    """Averages leave the mean of all models as it is; so plain SGD leads where it would alone."""
    strategy = GROUPS.get(name) or OTHERS[name]
    torch.manual_seed(0)
    first = Given()

    def body(world: Any) -> tuple[dict[str, Tensor], Tensor]:
        model, optimizer = made(world, strategy, plain, copy.deepcopy(first))
        model.seen.fill_(world.rank)
        drive(model, optimizer, world.rank, STEPS)
        wingbeat.synchronize(model)
        found = weights(model), model.seen.clone()
        wingbeat.release(model, optimizer)
        return found

    found = on(SIZE, body)
    for each, seen in found:
        assert_same(each, found[0][0])  # the same bits
        assert seen.tolist() == [1.5, 1.5]
    for number, (mine, start) in enumerate(
        zip(found[0][0].values(), weights(first).values(), strict=True)
    ):
        moved = sum(gradients(s, r)[number] for s in range(STEPS) for r in range(SIZE))
        torch.testing.assert_close(mine, start - 0.125 * moved / SIZE)


@pytest.mark.parametrize("strategy", ["localsgd:every=1", "ripples:policy=random", "adpsgd"])
def test_steps_below_the_last_bit_of_bf16_add_up(strategy: str) -> None:
    """A thousandth of a weight is less than what rounding takes: it would stand still."""

    def body(world: Any) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        text = f"{strategy}{',' if ':' in strategy else ':'}compression=bf16,encrypted=false"
        model, optimizer = made(world, parse(text), plain, model)
        for _ in range(40):
            model.weight.grad = torch.full((1, 1), 1 / 125)
            optimizer.step()
        wingbeat.synchronize(model)
        return float(model.weight.detach())

    for found in on(3, body):
        assert found == pytest.approx(1 - 40 / 1000, abs=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy",
    [
        wingbeat.LocalSGD(every=1, encrypted=False),
        wingbeat.DiLoCo(every=1, outer_lr=1, outer_momentum=0, encrypted=False),
    ],
)
def test_average_after_each_momentum_step_equals_ddp(size: int, strategy: Any) -> None:
    def body(world: Any, strategy: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, strategy)
        train(model, optimizer, range(6))
        return weights(model)

    mine = on(size, lambda world: body(world, strategy))
    ddps = on(size, lambda world: body(world, wingbeat.AllReduce()))
    for each in mine:
        assert_same(each, ddps[0], tolerance=1e-5)


@pytest.mark.parametrize(
    "policy", ["smart", "random", pytest.param("static", marks=pytest.mark.slow)]
)
def test_workers_may_have_different_numbers_of_batches(policy: str) -> None:
    strategy = wingbeat.Ripples(policy=policy, encrypted=False)

    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, strategy)
        with model.join():
            train(model, optimizer, range(3 + 2 * world.rank))
        return weights(model)

    found = on(SIZE, body)
    for each in found:
        assert_same(each, found[0])


def test_gradients_stay_local() -> None:
    """Who clips, accumulates, uses closures or several backwards meets nothing unusual."""

    def body(world: Any) -> float:
        model, optimizer = made(world, wingbeat.LocalSGD(every=2, encrypted=False))
        alone = copy.deepcopy(model)  # a plain one
        x = batch(0, world.rank)
        with model.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        for _ in range(2):
            alone(x).square().mean().backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)
        norm = optimizer.clip_grad_norm_(0.01)
        assert norm == torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        first = optimizer.step(closure).item()
        return float(first - optimizer.step(closure).item())

    assert all(gained > 0 for gained in on(2, body))


def test_two_models_of_one_process_are_averaged_separately() -> None:
    def body(world: Any) -> list[dict[str, Tensor]]:
        strategy = wingbeat.LocalSGD(every=2, encrypted=False)
        pairs = [made(world, strategy, plain, net(seed)) for seed in (0, 1)]
        for step in range(4):
            for model, optimizer in pairs:
                train(model, optimizer, [step])
        for model, _ in pairs:
            wingbeat.synchronize(model)
        return [weights(model) for model, _ in pairs]

    found = on(3, body)
    for each in found:
        assert_same(each, found[0])


def test_loaded_model_is_trained_from_there() -> None:
    """Also by an outer optimizer, whose gradient is how far workers are from what they shared."""

    def body(world: Any) -> float:
        strategy = wingbeat.DiLoCo(every=2, encrypted=False)
        model, optimizer = made(world, strategy, plain)
        train(model, optimizer, range(3))
        state = {name: torch.full_like(value, 0.25) for name, value in net().state_dict().items()}
        model.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        engine(model).runtime.update._outer.kinds()["velocity"].zero_()
        train(model, optimizer, range(4))
        return max(float((value - 0.25).abs().max()) for value in weights(model).values())

    assert on(2, body) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("strategy", "goes_on"),
    [
        (wingbeat.LocalSGD(every=1, encrypted=False), False),
        (wingbeat.LocalSGD(every=1, overlap=True, encrypted=False), True),
        (wingbeat.ADPSGD(encrypted=False), False),
    ],
)
def test_ctrl_c_in_a_wait_loses_no_average(
    strategy: Any, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who catches it may train on, or have all models levelled."""
    torch.manual_seed(0)
    first = Given()

    def body(world: Any) -> tuple[dict[str, Tensor], int]:
        model, optimizer = made(world, strategy, plain, copy.deepcopy(first))
        update = engine(model).update
        drive(model, optimizer, world.rank, 1)
        if world.rank == 0:
            said = functools.partial(world.publish, "interrupted", True)
            interrupt(monkeypatch, update._averager, said)
            optimizer.zero_grad()
            model(gradients(1, 0)).backward()
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            if goes_on:
                optimizer.step()
        else:
            world.read("interrupted", 0)
            drive(model, optimizer, world.rank, 1 + goes_on)
        steps = update.steps
        wingbeat.synchronize(model)
        return weights(model), steps

    (mine, steps), (theirs, _) = on(2, body)
    assert_same(mine, theirs)
    for number, (value, start) in enumerate(
        zip(mine.values(), weights(first).values(), strict=True)
    ):
        grads = [(0, 0), *[(1, 0)] * (steps - 1), (0, 1), (0, 1), *[(1, 1)] * goes_on]
        moved = sum(gradients(*each)[number] for each in grads)
        torch.testing.assert_close(value, start - 0.125 * moved / 2)


def interrupt(monkeypatch: pytest.MonkeyPatch, averager: Any, then: Callable[[], None]) -> None:
    """Have the averager's next wait end as by Ctrl-C, with all that it waits for still to come."""

    def cut(*_: object) -> None:
        monkeypatch.undo()
        then()
        raise KeyboardInterrupt

    exchange = getattr(averager, "_exchange", None)
    if exchange is None:
        monkeypatch.setattr(averager._idle, "wait", cut)
        return
    end = exchange.end

    def ended() -> object:
        end()
        return SimpleNamespace(result=cut)

    monkeypatch.setattr(exchange, "end", ended)


def test_step_after_shutdown_is_refused() -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world, wingbeat.LocalSGD(every=1, encrypted=False), plain)
        train(model, optimizer, [0])
        world.exchange("all have stepped", None)
        engine(model).update._averager.close()
        with pytest.raises(UsageError, match=r"rank \d: wingbeat was shut down"):
            train(model, optimizer, [1])

    on(2, body)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.second.double(), "'second.weight' was float32 .* and is float64"),
        (lambda m: m.head.to(torch.bfloat16), "'head.weight' was float32 .* and is bfloat16"),
        (
            lambda m: setattr(m.scale, "data", m.scale.data.half()),
            r"'scale' was float32 \(\) on cpu at distribute\(\) and is float16",
        ),
        (
            lambda m: setattr(m.head.bias, "data", torch.zeros(5)),
            r"'head.bias' was float32 \(3,\) .* is float32 \(5,\)",
        ),
    ],
)
@pytest.mark.parametrize("outer", [False, True])
def test_changed_dtype_of_parameters_is_refused_before_the_next_step(
    outer: bool, change: Callable[[Any], Any], said: str
) -> None:
    """What stands in the model would be rounded to what it was, average by average."""

    def body(world: Any) -> None:
        strategy = wingbeat.LocalSGD(every=2, encrypted=False)
        if outer:
            strategy = wingbeat.DiLoCo(every=2, encrypted=False)
        model, optimizer = made(world, strategy, plain)
        train(model, optimizer, [0])
        before = copy.deepcopy(weights(model))
        kept = {name: p.data for name, p in model.named_parameters()}
        change(model)
        with pytest.raises(UsageError, match=said):
            optimizer.step()
        with pytest.raises(UsageError, match=said):
            wingbeat.synchronize(model)
        with pytest.raises(UsageError, match="cannot become float64"):
            model.double()
        for name, param in model.named_parameters():
            param.data = kept[name]
            param.grad = None
        assert_same(weights(model), before)  # nothing was made
        train(model, optimizer, [1])
        wingbeat.synchronize(model)

    on(2, body)


def test_single_worker_trains_alone() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, wingbeat.DiLoCo())
        train(model, optimizer, range(3))
        wingbeat.synchronize(model)
        return weights(model)

    model = net()
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
    assert_same(on(1, body)[0], weights(model))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: wingbeat.Ripples(policy="smrt"), "smart"),
        (lambda: wingbeat.Ripples(policy="static", threshold=9), 'only policy="smart" and'),
        (lambda: wingbeat.Ripples(size=1), "size=1"),
        (lambda: wingbeat.Ripples(compression="sketch"), "travel as they are, or rounded"),
        (lambda: wingbeat.LocalSGD(every=0), "every=0"),
        (lambda: wingbeat.DiLoCo(every=4, delay=5), "delay=0 to 4"),
        (lambda: wingbeat.DiLoCo(outer_lr=0), "outer_lr=0"),
        (lambda: wingbeat.DiLoCo(outer_momentum=1), "outer_momentum=1"),
        (
            lambda: wingbeat.Strategy(exchange=parts.Groups(), schedule=parts.WaitFree()),
            "steps on a worker's own gradients, which none of",
        ),
        (lambda: wingbeat.Strategy(schedule="local"), "means of models, which none of"),
        (
            lambda: wingbeat.Strategy(exchange="pairs", schedule="local", update="outer"),
            "at any moment of its round",
        ),
        (
            lambda: wingbeat.Strategy(exchange="groups", schedule="local", plan="merged"),
            "must not change during training",
        ),
    ],
)
def test_invalid_options_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_modules_that_wait_for_all_workers_are_refused_in_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))

    def body(world: Any) -> None:
        with pytest.raises(UsageError, match=r"'1' is a torch\.nn\.SyncBatchNorm"):
            made(world, wingbeat.Ripples(encrypted=False), plain, copy.deepcopy(model))

    on(2, body)


def test_second_model_in_groups_is_refused_while_the_first_exists() -> None:
    """One worker would wait in a group of the one model for whoever waits for it in the other."""

    def body(world: Any) -> None:
        strategy = wingbeat.Ripples(encrypted=False)
        first, optimizer = made(world, strategy)
        with pytest.raises(UsageError, match="one model at a time"):
            made(world, strategy)
        wingbeat.release(first, optimizer)
        second = made(world, strategy)
        forgotten = weakref.ref(engine(second[0]).runtime.update)
        del second
        deadline = time.monotonic() + 30
        while forgotten() is not None:  # a collection in the other thread makes this one a no-op
            assert time.monotonic() < deadline
            gc.collect()
        made(world, strategy)

    on(2, body)


def test_join_that_reports_exhausted_workers_is_refused() -> None:
    def body(world: Any) -> None:
        model, _ = made(world, wingbeat.Ripples(encrypted=False))
        with pytest.raises(UsageError, match="leave it out"):
            model.join(throw_on_early_termination=True).__enter__()

    on(2, body)


def test_closures_may_wait_for_all_workers() -> None:
    """As a metric that is summed over all does. The passive worker is amid its next step, in a
    closure, before the active one asks for the average that it then waits for."""
    together, amid = threading.Barrier(2), threading.Event()

    class Late(torch.optim.SGD):
        """Ends its second step when the passive worker is in its third closure."""

        count = 0

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.count += 1
            assert self.count != 2 or amid.wait(PATIENCE)
            return loss

    def body(world: Any) -> int:
        kind = Late if is_active(world.rank) else torch.optim.SGD
        model = net()
        optimizer: Any = kind(model.parameters(), lr=0.1)
        strategy = wingbeat.ADPSGD(encrypted=False)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                if step == 2 and not is_active(world.rank):
                    amid.set()
                together.wait(PATIENCE)
                optimizer.zero_grad()
                loss: Tensor = model(batch(step, world.rank)).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
        wingbeat.synchronize(model)
        return int(engine(model).update.steps)

    assert on(2, body, timeout=PATIENCE) == [4, 4]
