"""Columns of a mesh: workers that wait in one column while others of their replica wait for them.

A replica gathers its parameters before a forward, so its ranks make a step together.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.amounts import examples
from helpers.communication import NumericReplica, combine, pack
from helpers.mail import Clock
from helpers.server_simulation import FakeNetwork
from helpers.staleness_simulation import gradient
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.worker import Worker

Rank = tuple[int, int]
"""A column and a replica."""


class Columns:
    """Replicas without threads, whose next actions are drawn from a seed."""

    def __init__(
        self,
        seed: int,
        bound: StalenessBound,
        *,
        replicas: int,
        columns: int,
        steps: int,
        max_buffered: int | None = None,
        answers: bool = True,
    ) -> None:
        self.chance, self.clock, self.bound = random.Random(seed), Clock(), bound
        self.replicas, self.columns, self.steps = replicas, columns, steps
        self.networks = [FakeNetwork(self.chance, 0, largest=1 << 16) for _ in range(columns)]
        self.threads: dict[Rank, CommunicationThread] = {}
        self.boxes: dict[Rank, Any] = {}
        self.models: dict[Rank, NumericReplica] = {}
        most = bound.max_buffered if max_buffered is None else max_buffered
        for column, network in enumerate(self.networks):
            for number in range(replicas):
                self.boxes[column, number] = network.box(number)
            for number in range(replicas):
                rank = column, number
                self.models[rank] = NumericReplica(replicas, bound.colayers)
                machine = Worker(number, replicas, bound, combine, max_buffered=most)
                self.threads[rank] = CommunicationThread(
                    machine, self.boxes[rank], self.models[rank], clock=self.clock,
                    inside=Mock() if answers else None,
                )  # fmt: skip
        self.entered = dict.fromkeys(self.threads, 0)
        self.place: dict[Rank, int | None] = dict.fromkeys(self.threads)
        self.alive = set(self.threads)
        # How often each replica is chosen: some are slow.
        self.pace = [self.chance.choice((1, 1, 3, 8)) for _ in range(replicas)]

    def kill(self, number: int) -> None:
        """End all ranks of a replica."""
        for column in range(self.columns):
            self.alive.discard((column, number))
            for other in range(self.replicas):
                if other != number:
                    self.boxes[column, other].lost[number] = "has fallen silent"

    def _gathered(self, rank: Rank) -> bool:
        """Whether all ranks of a replica have come as far as this one."""
        mates = ((column, rank[1]) for column in range(self.columns))
        return all(self._position(mate) >= self._position(rank) for mate in mates)

    def _position(self, rank: Rank) -> tuple[int, int]:
        """The last step that a rank has entered, and the number of colayers that it has sent."""
        place = self.place[rank]
        return self.entered[rank], self.bound.colayers if place is None else place

    def train(self, rank: Rank) -> None:
        """Make the next part of a rank's step, unless it waits."""
        thread, at = self.threads[rank], self.place[rank]
        if at is None:
            if thread.machine.finished:
                thread._is_drained()
            elif self.entered[rank] == self.steps:
                thread.machine.finish()
            elif thread.try_begin_iteration() is not None:
                self.place[rank] = 0
                self.entered[rank] += 1
        elif self._gathered(rank):
            iteration, n = thread.machine.iteration, self.replicas
            thread.send_colayer(
                at, [pack(gradient(rank[1], iteration, at, piece)) for piece in range(n)]
            )
            self.place[rank] = at + 1
            if at + 1 == self.bound.colayers:
                thread.end_iteration()
                self.place[rank] = None

    def done(self) -> bool:
        return all(self.threads[rank].machine.drained for rank in self.alive)

    def run(self, kill_at: int = -1) -> Columns:
        """Train to the end, or raise an AssertionError with where each rank stands."""
        for turn in range(400_000):
            if turn % 50 == 0 and self.done():
                break
            if turn == kill_at:
                self.kill(self.replicas - 1)
            rank = self.chance.choice(sorted(self.alive))
            match self.chance.randrange(4):
                case 0 if self.chance.randrange(self.pace[rank[1]]) == 0:
                    self.train(rank)
                case 1:
                    self.threads[rank].process(self.boxes[rank].poll())
                case _:
                    self.networks[rank[0]].move()
                    self.clock.now += 1e-4
        assert self.done(), [(r, self.entered[r], self.place[r]) for r in sorted(self.alive)]
        for rank in self.alive:
            self.threads[rank]._apply_rounds()
        for column in range(self.columns):
            ranks = [rank for rank in self.alive if rank[0] == column]
            assert len({self.models[rank].state_bytes() for rank in ranks}) == 1
        return self

    @property
    def pulls(self) -> int:
        return sum(self.threads[rank].machine.pulls for rank in self.alive)


BOUNDS = [
    StalenessBound(0, 3, 3),
    StalenessBound(1, 3, 3),
    StalenessBound(2, 3, 3),
    StalenessBound(1, 1, 3),
    StalenessBound(1, 2, 3),
    StalenessBound(None, 3, 3),
]


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda b: f"{b.mode}-{b.s}-{b.p}")
@pytest.mark.parametrize("size", [(2, 2), (3, 3)])
def test_columns_train_to_the_end(bound: StalenessBound, size: tuple[int, int]) -> None:
    for seed in range(1 if examples(10) < 10 else 10):
        Columns(seed, bound, replicas=size[0], columns=size[1], steps=6).run()


@pytest.mark.parametrize("bound", BOUNDS[1:], ids=lambda b: f"{b.mode}-{b.s}-{b.p}")
def test_columns_train_to_the_end_without_a_lost_replica(bound: StalenessBound) -> None:
    for seed in range(1 if examples(10) < 10 else 10):
        Columns(seed, bound, replicas=3, columns=2, steps=6).run(kill_at=600 + 211 * seed)


def test_ranks_that_pull_parameters_do_not_wait_for_each_others_replicas() -> None:
    pulls = 0
    for seed in range(examples(20)):
        made = Columns(
            seed, StalenessBound(None, 3, 3), replicas=3, columns=3, steps=12, max_buffered=0
        )
        pulls += made.run(kill_at=500 + 37 * seed if seed % 2 else -1).pulls
    assert pulls > 10


def test_pull_is_answered_while_training_waits_inside_its_replica() -> None:
    """The rank that it waits for may wait for the one that pulls."""
    columns = Columns(0, BOUNDS[-1], replicas=2, columns=1, steps=1)
    thread, model = columns.threads[0, 0], columns.models[0, 0]
    asked = Mock(side_effect=[(1,), ()])
    thread.machine.take_pull_requests = asked  # type: ignore[method-assign]
    thread._applying = True  # the machine counts a round that is not in the parameters yet
    thread.process(None)
    assert not asked.called
    thread._applying = False
    thread.process(None)
    assert asked.called
    for _ in range(100):
        columns.networks[0].move()
    sent = b"".join(bytes(message.payload) for message in columns.boxes[0, 1].inbox[0])
    assert model.state_bytes() in sent


def test_pull_waits_for_training_without_a_mesh() -> None:
    """There the parameters may change between two steps, on all workers alike."""
    columns = Columns(0, BOUNDS[-1], replicas=2, columns=1, steps=1, answers=False)
    thread = columns.threads[0, 0]
    thread.machine.take_pull_requests = Mock(return_value=())  # type: ignore[method-assign]
    thread.process(None)
    assert not thread.machine.take_pull_requests.called
    thread._apply_rounds()
    assert thread.machine.take_pull_requests.called
