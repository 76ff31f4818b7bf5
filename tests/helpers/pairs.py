"""Workers that average two at a time: machines in virtual time, and what carries for a pairing."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any

from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.pair_machine import Adopt, Kind, Say, Worker


@dataclass
class Life:
    """One worker: its machine, its model, which is one exact number a part, and its averages.

    Attributes:
        fresh: parts of the average that is under way.
        state: what it does.
        met: each average that it has adopted: with whom, and the model before and after.
    """

    machine: Worker
    model: list[Fraction]
    fresh: dict[int, Fraction] = field(default_factory=dict)
    steps: int = 0
    state: str = "computes"
    alive: bool = True
    met: list[tuple[int, list[Fraction], list[Fraction]]] = field(default_factory=list)


class Game:
    """Plays machines in virtual time: steps and messages take any time, from a seed.

    Args:
        workers: how many.
        steps: of each, before all are levelled.
        pieces: parts of a model.
        kills: workers that die at some moment, and of whom the others hear later.
        restricted: as for `Worker`.
        gradients: whether steps change models.
    """

    def __init__(
        self,
        workers: int,
        seed: int,
        *,
        steps: int = 6,
        pieces: int = 2,
        kills: int = 0,
        restricted: bool = True,
        gradients: bool = True,
    ) -> None:
        self.chance = Random(f"pairs {seed}")
        self.steps, self.pieces = steps, pieces
        self.lives = [
            Life(
                Worker(rank, workers, pieces, seed, restricted=restricted),
                [Fraction(rank * pieces + piece) for piece in range(pieces)],
            )
            for rank in range(workers)
        ]
        self.total = [sum(life.model[piece] for life in self.lives) for piece in range(pieces)]
        self.restricted, self.gradients = restricted, gradients
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._latest: dict[tuple[int, int], float] = {}
        for rank in range(workers):
            self._after(self.chance.random(), self._step, rank)
        for rank in self.chance.sample(range(workers), kills):
            self._after(self.chance.random() * steps * 3, self._die, rank)

    def play(self) -> Game:
        """Go on until nothing happens any more."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self

    @property
    def stuck(self) -> list[int]:
        """The workers that live and wait for ever."""
        return [rank for rank, life in enumerate(self.lives) if life.alive and life.state != "ends"]

    def _after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        event = (self.now + seconds, next(self._count), lambda: what(*args))
        heapq.heappush(self._events, event)

    # -- what a worker does ---------------------------------------------------------------

    def _step(self, rank: int) -> None:
        """Begin: the gradients of the next step are computed while models are averaged."""
        life = self.lives[rank]
        if life.alive:
            life.state = "computes"
            life.machine.begin()
            self._carry(rank)
            self._after(self.chance.choice([0.0, 1.0, 3.0]) * self.chance.random(), self._end, rank)

    def _end(self, rank: int) -> None:
        life = self.lives[rank]
        if life.alive:
            life.state = "waits"
            life.machine.shut()
            self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        """Go on if nothing has to be waited for any more."""
        life = self.lives[rank]
        machine = life.machine
        if life.state == "waits" and not machine.pending:
            life.steps += 1
            for piece in range(self.pieces):  # a step that changes the model
                by = Fraction(self.chance.randrange(-8, 9) * self.gradients)
                life.model[piece] += by
                self.total[piece] += by
            if life.steps < self.steps:
                life.state = "computes"
                self._after(self.chance.random() / 10, self._step, rank)
            elif self.restricted:
                life.state = "levels"
                machine.level()
                self._carry(rank)
            else:
                life.state = "ends"
        if life.state == "levels" and machine.levelled:
            machine.shut()
            life.state = "ends"

    def _die(self, rank: int) -> None:
        self.lives[rank].alive = False
        for other in range(len(self.lives)):
            if other != rank:
                self._after(5.0 * self.chance.random(), self._miss, other, rank)

    def _miss(self, rank: int, dead: int) -> None:
        if self.lives[rank].alive:
            self.lives[rank].machine.gone(dead, lost=True)
            self._carry(rank)
            self._go_on(rank)

    # -- what is sent ---------------------------------------------------------------------

    def _carry(self, rank: int) -> None:
        life = self.lives[rank]
        while life.machine.orders:
            order = life.machine.orders.popleft()
            if isinstance(order, Say):
                self._say(rank, order)
            elif isinstance(order, Adopt):
                before, life.model = life.model, [life.fresh[p] for p in range(self.pieces)]
                life.met.append((order.peer, before, life.model[:]))
                life.fresh = {}
            else:
                life.fresh = {}

    def _say(self, rank: int, order: Say) -> None:
        life, value = self.lives[rank], None
        if order.kind == Kind.PIECE:
            value = life.model[order.piece]
        elif order.kind == Kind.MEAN:
            value = life.fresh[order.piece]
        way = rank, order.peer
        arrives = self.now + self.chance.choice([0.01, 1.0]) * self.chance.random()
        at = max(arrives, self._latest.get(way, 0.0))
        self._latest[way] = at
        self._after(at - self.now, self._hear, rank, order, value)

    def _hear(self, source: int, order: Say, value: Fraction | None) -> None:
        rank = order.peer
        life = self.lives[rank]
        if not life.alive:
            return
        if life.machine.heard(source, order.kind, order.number, order.piece) and value is not None:
            mean = order.kind == Kind.MEAN
            life.fresh[order.piece] = value if mean else (life.model[order.piece] + value) / 2
        self._carry(rank)
        self._go_on(rank)


class Office:
    """Carries messages between pairings of one thread, when a test says so.

    Args:
        workers: how many.
        reach: how many interfaces lead from each to each other.
    """

    def __init__(self, workers: int, reach: int = 1) -> None:
        self.boxes = [Box(self, rank, reach) for rank in range(workers)]

    def kill(self, rank: int) -> None:
        """Let all others find out that a worker is dead."""
        for box in self.boxes:
            box.lost[rank] = "gave no sign for 10 s"
            box.mail = deque(each for each in box.mail if each.peer != rank)


class Box:
    """What a pairing uses of a mailbox."""

    def __init__(self, office: Office, rank: int, reach: int) -> None:
        self._office, self._rank, self._reach = office, rank, reach
        self.mail: deque[SimpleNamespace] = deque()
        self.lost: dict[int, str] = {}
        self.left: frozenset[int] = frozenset()
        self.cut: dict[int, float] = {}
        self.dropped: list[int] = []
        self.late: deque[SimpleNamespace] = deque()
        """What a keeper has taken in meanwhile."""

    def interrupter(self) -> Callable[[], None]:
        return lambda: None

    def interfaces(self, peer: int) -> tuple[int, ...]:
        return tuple(range(self._reach))

    def drop(self, peer: int) -> None:
        self.dropped.append(peer)

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def poll(self) -> SimpleNamespace | None:
        return self.late.popleft() if self.late else None

    def post(
        self, peer: int, kind: int, payload: Any = b"", *, ids: Any, interface: int | None = None
    ) -> None:
        if peer in self.lost:
            raise PeerError(f"rank {peer} {self.lost[peer]}")
        self._office.boxes[peer].mail.append(
            SimpleNamespace(
                peer=self._rank,
                kind=kind,
                ids=ids,
                payload=memoryview(bytes(payload)),
                route=SimpleNamespace(interface=interface or 0),
            )
        )
