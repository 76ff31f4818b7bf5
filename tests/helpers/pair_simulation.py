"""Workers that average two at a time: machines in virtual time, and what carries for a pairing."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any

from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.pair_machine import Apply, Kind, PairMachine, Send


@dataclass
class SimulatedWorker:
    """One worker: its machine, its model, which is one exact number a part, and its averages.

    Attributes:
        fresh: parts of the average that is under way.
        state: what it does.
        met: each average that it has adopted: with whom, and the model before and after.
    """

    machine: PairMachine
    model: list[Fraction]
    fresh: dict[int, Fraction] = field(default_factory=dict)
    steps: int = 0
    state: str = "computes"
    alive: bool = True
    met: list[tuple[int, list[Fraction], list[Fraction]]] = field(default_factory=list)


class PairSimulation:
    """Plays machines in virtual time: steps and messages take any time, from a seed.

    Args:
        workers: how many.
        steps: of each, before all are levelled.
        chunks: parts of a model.
        kills: workers that die at some moment, and of whom the others hear later.
        bipartite: as for `PairMachine`.
        gradients: whether steps change models.
    """

    def __init__(
        self,
        workers: int,
        seed: int,
        *,
        steps: int = 6,
        chunks: int = 2,
        kills: int = 0,
        bipartite: bool = True,
        gradients: bool = True,
    ) -> None:
        self.rng = Random(f"pairs {seed}")
        self.steps, self.chunks = steps, chunks
        self.workers = [
            SimulatedWorker(
                PairMachine(rank, workers, chunks, seed, bipartite=bipartite),
                [Fraction(rank * chunks + chunk) for chunk in range(chunks)],
            )
            for rank in range(workers)
        ]
        self.total = [
            sum(worker.model[chunk] for worker in self.workers) for chunk in range(chunks)
        ]
        self.bipartite, self.gradients = bipartite, gradients
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._latest: dict[tuple[int, int], float] = {}
        for rank in range(workers):
            self._after(self.rng.random(), self._step, rank)
        for rank in self.rng.sample(range(workers), kills):
            self._after(self.rng.random() * steps * 3, self._die, rank)

    def play(self) -> PairSimulation:
        """Go on until nothing happens any more."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self

    @property
    def stuck(self) -> list[int]:
        """The workers that live and wait for ever."""
        return [
            rank
            for rank, worker in enumerate(self.workers)
            if worker.alive and worker.state != "ends"
        ]

    def _after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        event = (self.now + seconds, next(self._count), lambda: what(*args))
        heapq.heappush(self._events, event)

    # -- what a worker does ---------------------------------------------------------------

    def _step(self, rank: int) -> None:
        """Begin: the gradients of the next step are computed while models are averaged."""
        worker = self.workers[rank]
        if worker.alive:
            worker.state = "computes"
            worker.machine.begin()
            self._execute(rank)
            self._after(self.rng.choice([0.0, 1.0, 3.0]) * self.rng.random(), self._end, rank)

    def _end(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.alive:
            worker.state = "waits"
            worker.machine.end()
            self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        """Go on if nothing has to be waited for any more."""
        worker = self.workers[rank]
        machine = worker.machine
        if worker.state == "waits" and not machine.pending:
            worker.steps += 1
            for chunk in range(self.chunks):  # a step that changes the model
                by = Fraction(self.rng.randrange(-8, 9) * self.gradients)
                worker.model[chunk] += by
                self.total[chunk] += by
            if worker.steps < self.steps:
                worker.state = "computes"
                self._after(self.rng.random() / 10, self._step, rank)
            elif self.bipartite:
                worker.state = "levels"
                machine.synchronize()
                self._execute(rank)
            else:
                worker.state = "ends"
        if worker.state == "levels" and machine.synchronized:
            machine.end()
            worker.state = "ends"

    def _die(self, rank: int) -> None:
        self.workers[rank].alive = False
        for other in range(len(self.workers)):
            if other != rank:
                self._after(5.0 * self.rng.random(), self._miss, other, rank)

    def _miss(self, rank: int, dead: int) -> None:
        if self.workers[rank].alive:
            self.workers[rank].machine.remove(dead, lost=True)
            self._execute(rank)
            self._go_on(rank)

    # -- what is sent ---------------------------------------------------------------------

    def _execute(self, rank: int) -> None:
        worker = self.workers[rank]
        while worker.machine.commands:
            command = worker.machine.commands.popleft()
            if isinstance(command, Send):
                self._send(rank, command)
            elif isinstance(command, Apply):
                before, worker.model = worker.model, [worker.fresh[p] for p in range(self.chunks)]
                worker.met.append((command.peer, before, worker.model[:]))
                worker.fresh = {}
            else:
                worker.fresh = {}

    def _send(self, rank: int, command: Send) -> None:
        worker, value = self.workers[rank], None
        if command.kind == Kind.CHUNK:
            value = worker.model[command.chunk]
        elif command.kind == Kind.AVERAGE:
            value = worker.fresh[command.chunk]
        way = rank, command.peer
        arrives = self.now + self.rng.choice([0.01, 1.0]) * self.rng.random()
        at = max(arrives, self._latest.get(way, 0.0))
        self._latest[way] = at
        self._after(at - self.now, self._receive, rank, command, value)

    def _receive(self, source: int, command: Send, value: Fraction | None) -> None:
        rank = command.peer
        worker = self.workers[rank]
        if not worker.alive:
            return
        if (
            worker.machine.receive(source, command.kind, command.number, command.chunk)
            and value is not None
        ):
            mean = command.kind == Kind.AVERAGE
            worker.fresh[command.chunk] = (
                value if mean else (worker.model[command.chunk] + value) / 2
            )
        self._execute(rank)
        self._go_on(rank)


class FakeNetwork:
    """Carries messages between pairings of one thread, when a test says so.

    Args:
        workers: how many.
        reach: how many interfaces lead from each to each other.
    """

    def __init__(self, workers: int, reach: int = 1) -> None:
        self.boxes = [FakeMailbox(self, rank, reach) for rank in range(workers)]

    def kill(self, rank: int) -> None:
        """Let all others find out that a worker is dead."""
        for box in self.boxes:
            box.lost[rank] = "gave no sign for 10 s"
            box.mail = deque(each for each in box.mail if each.peer != rank)


class FakeMailbox:
    """What a pairing uses of a mailbox."""

    def __init__(self, network: FakeNetwork, rank: int, reach: int) -> None:
        self._office, self._rank, self._reach = network, rank, reach
        self.mail: deque[SimpleNamespace] = deque()
        self.lost: dict[int, str] = {}
        self.left: frozenset[int] = frozenset()
        self.cut: dict[int, float] = {}
        self.dropped: list[int] = []
        self.refused: Counter[str] = Counter()
        self.late: deque[SimpleNamespace] = deque()
        """What a keeper has taken in meanwhile."""

    def interrupter(self) -> Callable[[], None]:
        return lambda: None

    def interfaces(self, peer: int) -> tuple[int, ...]:
        return tuple(range(self._reach))

    def close(self, seconds: float) -> None:
        pass

    def next(self, seconds: float, *, keep: bool) -> SimpleNamespace | None:
        return self.poll(keep=keep)

    def drop(self, peer: int) -> None:
        self.dropped.append(peer)

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def poll(self, *, keep: bool = False) -> SimpleNamespace | None:
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
                interface=interface or 0,
            )
        )
