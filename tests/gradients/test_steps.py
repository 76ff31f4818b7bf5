"""Workers that have made different numbers of steps are told how many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import TINY_MB, backward, engine, net, on, sgd, train
from wingbeat import sync
from wingbeat.errors import UsageError
from wingbeat.gradients import steps
from wingbeat.gradients.bucket import TURNS, Bucket, Slot
from wingbeat.gradients.steps import Steps
from wingbeat.transport import loopback


def _said(world: Any, count: int) -> str:
    counter = Steps(world)
    assert counter.count == 0
    counter.count = count
    with pytest.raises(UsageError) as caught:
        counter.disagree()
    return str(caught.value)


def test_every_worker_says_who_has_made_how_many() -> None:
    worlds = loopback.worlds(3)
    said = loopback.run(worlds, lambda world: _said(world, 7 + world.rank))
    assert len(set(said)) == 1
    assert "(rank 0 7, rank 1 8, rank 2 9)" in said[0]
    assert "\n" not in said[0]


def test_who_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PATIENCE", 0.01)
    first, *_ = loopback.worlds(3)
    assert "(rank 0 4)" in _said(first, 4)


def test_channels_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one model's workers have said is not taken for another's."""
    monkeypatch.setattr(steps, "PATIENCE", 0.01)
    worlds = loopback.worlds(2)
    first, _ = loopback.run(worlds, lambda world: world.open_channel())
    _said(worlds[1], 5)
    assert "(rank 0 4)" in _said(first, 4)


def test_one_step_more_or_less_always_shows() -> None:
    assert TURNS > 2


def _bucket() -> Bucket:
    return Bucket(0, [Slot(0, "weight", torch.nn.Parameter(torch.zeros(3)))])


@pytest.mark.parametrize("steps", range(2 * TURNS))
@pytest.mark.parametrize("ahead", [0, 1, None])
def test_what_buckets_carry_tells_one_step_more(steps: int, ahead: int | None) -> None:
    """None: a worker without batches, whose steps do not count."""
    mine, other = _bucket(), _bucket()
    mine.write_tail(steps)
    other.write_tail(None if ahead is None else steps + ahead)
    mine.flat += other.flat
    assert mine.in_step() == (ahead != 1)


@pytest.mark.parametrize("name", ["allreduce", "dear", "sharded"])
def test_who_reads_gradients_is_told_of_a_step_that_was_skipped(name: str) -> None:
    """Not only by the next step, which may come after decisions by wrong gradients."""
    strategy: Any = {
        "allreduce": wingbeat.AllReduce(mb=TINY_MB),
        "dear": wingbeat.DeAR(plan="fixed", mb=TINY_MB),
        "sharded": wingbeat.DeAR(plan="fixed", mb=TINY_MB, shard_optimizer=True),
    }[name]

    def body(world: Any) -> None:
        model = net()
        model, optimizer = sync.distribute(model, sgd(model.parameters()), strategy, world=world)
        train(model, optimizer, range(2))
        engine(model).steps_made.count += world.rank  # the shards' rounds would notice earlier
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"rank 0 2, rank 1 3\b"):
            _read(model, world.rank)

    on(2, body)


def _read(model: Any, rank: int) -> None:
    backward(model, rank, 2)
    model.head._parameters["weight"].grad.norm()


def test_nobody_waits_longer_than_the_world_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    for timeout in (2.0, 60.0):
        first, *_ = loopback.worlds(2, timeout=timeout)

        def get(_key: str, seconds: float) -> str:
            asked.append(seconds)
            return "1"

        monkeypatch.setattr(first.store, "get", get)
        _said(first, 4)
    assert asked == [2.0, steps.PATIENCE]
