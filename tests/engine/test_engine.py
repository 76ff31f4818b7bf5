"""What every schedule has from its engine: contexts that end, channels that are given back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import TINY_MB, assert_same, backward, batch, engine, net, on, sgd, weights
from wingbeat.observe.events import stream


def _distributed(world: Any, model: Any) -> tuple[Any, Any]:
    strategy = wingbeat.AllReduce(mb=TINY_MB)
    return wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)


def test_an_exception_ends_no_sync() -> None:
    def body(world: Any) -> torch.Tensor:
        model, _ = _distributed(world, net())
        with pytest.raises(ArithmeticError), model.no_sync():
            raise ArithmeticError
        model(torch.full((2, 6), 1.0 + world.rank)).sum().backward()
        grad: torch.Tensor = model.head.weight.grad
        return grad.clone()

    first, second = on(2, body)
    assert torch.equal(first, second)


def test_release_gives_every_channel_back() -> None:
    """That of the gradients and that of the buffers, whoever still refers to the engine."""

    def body(world: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        model, optimizer = _distributed(world, model)
        inside = engine(model).world
        assert (len(world._channels), len(inside._channels)) == (1, 1)
        wingbeat.release(model, optimizer)
        assert (len(world._channels), len(inside._channels)) == (0, 0)

    on(2, body)


def test_timed_event_whose_body_raises_is_recorded() -> None:
    stream.start(worker=0)
    with pytest.raises(ArithmeticError), stream.timed("wait", bucket=3):
        raise ArithmeticError
    events = stream.stop()
    assert [(event.what, event.bucket) for event in events] == [("wait", 3)]


def test_a_part_with_buffers_only_reads_those_of_the_last_batch() -> None:
    """Called by itself, between a backward and the next forward of the whole."""

    def body(world: Any) -> torch.Tensor:
        model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False))
        model, _ = _distributed(world, model)
        model(
            torch.randn(5, 6, generator=torch.Generator().manual_seed(world.rank))
        ).sum().backward()
        model.eval()
        out: torch.Tensor = model[1](torch.ones(2, 4))
        return out

    first, second = on(2, body)
    assert torch.equal(first, second)


def _taken(lock: Any) -> bool:
    """Whether a thread has the lock: asked from another one."""

    def ask() -> bool:
        free: bool = lock.acquire(blocking=False)
        if free:
            lock.release()
        return not free

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def test_gradients_and_updates_are_serialised() -> None:
    """Several threads run autograd, and any may read a parameter whose update is due."""

    def body(world: Any) -> None:
        model = net()
        seen: list[tuple[str, bool]] = []

        class Watched(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                if watched:
                    seen.append(("update", _taken(watched[0].lock)))
                super().step()

        watched: list[Any] = []
        optimizer: Any = Watched(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed", mb=TINY_MB)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        watched.append(engine(model))
        model.use_spare = True  # so that the first bucket is not complete at the end only
        exchange = watched[0].runtime.exchange
        launch = exchange.start
        exchange.start = lambda *args: (
            seen.append(("launch", _taken(watched[0].lock))),
            launch(*args),
        )
        backward(model, world.rank, 0)
        optimizer.step()
        model.synchronize()
        assert set(seen) == {("launch", True), ("update", True)}

    on(2, body)


def test_forwards_under_no_sync_do_not_synchronise_buffers() -> None:
    def body(world: Any) -> None:
        model: Any = nn.BatchNorm1d(6)
        alone = nn.BatchNorm1d(6)
        model, _ = _distributed(world, model)
        with model.no_sync():
            for step in range(3):
                x = batch(step, world.rank)
                torch.testing.assert_close(model(x), alone(x))
        torch.testing.assert_close(model.running_mean, alone.running_mean)

    on(2, body)


def test_compiled_code_has_no_graph_breaks() -> None:
    """Parameters are brought up to date before it, and not each where it is read."""
    torch.compiler.reset()
    calls: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(len(args))
            return graph.forward(*args)

        return run

    def body(world: Any) -> Any:
        model = net()
        strategy = wingbeat.DeAR(plan="fixed", mb=TINY_MB)
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        run = torch.compile(model, backend=backend) if world.rank == 0 else model
        counts = []
        for step in range(3):
            optimizer.zero_grad()
            run(batch(step, world.rank)).square().mean().backward()
            optimizer.step()
            counts.append(len(calls))
        return counts, weights(model)

    (counts, first), (_, second) = on(2, body)
    assert counts == [1, 2, 3]
    assert_same(first, second)


@pytest.mark.parametrize("strategy", [wingbeat.AllReduce(), wingbeat.DeAR(plan="fixed")], ids=str)
def test_a_model_without_anything_to_synchronise_trains(strategy: Any) -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.own = nn.Linear(2, 2)
            self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.own(self.frozen(x))
            return out

    def body(world: Any) -> bool:
        model: Any = Left()
        before = model.own.bias.detach().clone()
        optimizer = torch.optim.SGD(model.own.parameters(), lr=0.1)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return not torch.equal(model.own.bias.detach(), before)

    assert on(2, body) == [True, True]
