"""Workers under bounded staleness in virtual time: everything from a seed, and all of it logged."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from wingbeat.methods.bounded_staleness.audit import audit as check
from wingbeat.methods.bounded_staleness.journal import Journal
from wingbeat.methods.bounded_staleness.messages import Entry, Report, Round
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.rebundling import Decision, Rebundling
from wingbeat.methods.bounded_staleness.worker import Worker

TENSORS = 6
"""That are bundled in games."""


class Store:
    """What the rendezvous store is to workers."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str, seconds: float) -> str:
        return self._values[key]

    def has(self, key: str) -> bool:
        return key in self._values

    def claim(self, key: str, value: str) -> str:
        return self._values.setdefault(key, value)


def gradient(worker: int, iteration: int, colayer: int, piece: int) -> float:
    """Numbers of very different size, so that every order of addition has its own bits."""
    rng = random.Random(f"{worker} {iteration} {colayer} {piece}")
    return rng.uniform(-1, 1) * 10.0 ** rng.randrange(-6, 6)


def add(colayer: int, piece: int, waiting: dict[Entry, Any]) -> float | None:
    """Sum contributions in the order that was given."""
    total = None
    for value in waiting.values():
        total = value if total is None else total + value
    return total


@dataclass
class Replica:
    """Parameters and momentum, one number a piece: an optimizer whose steps do not commute."""

    workers: int
    colayers: int
    values: list[list[float]] = field(default_factory=list)
    momenta: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for table in (self.values, self.momenta):
            table += [[0.0] * self.workers for _ in range(self.colayers)]

    def step(self, parts: tuple[Round, ...]) -> None:
        for part in parts:
            if part.payload is None:
                continue
            z, q = part.colayer, part.piece
            self.momenta[z][q] = 0.9 * self.momenta[z][q] + part.payload
            self.values[z][q] -= 0.1 * self.momenta[z][q]

    def copied(self) -> tuple[list[list[float]], list[list[float]]]:
        return [list(r) for r in self.values], [list(r) for r in self.momenta]

    def bits(self) -> str:
        return str([[v.hex() for v in row] for row in self.values + self.momenta])


