"""Random histories of a group generator and its workers, with delays and deaths; audited."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from wingbeat.methods.model_averaging.generator import Generator, Member, Run
from wingbeat.methods.model_averaging.rules import Rules, group_of
from wingbeat.types import Layout


@dataclass
class SimulatedWorker:
    """The state of a worker.

    Attributes:
        to_generator: messages to the generator in flight.
        to_worker: messages to it in flight.
        finished: whether the collective that it runs is over for it.
        log: groups that it has completed.
        synchronized_at: its number of steps at the last synchronization.
        value: its parameters.
    """

    member: Member
    to_generator: deque[tuple] = field(default_factory=deque)
    to_worker: deque[Run] = field(default_factory=deque)
    finished: bool = False
    steps: int = 0
    alive: bool = True
    log: list[int] = field(default_factory=list)
    synchronized_at: int = 0
    value: float = 0.0


class RecordingGenerator(Generator):
    """Records the members of each group of all workers."""

    def __init__(self, layout: Layout, rules: Rules, seed: int) -> None:
        super().__init__(layout, rules, seed)
        self.synchronized: dict[int, set[int]] = {}

    def _run_if_all_synchronize(self, runs: list[Run]) -> None:
        before = self._next_number
        super()._run_if_all_synchronize(runs)
        if self._next_number > before:
            self.synchronized[before] = {w for w in range(len(self._buffers)) if w in self}


class Simulation:
    """Runs workers and a generator, one random event at a time, and checks each.

    Args:
        steps: of each worker.
        kills: deaths at random moments; dead workers rejoin at random moments, if `back`.
        slow: workers that compute ten times as long as the others.
        synchronize_every: steps between synchronizations; also at the end. 0 for never.
    """

    def __init__(
        self,
        layout: Layout,
        rules: Rules,
        seed: int,
        steps: int = 8,
        kills: int = 0,
        back: bool = True,
        slow: int = 0,
        synchronize_every: int = 0,
    ) -> None:
        self.generator = RecordingGenerator(layout, rules, seed)
        self.rules, self.steps, self.kills, self.back = rules, steps, kills, back
        self.rng = Random(f"game {seed}")
        self.workers = [SimulatedWorker(Member(w, rules)) for w in range(layout.workers)]
        self.slow, self.synchronize_every = frozenset(range(slow)), synchronize_every
        for state in self.workers:
            state.value = self.rng.random()
        self.means: dict[tuple[int, int], float] = {}
        self.runs: list[Run] = []
        self.requested: list[int] = []
        self.now: dict[int, set[int]] = {}  # groups that run: who has not acknowledged them
        self.done: dict[tuple[int, int], set[int]] = {}  # collectives that have ended somewhere

    def play(self) -> Simulation:
        """Go on until all have made their steps."""
        while self._act():
            pass
        # Whoever is through does not ask again: it leaves, as at the end of a training.
        for worker, state in enumerate(self.workers):
            assert not state.alive, f"worker {worker} waits for ever after {state.steps} steps"
        assert not any(self.now.values()), f"groups that nobody ends: {self.now}"
        return self

    def _act(self) -> bool:
        """Do one thing, if there is one."""
        workers = range(len(self.workers))
        # Somebody at random; if that was in vain for long, whoever can do anything.
        for worker in (*self.rng.choices(workers, k=40), *workers):
            if moves := self._moves(worker):
                break
        else:
            return False
        move = self.rng.choice(moves)
        if move == self._compute and worker in self.slow and self.rng.random() < 0.9:
            return True
        if self.kills and self.rng.random() < 0.02:
            self.kills -= 1
            self._die(self.rng.randrange(len(self.workers)))
            return True
        move(worker)
        return True

    def _moves(self, worker: int) -> list:
        """What a worker, or a message of it or to it, can do now."""
        state = self.workers[worker]
        moves = [self._worker_receives] if state.to_worker else []
        if state.to_generator:
            moves.append(self._generator_receives)
        if state.alive:
            if not state.member.waiting and not state.member.running:
                moves.append(self._compute)
            elif state.finished:
                moves.append(self._complete)
            elif self._may_finish(worker):
                moves.append(self._average)
        return moves

    def _compute(self, worker: int) -> None:
        """Ends a step, or all of training."""
        state = self.workers[worker]
        due = self.synchronize_every and (
            state.steps == self.steps or state.steps % self.synchronize_every == 0
        )
        if due and state.synchronized_at < state.steps:
            state.synchronized_at = state.steps
            state.member.request(synchronize=True)
            state.to_generator.append(("level",))
            return
        if state.steps == self.steps:
            self._die(worker, for_good=True)
            return
        state.steps += 1
        state.member.request()
        state.to_generator.append(("ask",))

    def _may_finish(self, worker: int) -> bool:
        run = self.workers[worker].member.running
        if run is None or self.workers[worker].finished:
            return False
        # A collective ends where all have come to it; then it may end on some and not on others.
        return self.done.get(run[:2]) is not None or all(
            self.workers[m].alive and self.workers[m].member.running == run for m in run.members
        )

    def _average(self, worker: int) -> None:
        state = self.workers[worker]
        run = state.member.running
        if run[:2] not in self.means:
            values = [self.workers[member].value for member in run.members]
            self.means[run[:2]] = sum(values) / len(values)
        state.value = self.means[run[:2]]
        self.done.setdefault(run[:2], set()).add(worker)
        state.finished = True

    def _complete(self, worker: int) -> None:
        state = self.workers[worker]
        run = state.member.finish()
        state.finished = False
        state.log.append(run.number)
        state.to_generator.append(("done", run.number, run.epoch))

    def _worker_receives(self, worker: int) -> None:
        state = self.workers[worker]
        run = state.to_worker.popleft()
        if not state.finished or run.number != state.member.running.number:
            state.member.start(run)

    def _generator_receives(self, worker: int) -> None:
        message = self.workers[worker].to_generator.popleft()
        if message[0] == "ask":
            self.requested.append(worker)
            self._send_runs(self.generator.request(worker))
        elif message[0] == "level":
            self._send_runs(self.generator.synchronize(worker))
        elif message[0] == "done":
            self.now.get(message[1], set()).discard(worker)
            self._send_runs(self.generator.acknowledge(worker, *message[1:]))
        elif message[0] == "gone":
            for members in self.now.values():
                members.discard(worker)
            self._send_runs(self.generator.remove(worker))
        else:
            state = self.workers[worker]
            state.member, state.alive, state.finished = (
                Member(worker, self.rules),
                True,
                False,
            )
            state.to_worker.clear()
            self.generator.add(worker)

    def _die(self, worker: int, for_good: bool = False) -> None:
        state = self.workers[worker]
        if not state.alive:
            return
        state.alive = False
        state.to_generator.append(("gone",))  # What it has message before may still be heard.
        if self.back and not for_good:
            state.to_generator.append(("back",))

    def _send_runs(self, runs: list[Run]) -> None:
        for run in runs:
            members = set(run.members)
            assert len(members) == len(run.members)
            if run.epoch:
                assert members <= self.now[run.number], f"{run} has members that are done"
            else:
                assert run.number not in self.now, f"{run} has run already"
                assert members == self.generator.synchronized.get(run.number, members), (
                    f"{run}: not all"
                )
            for number, others in self.now.items():
                assert number == run.number or not members & others, f"{run} overlaps {number}"
            self.now[run.number] = members
            self.runs.append(run)
            for member in members:
                assert member in self.generator, f"{run} has worker {member}, who is gone"
                self.workers[member].to_worker.append(run)
        self.now = {number: left for number, left in self.now.items() if left}


def in_one_order(logs: list[list[int]]) -> bool:
    """Whether each worker has its groups in the order of their numbers: then all see one order."""
    return all(log == sorted(set(log)) for log in logs)


def groups_in(layout: Layout, step: int) -> Iterator[tuple[int, ...]]:
    """Yield all groups of a step of the static schedule that have two or more members."""
    for worker in range(layout.workers):
        group = group_of(layout, worker, step)
        if worker == group[0] and len(group) > 1:
            yield group


def averaging_matrix(group: Sequence[int], workers: int) -> np.ndarray:
    """Return F^G (section 3.2), workers x workers: the effect of averaging a group."""
    out = np.eye(workers)
    out[np.ix_(group, group)] = 1 / len(group)
    return out
