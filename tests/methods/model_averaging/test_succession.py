"""How workers replace a group generator, in virtual time, with crashes of both."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from helpers.amounts import slow_except
from wingbeat.methods.model_averaging.succession import (
    MAX_GENERATORS,
    START_S,
    Act,
    Next,
    Succession,
)

POLL_S = 0.25


def test_generator_is_claimed_after_a_pause_and_by_each_worker_once() -> None:
    rules = Succession()
    assert rules.advance(0.0, 1) == Next(Act.WAIT, 1)
    assert rules.advance(0.4, 1) == Next(Act.WAIT, 1)
    assert rules.advance(0.6, 1) == Next(Act.CLAIM, 1)
    rules.claimed(0.6)
    assert rules.advance(0.7, 1) == Next(Act.WAIT, 1)
    assert rules.advance(3.0, 2) == Next(Act.CONNECT, 1)


def test_claimed_generator_that_does_not_appear_ends_and_the_pause_grows() -> None:
    rules, now, pauses = Succession(), 0.0, []
    for incarnation in range(1, 9):
        number, begun = 2 * incarnation - 1, now
        while rules.advance(now, number).act is Act.WAIT:
            now += 0.125
        pauses.append(now - begun)
        rules.claimed(now)
        claimed = now
        while (found := rules.advance(now, number)).act is Act.WAIT:
            now += 0.125
        assert found == Next(Act.END, incarnation)
        assert START_S < now - claimed < START_S + 0.5
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]


def test_pause_is_short_again_after_a_stable_generator() -> None:
    rules = Succession()
    for incarnation in range(1, 6):  # each ends at once
        rules.advance(float(incarnation), 2 * incarnation - 1)
    assert rules.advance(6.0, 9).act is Act.WAIT
    rules.advance(30.0, 10)
    assert rules.advance(100.0, 11).act is Act.WAIT
    assert rules.advance(100.6, 11) == Next(Act.CLAIM, 6)


def test_lost_generator_that_the_log_still_has_is_ended() -> None:
    rules = Succession()
    rules.lost(3)
    assert rules.advance(0.0, 6) == Next(Act.END, 3)
    assert rules.advance(0.0, 7) == Next(Act.WAIT, 4)
    assert rules.advance(1.0, 8) == Next(Act.CONNECT, 4)


def test_number_of_generators_is_limited() -> None:
    rules = Succession()
    rules.advance(0.0, 2 * MAX_GENERATORS - 1)
    assert rules.advance(1000.0, 2 * MAX_GENERATORS - 1).act is Act.WAIT


@dataclass
class Generator:
    """A process that appears in the log a while after it was started, if it lives by then."""

    incarnation: int
    appears: float
    dead: bool = False


@dataclass
class Worker:
    rules: Succession = field(default_factory=Succession)
    connected: int | None = None  # the generator's incarnation
    dead: bool = False
    life: int = 0
    noticed: float = 0.0  # when it detects that its generator has ended


class Job:
    """Workers, the log and the claims of a store, and generators, all of which may crash."""

    def __init__(self, seed: int, workers: int = 4) -> None:
        self.drawn, self.now = random.Random(seed), 0.0
        self.number, self.claims = 0, dict[int, tuple[int, int]]()
        self.generators = [Generator(0, 0.0)]
        self.workers = [Worker(connected=0) for _ in range(workers)]
        self.started: list[int] = []

    @property
    def present(self) -> Generator | None:
        """The generator that the log has, if its process lives."""
        return next(
            (g for g in self.generators if not g.dead and 2 * g.incarnation == self.number), None
        )

    def end(self, incarnation: int) -> None:
        if self.number <= 2 * incarnation:
            self.number = 2 * incarnation + 1

    def advance(self, *, crashes: bool) -> None:
        self.now += POLL_S
        if crashes:
            self.crash()
        for each in self.generators:
            if not each.dead and each.appears <= self.now and self.number < 2 * each.incarnation:
                assert self.number == 2 * each.incarnation - 1, "one at a time"
                self.number = 2 * each.incarnation
            each.dead |= self.number > 2 * each.incarnation  # it has read its end
        for number, worker in enumerate(self.workers):
            if not worker.dead:
                self.step(number, worker)

    def crash(self) -> None:
        for each in self.generators:
            each.dead |= self.drawn.random() < 0.01
        for worker in self.workers:
            if self.drawn.random() < 0.01:  # the process that replaces it has no generator
                worker.connected, worker.rules = None, Succession()
                worker.dead, worker.life = not worker.dead, worker.life + 1

    def step(self, number: int, worker: Worker) -> None:
        if worker.connected is not None:
            alive = any(g.incarnation == worker.connected and not g.dead for g in self.generators)
            worker.noticed = self.now + 1.0 if alive else worker.noticed
            if self.now >= worker.noticed:
                self.end(worker.connected)
                worker.connected = None
            return
        act, incarnation = worker.rules.advance(self.now, self.number)
        if act is Act.CLAIM:
            worker.rules.claimed(self.now)
            mine = number, worker.life
            if self.claims.setdefault(incarnation, mine) == mine:
                self.started.append(incarnation)
                if self.drawn.random() < 0.1:
                    self.end(incarnation)  # it cannot be started
                elif self.drawn.random() < 0.9:  # otherwise the worker ends before it starts it
                    appears = self.now + self.drawn.uniform(0.5, 1.5 * START_S)
                    self.generators.append(Generator(incarnation, appears))
        elif act is Act.END:
            self.end(incarnation)
        elif act is Act.CONNECT:
            if self.present is None:
                self.end(incarnation)  # it does not answer
            else:
                worker.connected, worker.noticed = incarnation, self.now + 1.0


@pytest.mark.parametrize("seed", slow_except(range(20), range(500)))
def test_all_workers_have_the_same_generator_after_crashes(seed: int) -> None:
    job = Job(seed)
    for _ in range(2000):
        job.advance(crashes=True)
    for worker in job.workers:
        worker.dead = False
    deadline = job.now + 2000.0
    while any(w.connected is None or w.connected * 2 != job.number for w in job.workers):
        job.advance(crashes=False)
        assert job.now < deadline, "the workers find no generator"
    assert job.present is not None
    assert len(set(job.started)) == len(job.started), "no incarnation is started twice"
    assert len(job.started) > 3, "generators have crashed"
