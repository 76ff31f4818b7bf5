"""How long DeAR's deferred updates wait for the links: an optimizer may write to its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers import late
from helpers.training import engine, on
from wingbeat.transport import loopback


def test_an_optimizer_may_write_to_its_gradients() -> None:
    """SGD with nesterov and foreach does, while the gather may still pass the buffer on."""

    def body(world: Any) -> torch.Tensor:
        model = nn.Linear(300, 300, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(90_000.0).view(300, 300) / 9e4)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True
        )
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        for step in range(6):
            optimizer.zero_grad()
            rng = torch.Generator().manual_seed(10 * step + world.rank)
            model(torch.randn(2, 300, generator=rng)).square().mean().backward()
            optimizer.step()
            if world.rank == 2:
                time.sleep(0.02)  # one that is late, so that others still have to send to it
            model.synchronize()
        return model.weight.detach().clone()

    with late.open_worlds(4) as (members, _):
        first, *others = loopback.run(members, body)
    for other in others:
        assert torch.equal(first, other)


class _Watched:
    """A handle that notes how it is waited for, and is never done before."""

    def __init__(self, handle: Any, calls: list[str]) -> None:
        self._handle, self._calls, self.jobs = handle, calls, handle.jobs

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._calls.append("wait")
        self._handle.wait()

    def wait_received(self) -> None:
        self._calls.append("wait_received")
        self._handle.wait_received()


@pytest.mark.parametrize("writes", [False, True])
def test_an_update_that_writes_to_gradients_waits_until_they_are_sent(writes: bool) -> None:
    """As found out in its first steps: for the whole collective, not only for its result."""

    def body(world: Any) -> list[str]:
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=writes
        )
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        calls: list[str] = []
        collectives = engine(model).collectives
        gather = collectives.all_gather
        for step in range(6):
            if step == 5:
                collectives.all_gather = lambda *a, **k: _Watched(gather(*a, **k), calls)
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + world.rank)).square().mean().backward()
            optimizer.step()
            if step < 5:
                model.synchronize()
        model.synchronize()
        return calls

    assert on(2, body) == [["wait"] if writes else ["wait_received"]] * 2


def _waits(make: Callable[[Any], Any], last: int) -> list[str]:
    """How rank 0 waits for a small bucket and a large one, in step ``last`` from 0 on."""

    def body(world: Any) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 40, bias=False))
        strategy = wingbeat.DeAR(plan="fixed", mb=0.0001)
        model, optimizer = wingbeat.distribute(model, make(model), strategy, world=world)
        calls: list[str] = []
        collectives = engine(model).collectives
        gather = collectives.all_gather
        for step in range(last + 1):
            if step == last:
                collectives.all_gather = lambda *a, **k: _Watched(gather(*a, **k), calls)
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + world.rank)).square().mean().backward()
            optimizer.step()
            model.synchronize()
        return calls

    return on(2, body)[0]


def test_one_bucket_whose_gradients_are_written_to_is_enough() -> None:
    """Whichever is updated last."""

    def make(model: Any, first: bool) -> Any:
        writing = {"momentum": 0.9, "nesterov": True, "foreach": True}
        groups = [
            {"params": list(model[0].parameters()), **(writing if first else {})},
            {"params": list(model[1].parameters()), **({} if first else writing)},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    for first in (False, True):
        assert set(_waits(lambda model, f=first: make(model, f), 4)) == {"wait"}


def test_two_steps_prove_that_an_optimizer_does_not_write_to_gradients() -> None:
    """Of those that keep something of the first, many touch gradients in the second only."""
    waits = [_waits(lambda model: torch.optim.SGD(model.parameters()), last) for last in (1, 2)]
    assert waits == [["wait"] * 2, ["wait_received"] * 2]


@pytest.mark.parametrize("last_is_here", [False, True])
def test_one_call_of_the_optimizer_updates_all_arrived_buckets(last_is_here: bool) -> None:
    """In the order in which forward needs it, up to the first bucket that is still to come."""
    called: list[list[str]] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            (group,) = self.param_groups
            called.append([names[p] for p in group["params"] if p in names])
            return torch.optim.SGD.step.__wrapped__(self, closure)  # type: ignore[attr-defined]

    names: dict[torch.Tensor, str] = {}

    def body(world: Any) -> list[list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        made = Watching if world.rank == 0 else torch.optim.SGD
        optimizer = made(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed", mb=0.0001)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        if world.rank == 0:
            names.update({p: n for n, p in model.named_parameters()})
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 8), 1.0 + world.rank)).square().mean().backward()
            if world.rank == 0:
                called.clear()
            optimizer.step()
            buckets = engine(model).bucketing.forward_buckets
            assert len(buckets) == 4
            for bucket in buckets:
                bucket.handle.wait()
            if step == 2 and not last_is_here:
                buckets[2].handle = _Watched(buckets[2].handle, [])
        model[0](torch.ones(1, 8))
        due = [bucket.due for bucket in engine(model).bucketing.forward_buckets]
        before = list(called) if world.rank == 0 else []
        model(torch.ones(1, 8))
        assert not any(bucket.due for bucket in engine(model).bucketing.forward_buckets)
        if world.rank == 0:
            return [due, before, list(called)]
        return [due]

    (due, before, after), (other,) = on(2, body)
    weights = [f"{i}.weight" for i in range(4)]
    if last_is_here:
        assert due == other == [False] * 4
        assert before == after == [weights]
    else:
        assert due == other == [False, False, True, True]
        assert before == [weights[:2]]
        assert after == [weights[:2], weights[2:]]
