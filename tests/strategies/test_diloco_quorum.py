"""Averages with a quorum: what a late worker has done is merged later, once, with its weight."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import wingbeat
from helpers.training import assert_same, batch, engine, net, on, weights
from wingbeat import Strategy, parts

WORKERS, EVERY, PATIENCE = 3, 2, 90.0
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@dataclass
class Round:
    """An average as one of its members has made it."""

    rank: int
    members: tuple[int, ...]
    tokens: float
    move: Tensor
    before: Tensor
    after: Tensor
    ending: bool


@dataclass
class Journal:
    """All averages of a run, and how many tokens the workers have counted."""

    rounds: list[Round] = field(default_factory=list)
    counted: int = 0
    ending: bool = False

    def record(self, rank: int, update: Any) -> None:
        """Record the averages of a worker."""
        averager, take = update._averager, update._take
        begin, offered = averager.begin, []

        def begins(part: Any, weight: float) -> None:
            span = slice(part.start, part.stop)
            offered[:] = [weight, averager.buffer[span].clone()]
            begin(part, weight)

        def takes(first: int, last: int) -> None:
            before = update._shared.clone()
            take(first, last)
            after = update._shared.clone()
            self.rounds.append(Round(rank, averager.members, *offered, before, after, self.ending))

        averager.begin, update._take = begins, takes

    def made(self, rank: int) -> int:
        return sum(each.rank == rank for each in self.rounds)

    def chain(self, start: Tensor) -> list[list[Round]]:
        """The averages one after the other, each as all of its members have made it."""
        left, found, now = list(self.rounds), [], start
        while left:
            of_round = [each for each in left if torch.equal(each.before, now)]
            assert of_round, "a worker has made an outer step on another shared model"
            assert all(torch.equal(each.after, of_round[0].after) for each in of_round)
            left = [each for each in left if all(each is not one for one in of_round)]
            found.append(of_round)
            now = of_round[0].after
        return found


def until(true: Callable[[], bool], act: Callable[[], None] = lambda: time.sleep(0.01)) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it waits for ever"
        act()


ROUNDS: dict[str, Any] = {"every": EVERY, "quorum": 2, "grace": 0.1, "encrypted": False}

LATE = {
    "diloco": wingbeat.DiLoCo(weights="tokens", **ROUNDS),
    "diloco, delay": wingbeat.DiLoCo(weights="tokens", delay=1, **ROUNDS),
    "diloco, optimizer": wingbeat.DiLoCo(weights="tokens", outer_optimizer=NESTEROV, **ROUNDS),
    "localsgd": wingbeat.LocalSGD(**ROUNDS),
    "localsgd, overlap": wingbeat.LocalSGD(overlap=True, **ROUNDS),
}


@pytest.mark.parametrize("strategy", LATE.values(), ids=LATE)
def test_a_late_worker_merges_all_its_steps_in_a_later_round(strategy: Strategy) -> None:
    averages = strategy.update == parts.Outer(lr=1.0, momentum=0.0)
    journal = Journal()
    start: list[Tensor] = []

    def body(world: Any) -> tuple[dict[str, Tensor], list[Any]]:
        model = net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        update, steps = engine(model).update, iter(range(10**6))
        journal.record(world.rank, update)
        update._catch_up()
        start.append(update._shared.clone())

        def step() -> None:
            number = next(steps)
            optimizer.zero_grad()
            model(batch(number, world.rank).double()).square().mean().backward()
            if not averages:
                tokens = 1 + (number + world.rank) % 5
                journal.counted += tokens
                wingbeat.count_tokens(model, tokens)
            optimizer.step()

        until(lambda: journal.made(world.rank) >= 2, step)
        if world.rank == 2:  # is late: the others make three rounds meanwhile
            step()
            others = journal.made(0)
            until(lambda: journal.made(0) >= others + 3)
            merged = journal.made(2)
            until(lambda: journal.made(2) >= merged + 2, step)
            journal.ending = True
        until(lambda: journal.ending, step)
        wingbeat.synchronize(model)
        return weights(model), None if averages else update.tensors()["unmerged"]

    found = on(WORKERS, body, timeout=PATIENCE)
    rounds = journal.chain(start[0])
    shared = torch.nn.Parameter(start[0].clone())
    outer = torch.optim.SGD([shared], lr=1.0) if averages else NESTEROV([shared])
    for of_round in rounds:
        members = set(of_round[0].members)
        # A quorum does not wait for those that synchronize.
        assert len(members) >= 2 or of_round[0].ending, "below the quorum"
        assert {each.rank for each in of_round} == members
        parts_of = [1 if averages else each.tokens for each in of_round]
        moves = (part * each.move for part, each in zip(parts_of, of_round, strict=True))
        shared.grad = sum(moves, torch.zeros(())) / sum(parts_of)
        outer.step()
        torch.testing.assert_close(shared.detach(), of_round[0].after, rtol=0, atol=1e-12)
    assert any(2 not in each[0].members for each in rounds), "rank 2 was not late"
    if not averages:
        merged = sum(each.tokens for of_round in rounds for each in of_round)
        unmerged = sum(tokens for _, ((tokens, _),) in found)
        assert merged + unmerged == journal.counted
    for each, _ in found:
        assert_same(each, found[0][0])