class Player:
    """One life of a worker: its machine, its replica, its training, and its log."""

    def __init__(self, game: Game, rank: int, life: int = 0) -> None:
        self.game, self.rank, self.life = game, rank, life
        self.meeting = Rebundling(
            game.store, "game", rank, TENSORS, game.choose,
            first=game.first or 0, again=3, clock=lambda: game.now,
        )  # fmt: skip
        if game.first is None:
            self.meeting.due = None
        self.meeting.catch_up()
        self.pace, self.epoch = game.pace, 0
        if (decision := self.meeting.decision) is not None and decision.buckets:
            self.pace, self.epoch = game.pace_of(len(decision.buckets)), 1
        self.machine = Worker(
            rank, game.n, self.pace, add, keep=game.keep, life=life, history=True, epoch=self.epoch
        )  # fmt: skip
        self.replica = Replica(game.n, self.pace.colayers)
        self.settling = self.told = self.polls = False
        self.gone: set[int] = set()
        self.early: list[tuple[Player, Any]] = []
        self.applied: list[tuple[Round, ...]] = []
        self.pulls = 0
        self.sent: set[tuple[int, int]] = set()
        self.begun: list[int] = []
        self.lost_to: set[int] = set()
        self.alive, self.waiting, self.colayer = True, True, 0
        self.lines: list[str] = []
        self.journal = Journal(self.lines.append, rank, life, game.n, self.pace)

    def tick(self) -> None:
        """Do the next thing that training does."""
        if not self.alive or self.machine.expelled:
            return
        if self.waiting:
            self.between()
            return
        iteration, z = self.begun[-1], self.colayer
        payloads = [gradient(self.rank, iteration, z, q) for q in range(self.game.n)]
        sent = self.machine.computed(z, payloads)
        if sent:
            self.sent.add((iteration, z))
            self.journal.sent(iteration, z)
        self.colayer += 1
        if self.colayer == self.pace.colayers or not sent:
            self.machine.finish()
            self.journal.dropped(self.machine.dropped)
            self.waiting = True
            self.between()
        else:
            self.game.later(self.game.pause(self.rank), self.tick)

    def between(self) -> None:
        """Apply what has come, and begin the next iteration if that is possible."""
        machine = self.machine
        if self.told and not self.decided():
            return
        self.apply()
        if self.settling:
            self.settle()
        elif machine.joining and self.meeting.over() and self.meeting.decision:
            self.refuse_if_late(self.meeting.decision)
        if not self.settling and self.alive:
            self.go_on()

    def go_on(self) -> None:
        """End, settle, or begin an iteration, if any of it is to be done now."""
        machine = self.machine
        if machine.ended:
            if machine.resumed_elsewhere:
                machine.resume()
                machine.end()
        elif machine.wanted >= self.game.iterations and machine.lacking is None:
            self.meeting.ended()
            machine.end()
        elif machine.lacking is None and self.meeting.is_due(machine.zeta):
            self.settling = True
            machine.end()
            self.game.moment("settling", self)
            self.poll()
        elif machine.ready():
            self.game.check_bound(self, machine.wanted)
            self.begun.append(machine.begin())
            self.journal.began(self.begun[-1])
            self.waiting, self.colayer = False, 0
            self.game.later(self.game.pause(self.rank), self.tick)

    def apply(self) -> None:
        """Bring the replica up to date, and let others have it."""
        machine = self.machine
        if (pulled := machine.adopt()) is not None:
            values, momenta, applied = pulled
            self.replica.values = [list(r) for r in values]
            self.replica.momenta = [list(r) for r in momenta]
            self.applied, self.pulls = list(applied), self.pulls + 1
            self.journal.pulled(machine.applied)
        while (parts := machine.take()) is not None:
            self.replica.step(parts)
            self.applied.append(parts)
            self.journal.applied(parts)
        for worker in machine.serve():
            copied = machine.parameters((*self.replica.copied(), list(self.applied)))
            self.game.post(self, worker, copied)

    # -- other colayers -------------------------------------------------------------------

    def poll(self) -> None:
        """Look again soon, also if nothing comes."""
        if not self.polls and self.settling and self.alive:
            self.polls = True
            self.game.later(1.0, self.polled)

    def polled(self) -> None:
        self.polls = False
        if self.settling and self.alive and not self.machine.expelled:
            self.between()
            self.poll()

    def settle(self) -> None:
        """Say what is known here if all have settled, or go on if others who had do."""
        machine = self.machine
        if machine.level:
            self.told = True
            self.game.moment("settled", self)
            if self.alive:
                self.decided()
        elif self.meeting.over():
            assert self.meeting.decision is not None
            assert self.meeting.decision.buckets is None, "it is counted in and had not settled"
            self.settling = False
            self.journal.went_on(machine.at)
            machine.go_on(self.meeting.decision.rounds)

    def decided(self) -> bool:
        """Look for a decision, and follow it."""
        before = self.meeting.missing() if self.meeting._view else None
        decision = self.meeting.decide(self.machine, self.gone, self.rank)
        if before is None:
            self.game.moment("told", self)
        if decision is None or not self.alive:
            return False
        self.game.moment("decided", self)
        if not self.alive:
            return False
        self.settling = self.told = False
        self.gone.clear()
        if decision.buckets is None:
            self.journal.went_on(self.machine.at)
            self.machine.go_on(decision.rounds)
            return True
        self.rebundle(decision)
        self.game.moment("changed", self)
        return self.alive

    def rebundle(self, decision: Decision) -> None:
        assert decision.buckets is not None
        assert decision.rounds == self.machine.applied, "nothing is applied until it is decided"
        self.game.digests.append(self.replica.bits())
        before, self.pace = self.replica, self.game.pace_of(len(decision.buckets))
        self.epoch += 1
        self.machine.rebundle(self.pace, add, decision.view)
        self.journal.rebundled(self.pace, self.machine.at)
        self.replica = Replica(self.game.n, self.pace.colayers)
        for z in range(self.pace.colayers):
            self.replica.values[z] = list(before.values[z % before.colayers])
        early, self.early = self.early, []
        for sender, message in early:
            self.machine.receive(sender.rank, sender.life, message)

    def refuse_if_late(self, decision: Decision) -> None:
        """End, as the others have other colayers by now and do not know of this one."""
        if decision.buckets is not None and decision.view[self.rank] != 2 * self.life:
            self.game.refused += 1
            self.alive = False
            self.game.dead.append(self)
            self.game.players[self.rank] = None
            self.game.later(1.0, lambda: self.game.come_back(self))

    @property
    def done(self) -> bool:
        machine = self.machine
        return machine.settled and machine.lacking is None and self.waiting and not self.settling


