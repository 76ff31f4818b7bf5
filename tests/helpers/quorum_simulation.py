"""Rounds with a quorum in virtual time: workers that are late, die and come back; audited."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from wingbeat.methods.model_averaging.generator import Generator, Run
from wingbeat.methods.model_averaging.rules import Rules, Unmerged
from wingbeat.types import Layout


@dataclass
class QuorumWorker:
    """The state of a worker.

    Attributes:
        version: the number of averages that its shared model has.
        life: the number of its process; events of earlier ones are void.
        arrived: when it was there for the average that it waits for.
        copied: whether it has copied a state for that.
        fetching: whether it waits for a state.
    """

    unmerged: Unmerged
    pace: float
    version: int = 0
    rounds: int = 0
    life: int = 0
    alive: bool = True
    fetching: bool = False
    copied: bool = False
    arrived: float = 0.0
    run: Run | None = None


@dataclass
class QuorumGame:
    """Plays workers against the generator, as the service does, and audits each average.

    Args:
        rounds: averages after which a worker leaves.
        kills: deaths at random times; the dead come back.
    """

    workers: int
    quorum: int
    grace: float
    seed: int
    rounds: int = 5
    kills: int = 0
    now: float = 0.0
    counted: int = 0
    merged: int = 0
    lost: int = 0
    versions: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = Random(f"quorum {self.seed}")
        rules = Rules.all_workers(self.quorum, self.grace)
        self.generator = Generator(Layout.even(1, self.workers), rules)
        self.all = [
            QuorumWorker(Unmerged(1, "tokens"), self.rng.choice([1.0, 1.0, 1.1, 3.0, 8.0]))
            for _ in range(self.workers)
        ]
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.left: set[int] = set()
        self.shrunk = 0.0  # when a worker left last, which makes a quorum smaller
        self.gone_copying = 0.0  # when one died last that copied a state
        for worker in range(self.workers):
            self.compute(worker)
        for _ in range(self.kills):
            self.at(self.rng.uniform(0, 20), self.kill)

    def play(self) -> QuorumGame:
        """Go on until all have made their rounds."""
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.serve()
        assert all(worker.rounds == self.rounds for worker in self.all), "one waits for ever"
        assert self.counted == self.merged + self.lost, "a token is lost, or merged twice"
        return self

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.number), event))

    def later(self, worker: int, seconds: float, event: Callable[[int], None]) -> None:
        """An event of a worker, unless its process ends before."""
        life = self.all[worker].life

        def happen() -> None:
            if self.all[worker].life == life:
                event(worker)

        self.at(self.now + seconds, happen)

    # -- a worker -------------------------------------------------------------------------

    def count(self, worker: int) -> None:
        tokens = self.rng.randrange(1, 100)
        self.counted += tokens
        self.all[worker].unmerged.count(tokens)
        self.all[worker].unmerged.step()

    def compute(self, worker: int) -> None:
        self.later(worker, self.all[worker].pace * self.rng.uniform(0.9, 1.1), self.arrive)

    def arrive(self, worker: int) -> None:
        self.count(worker)
        state = self.all[worker]
        state.copied = False
        state.fetching = worker not in self.generator
        if not state.fetching:
            self.request(worker)

    def request(self, worker: int) -> None:
        state = self.all[worker]
        state.fetching, state.arrived = False, self.now
        if worker in self.generator:
            state.unmerged.offer(0, 1)
            self.start(self.generator.request(worker))
        else:  # it was removed while it copied
            state.fetching = True

    def kill(self) -> None:
        worker = self.rng.randrange(self.workers)
        state = self.all[worker]
        if not state.alive:
            return
        if state.fetching and state.copied:
            self.gone_copying = self.now
        state.alive, state.fetching, state.run = False, False, None
        state.life += 1
        self.lost += state.unmerged.counted[0][0]
        state.unmerged.reset()
        self.start(self.generator.remove(worker))
        self.later(worker, self.rng.uniform(0.5, 10), self.restart)

    def restart(self, worker: int) -> None:
        state = self.all[worker]
        state.alive, state.fetching, state.copied = True, True, False
        state.version = -1

    def leave(self, worker: int) -> None:
        state = self.all[worker]
        state.alive = False
        state.life += 1
        self.left.add(worker)
        self.shrunk = self.now
        self.lost += state.unmerged.counted[0][0]
        self.start(self.generator.remove(worker, left=True))

    # -- the service ----------------------------------------------------------------------

    def serve(self) -> None:
        """What the service does after each event."""
        for worker, state in enumerate(self.all):
            others = [w for w in range(self.workers) if w != worker and w in self.generator]
            waiting = [w for w in others if self.generator.is_waiting(w)]
            senders = [w for w in waiting if not self.generator.unfinished(w)]
            if state.fetching and state.copied is False and (senders or not others):
                state.copied = True
                if not others:  # it has missed nothing, or there is nobody who knows
                    state.version = len(self.versions)
                    self.generator.add(worker)
                    self.request(worker)
                    continue
                self.generator.add(worker, at_once=True)
                state.version = self.all[senders[0]].version
                self.later(worker, self.rng.uniform(0.0, 0.5), self.request)
        for worker in self.generator.take_late(self.now):
            self.start(self.generator.mark_late(worker))
        due = self.generator.due
        if due is not None and due > self.now:
            self.at(due, lambda: None)

    def start(self, runs: list[Run]) -> None:
        for run in runs:
            self.audit(run)
            for member in run.members:
                self.all[member].run = run
            if self.rng.random() < 0.5:
                self.count(run.members[0])  # a step under the average
            life = [self.all[member].life for member in run.members]
            over = functools.partial(self.end, run, life)
            self.at(self.now + self.rng.uniform(0.01, 0.3), over)

    def audit(self, run: Run) -> None:
        least = max(1, min(self.quorum, self.workers - len(self.left)))
        assert len(run.members) >= least, f"{run} is below the quorum of {least}"
        members = [self.all[member] for member in run.members]
        assert {state.version for state in members} == {len(self.versions)}, "an old shared model"
        if run.epoch:
            return
        there = sorted(state.arrived for state in members)
        copied = max((state.arrived for state in members if state.copied), default=0.0)
        latest = max(max(there[least - 1], self.shrunk) + self.grace, copied, self.gone_copying)
        assert self.now <= latest + 1e-9, f"{run} is {self.now - latest} s after its grace"

    def end(self, run: Run, life: list[int]) -> None:
        """The collective ends on all members; not if one has died."""
        if [self.all[member].life for member in run.members] != life:
            return
        if any(self.all[member].run != run for member in run.members):
            return
        self.versions.append(run.members)
        again: list[int] = []
        for member in run.members:
            state = self.all[member]
            before = state.unmerged.counted[0][0]
            state.unmerged.merged()
            self.merged += before - state.unmerged.counted[0][0]
            state.version, state.run = len(self.versions), None
            state.rounds += 1
            self.start(self.generator.acknowledge(member, run.number, run.epoch))
            again.append(member)
        for member in again:
            if self.all[member].rounds == self.rounds:
                self.leave(member)
            else:
                self.compute(member)
