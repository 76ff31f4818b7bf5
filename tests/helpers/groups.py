"""A group generator and its workers with messages that take any time, and deaths; audited."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from wingbeat.methods.model_averaging.generator import Generator, Member, Run
from wingbeat.methods.model_averaging.rules import Layout, Rules


@dataclass
class Life:
    """A worker as it is.

    Attributes:
        said: what it has told the generator, not yet heard.
        told: what the generator has told it, not yet heard.
        finished: whether the collective that it runs is over for it.
        log: groups that it has completed.
        levelled: how many steps it had made when it last levelled.
        value: its parameters.
    """

    member: Member
    said: deque[tuple] = field(default_factory=deque)
    told: deque[Run] = field(default_factory=deque)
    finished: bool = False
    steps: int = 0
    alive: bool = True
    log: list[int] = field(default_factory=list)
    levelled: int = 0
    value: float = 0.0


class Noting(Generator):
    """Notes who took part when a group of all was made."""

    def __init__(self, layout: Layout, rules: Rules, seed: int) -> None:
        super().__init__(layout, rules, seed)
        self.levels: dict[int, set[int]] = {}

    def _level_all(self, runs: list[Run]) -> None:
        before = self._made
        super()._level_all(runs)
        if self._made > before:
            self.levels[before] = {w for w in range(len(self._of)) if w in self}


class Game:
    """Plays workers against a generator, one random thing at a time, and checks each.

    Args:
        steps: of each worker.
        kills: deaths at random moments; who died comes back at a random moment, if `back`.
        slow: workers that compute ten times as long as the others.
        level: after how many steps all are to have one value; at the end as well. 0 for never.
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
        level: int = 0,
    ) -> None:
        self.generator = Noting(layout, rules, seed)
        self.rules, self.steps, self.kills, self.back = rules, steps, kills, back
        self.chance = Random(f"game {seed}")
        self.lives = [Life(Member(w, rules)) for w in range(layout.workers)]
        self.slow, self.level = frozenset(range(slow)), level
        for life in self.lives:
            life.value = self.chance.random()
        self.means: dict[tuple[int, int], float] = {}
        self.runs: list[Run] = []
        self.asked: list[int] = []
        self.now: dict[int, set[int]] = {}  # groups that run: who has not acknowledged them
        self.done: dict[tuple[int, int], set[int]] = {}  # collectives that have ended somewhere

    def play(self) -> Game:
        """Go on until all have made their steps."""
        while self._act():
            pass
        # Whoever is through does not ask again: it leaves, as at the end of a training.
        for worker, life in enumerate(self.lives):
            assert not life.alive, f"worker {worker} waits for ever after {life.steps} steps"
        assert not any(self.now.values()), f"groups that nobody ends: {self.now}"
        return self

    def _act(self) -> bool:
        """Do one thing, if there is one."""
        workers = range(len(self.lives))
        # Somebody at random; if that was in vain for long, whoever can do anything.
        for worker in (*self.chance.choices(workers, k=40), *workers):
            if moves := self._moves(worker):
                break
        else:
            return False
        move = self.chance.choice(moves)
        if move == self._computes and worker in self.slow and self.chance.random() < 0.9:
            return True
        if self.kills and self.chance.random() < 0.02:
            self.kills -= 1
            self._dies(self.chance.randrange(len(self.lives)))
            return True
        move(worker)
        return True

    def _moves(self, worker: int) -> list:
        """What a worker, or a message of it or to it, can do now."""
        life = self.lives[worker]
        moves = [self._hears] if life.told else []
        if life.said:
            moves.append(self._heard)
        if life.alive:
            if not life.member.waiting and not life.member.running:
                moves.append(self._computes)
            elif life.finished:
                moves.append(self._completes)
            elif self._may_finish(worker):
                moves.append(self._averages)
        return moves

    def _computes(self, worker: int) -> None:
        """Ends a step, or all of training."""
        life = self.lives[worker]
        due = self.level and (life.steps == self.steps or life.steps % self.level == 0)
        if due and life.levelled < life.steps:
            life.levelled = life.steps
            life.member.ask(level=True)
            life.said.append(("level",))
            return
        if life.steps == self.steps:
            self._dies(worker, for_good=True)
            return
        life.steps += 1
        life.member.ask()
        life.said.append(("ask",))

    def _may_finish(self, worker: int) -> bool:
        run = self.lives[worker].member.running
        if run is None or self.lives[worker].finished:
            return False
        # A collective ends where all have come to it; then it may end on some and not on others.
        return self.done.get(run[:2]) is not None or all(
            self.lives[m].alive and self.lives[m].member.running == run for m in run.members
        )

    def _averages(self, worker: int) -> None:
        life = self.lives[worker]
        run = life.member.running
        if run[:2] not in self.means:
            values = [self.lives[member].value for member in run.members]
            self.means[run[:2]] = sum(values) / len(values)
        life.value = self.means[run[:2]]
        self.done.setdefault(run[:2], set()).add(worker)
        life.finished = True

    def _completes(self, worker: int) -> None:
        life = self.lives[worker]
        run = life.member.done()
        life.finished = False
        life.log.append(run.number)
        life.said.append(("done", run.number, run.epoch))

    def _hears(self, worker: int) -> None:
        life = self.lives[worker]
        run = life.told.popleft()
        if not life.finished or run.number != life.member.running.number:
            life.member.hear(run)

    def _heard(self, worker: int) -> None:
        said = self.lives[worker].said.popleft()
        if said[0] == "ask":
            self.asked.append(worker)
            self._tell(self.generator.request(worker))
        elif said[0] == "level":
            self._tell(self.generator.level(worker))
        elif said[0] == "done":
            self.now.get(said[1], set()).discard(worker)
            self._tell(self.generator.acknowledge(worker, *said[1:]))
        elif said[0] == "gone":
            for members in self.now.values():
                members.discard(worker)
            self._tell(self.generator.gone(worker))
        else:
            life = self.lives[worker]
            life.member, life.alive, life.finished = Member(worker, self.rules), True, False
            life.told.clear()
            self.generator.joined(worker)

    def _dies(self, worker: int, for_good: bool = False) -> None:
        life = self.lives[worker]
        if not life.alive:
            return
        life.alive = False
        life.said.append(("gone",))  # What it has said before may still be heard.
        if self.back and not for_good:
            life.said.append(("back",))

    def _tell(self, runs: list[Run]) -> None:
        for run in runs:
            members = set(run.members)
            assert len(members) == len(run.members)
            if run.epoch:
                assert members <= self.now[run.number], f"{run} has members that are done"
            else:
                assert run.number not in self.now, f"{run} has run already"
                assert members == self.generator.levels.get(run.number, members), f"{run}: not all"
            for number, others in self.now.items():
                assert number == run.number or not members & others, f"{run} overlaps {number}"
            self.now[run.number] = members
            self.runs.append(run)
            for member in members:
                assert member in self.generator, f"{run} has worker {member}, who is gone"
                self.lives[member].told.append(run)
        self.now = {number: left for number, left in self.now.items() if left}


def in_one_order(logs: list[list[int]]) -> bool:
    """Whether each worker has its groups in the order of their numbers: then all see one order."""
    return all(log == sorted(set(log)) for log in logs)