class Game:
    """All of them, a network that is in order from one to another, and somebody who kills."""

    def __init__(
        self,
        seed: int,
        n: int,
        pace: Pace,
        iterations: int = 5,
        kills: int = 0,
        keep: int | None = None,
        even: bool = False,
        returns: bool = True,
        first: int | None = None,
        dies: str = "",
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.n, self.pace, self.iterations, self.keep = n, pace, iterations, keep
        self.now, self.returns, self.stranded = 0.0, returns, False
        self.store, self.first, self.dies = Store(), first, dies
        self.digests: list[str] = []
        self.refused = 0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.even = even
        self.speed = [1.0 if even else self.rng.choice((0.5, 1, 1, 1, 3, 8)) for _ in range(n)]
        self.lag = self.rng.choice((0.01, 0.3, 3.0))
        self.arrival: dict[tuple[int, int], float] = {}
        self.dead: list[Player] = []
        self.players: list[Player | None] = []
        self.players += [Player(self, rank) for rank in range(n)]
        for player in self.living():
            self.later(self.pause(player.rank), player.tick)
        for _ in range(kills):
            self.later(self.rng.uniform(0, 2.0 * iterations * pace.colayers), self.kill)

    def living(self) -> list[Player]:
        return [player for player in self.players if player is not None]

    def later(self, delay: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay, what)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.count), what))

    def pause(self, rank: int) -> float:
        spread = 0.05 if self.even else 0.5
        return self.speed[rank] * self.rng.uniform(1 - spread, 1 + spread)

    def flush(self, player: Player) -> None:
        while player.machine.posts:
            post = player.machine.posts.popleft()
            for worker in post.to:
                self.post(player, worker, post.message)

    def post(self, player: Player, to: int, message: Any) -> None:
        pair = player.rank, to
        life = None if isinstance(message, Report) else player.machine.life_of(to)
        epoch = player.machine.epoch
        when = max(self.now + self.rng.expovariate(1 / self.lag), self.arrival.get(pair, 0.0))
        self.arrival[pair] = when
        self.at(when, lambda: self.arrive(player, to, life, message, epoch))

    def arrive(self, sender: Player, to: int, life: int | None, message: Any, epoch: int) -> None:
        player = self.players[to]
        if player is None or (not sender.alive and self.cut(sender, to)):
            return
        if life not in (None, player.life):
            return
        if epoch > player.machine.epoch:
            player.early.append((sender, message))
        elif epoch == player.machine.epoch:
            player.machine.receive(sender.rank, sender.life, message)
        if player.waiting:
            player.tick()

    def cut(self, sender: Player, to: int) -> bool:
        """Whether what is still on its way from a dead worker is lost from now on."""
        if to not in sender.lost_to and self.rng.random() < 0.3:
            sender.lost_to.add(to)
        return to in sender.lost_to

    def kill(self) -> None:
        living = self.living()
        whole = [p for p in living if not p.machine.joining and not p.machine.expelled]
        if len(whole) < 2:
            return  # with them the parameters would be gone
        victim = self.rng.choice(living)
        if all(player.done for player in living):
            return
        self.end(victim)

    def end(self, victim: Player) -> None:
        victim.alive = False
        self.dead.append(victim)
        self.players[victim.rank] = None
        for player in self.living():
            first = self.rng.uniform(1, 20)
            for after in (0, 20, 60, 180):  # as a deadline does, whenever its life was heard of
                self.later(first + after, lambda p=player: self.notice(p, victim))
        if self.returns and self.rng.random() < 0.7:
            self.later(self.rng.uniform(0, 40), lambda: self.come_back(victim))

    def notice(self, player: Player, victim: Player) -> None:
        if player.alive and not player.machine.expelled:
            if self.first is not None and player.machine.settled:
                player.gone.add(victim.rank)  # nobody needs it, unless training goes on
                self.later(1.0, lambda: self.notice_if_not_done(player, victim))
            else:
                player.machine.lost(victim.rank, victim.life)
            if player.waiting:
                player.tick()

    def notice_if_not_done(self, player: Player, victim: Player) -> None:
        if not player.done:
            self.notice(player, victim)

    def moment(self, name: str, player: Player) -> None:
        """Something has happened to a worker: maybe its last."""
        if self.dies == name and len(self.living()) > 2 and self.rng.random() < 0.5:
            self.dies = ""
            self.end(player)

    def pace_of(self, colayers: int) -> Pace:
        """The thresholds with other colayers: p in proportion."""
        pace = self.pace
        p = max(1, colayers * pace.p // pace.colayers)
        return Pace(pace.s, p, colayers, pace.in_flight)

    def choose(self, told: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Bundle tensors in another way: each time in as many buckets as all have said in sum."""
        count = 1 + (sum(told) + self.seed) % 4
        ends = [TENSORS * n // count for n in range(count + 1)]
        return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))

    def come_back(self, victim: Player) -> None:
        if self.players[victim.rank] is None and not all(p.done for p in self.living()):
            player = Player(self, victim.rank, victim.life + 1)
            self.players[victim.rank] = player
            self.later(0, player.tick)
            for other in self.dead:
                for after in (20, 60, 180):
                    self.later(after, lambda o=other: self.notice(player, o))

    def play(self) -> Game:
        """Play to the end.

        Raises:
            AssertionError: it does not end.
        """
        for _ in range(400_000):
            for player in self.living():
                self.flush(player)
            if not self.agenda:
                break
            self.now, _, what = heapq.heappop(self.agenda)
            what()
        for player in self.living():
            player.between()
            if player.machine.stranded:
                self.stranded = True  # whoever had all parameters has died
                return self
            assert player.done, f"worker {player.rank} is stuck at {player.machine.at}"
            player.journal.settled(player.machine.applied, player.replica.bits())
        return self

    def check_bound(self, player: Player, iteration: int) -> None:
        """Nobody begins an iteration more than s before one that another still computes."""
        even = player.machine._even.now
        assert len(player.applied) >= self.pace.first_needed(iteration, even=even), (
            "sums it should have seen are missing"
        )
        if self.pace.s is None:
            return
        for other in self.living():
            machine = other.machine
            if other is player or machine.ended or machine.expelled or machine.joining:
                continue
            assert machine.at >= iteration - self.pace.s, (player.rank, iteration, other.rank)


def audit(game: Game) -> None:
    """Check what must hold after a drain, from the logs of all workers.

    Raises:
        AssertionError: something does not.
    """
    players = game.living()
    found = check(player.lines for player in [*players, *game.dead])
    assert not found.findings, found.findings
    first = players[0]
    assert len({player.replica.bits() for player in players}) == 1, "replicas differ"
    assert all(_log(player) == _log(first) for player in players), "logs differ"
    counted = {
        (iteration, worker, part.colayer, part.piece)
        for parts in first.applied
        for part in parts
        for iteration, worker in part.entries
    }
    for player in players:
        _audit_gei(game, player, counted)


def _log(player: Player) -> list[list[tuple[int, int, int, tuple[Entry, ...]]]]:
    return [[(p.colayer, p.piece, p.number, p.entries) for p in parts] for parts in player.applied]


def _audit_gei(game: Game, player: Player, counted: set[tuple[int, int, int, int]]) -> None:
    """Rows are what the log says, and those that can change no more are retired."""
    gei = player.machine.gei
    for iteration in range(gei.zeta + 1):
        changed = player.meeting.decision
        before = changed is not None and changed.buckets and iteration < changed.rounds
        row = tuple(
            sum(
                1 << w
                for w in range(game.n)
                if all((iteration, w, z, q) in counted for q in range(game.n))
            )
            for z in range((game.pace if before else player.pace).colayers)
        )
        if iteration < gei.retired:
            if len(gei.history) < gei.retired:
                continue  # of before it came back
            assert gei.history[iteration] == row, f"{iteration}: {gei.history[iteration]} {row}"
        else:
            assert gei.row(iteration) == row
    assert gei.retired == game.living()[0].machine.gei.retired
    assert game.dead or gei.retired >= player.machine.at
