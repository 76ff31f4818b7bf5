"""What a worker that comes back to a job of averaged models takes over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import engine, net, on, sgd, train, weights
from wingbeat import sync
from wingbeat.errors import PeerError

PATIENCE = 60.0


def lives_of(model: Any) -> Any:
    """The model's `LiveState`."""
    return engine(model).update._averager.grouping.offer.__self__


def flat(model: Any, kind: str) -> torch.Tensor:
    tensors = engine(model).update.tensors()[kind]
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", [0, 1])
def test_who_takes_over_a_state_makes_the_outer_step_that_is_under_way(
    delay: int, momentum: float
) -> None:
    """Rank 1 is as if it had been away; afterwards both share one model, and the same velocity."""
    models: dict[int, Any] = {}
    under_way = threading.Event()

    def body(world: Any) -> tuple[Any, ...]:
        model = net(world.rank)
        strategy = wingbeat.DiLoCo(every=2, delay=delay, outer_momentum=momentum, encrypted=False)
        model, optimizer = sync.distribute(model, sgd(model.parameters()), strategy, world=world)
        models[world.rank] = model
        train(
            model, optimizer, range(3)
        )  # the first turn of both, which is taken over in the third step
        update = engine(model).update
        if world.rank == 0:
            begin = update._averager.begin
            update._averager.begin = lambda part: (begin(part), under_way.set())
            train(model, optimizer, range(3, 4))
        else:
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(7.0)
                for kept in update._kinds().values():
                    kept.fill_(9.0)
            update._moved = update._known = update._given = False  # as in a process that begins
            assert under_way.wait(PATIENCE)
            lives_of(model).put(lives_of(models[0]).written())
        train(model, optimizer, range(4, 5))
        found = [flat(model, "shared"), flat(model, "velocity")]
        steps = update.steps
        wingbeat.consensus(model)
        return (*found, steps, weights(model))

    (shared, velocity, steps, _), other = on(2, body, timeout=PATIENCE)
    torch.testing.assert_close(other[0], shared, rtol=0, atol=0)
    torch.testing.assert_close(other[1], velocity, rtol=0, atol=0)
    assert bool(velocity.any()) == bool(momentum)
    assert (steps, other[2]) == (5, 5)


def test_who_takes_over_a_state_between_two_turns_shares_what_it_was_given() -> None:
    """Its model has moved from the shared one since, and is not taken for it."""
    models: dict[int, Any] = {}
    both = threading.Barrier(2)

    def body(world: Any) -> list[torch.Tensor]:
        model = net(world.rank)
        strategy = wingbeat.DiLoCo(every=4, encrypted=False)
        model, optimizer = sync.distribute(model, sgd(model.parameters()), strategy, world=world)
        models[world.rank] = model
        update = engine(model).update
        train(model, optimizer, range(6))  # a turn, and two steps of each worker's own
        both.wait(PATIENCE)
        if world.rank == 1:
            for kept in update._kinds().values():
                kept.fill_(9.0)
            update._moved = update._known = update._given = False  # as in a process that begins
            lives_of(model).put(lives_of(models[0]).written())
        both.wait(PATIENCE)
        train(model, optimizer, range(6, 9))
        found = [flat(model, "shared"), flat(model, "velocity")]
        wingbeat.consensus(model)
        return found

    (shared, velocity), other = on(2, body, timeout=PATIENCE)
    torch.testing.assert_close(other[0], shared, rtol=0, atol=0)
    torch.testing.assert_close(other[1], velocity, rtol=0, atol=0)


def test_a_state_of_another_training_is_refused() -> None:
    def body(world: Any) -> None:
        model = net()
        strategy = wingbeat.LocalSGD(every=4, encrypted=False)
        model, _ = sync.distribute(model, sgd(model.parameters()), strategy, world=world)
        lives = lives_of(model)
        update = engine(model).update
        for numbers in ([-1], [], ["1"], 3, [1, 2, 3]):
            update.handed = lambda numbers=numbers: ([], numbers)
            payload = lives.written()
            del update.handed
            with pytest.raises(PeerError, match="for the steps that were made"):
                lives.put(payload)
        assert update.steps == 0

    on(2, body, timeout=PATIENCE)
