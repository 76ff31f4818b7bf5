"""Streams of several workers in virtual time, over interfaces that can be cut."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from helpers.mail import Clock
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.streams import BEGIN, Streams

WINDOW = 40_000


@dataclass(eq=False, slots=True)
class Letter:
    """A message, at its sender and as it comes."""

    peer: int
    kind: int
    payload: Any
    ids: tuple[int, int, int, int]
    size: int
    arrived: bool = False


class Cards:
    """Workers with interfaces: what goes over one that is cut waits until it is mended.

    Args:
        reach: by worker and interface, whom it reaches.
        seed: of delays.
    """

    def __init__(
        self,
        reach: Sequence[Sequence[Collection[int]]],
        seed: int = 0,
        *,
        delay: float = 0.01,
        patience: float = 10.0,
    ) -> None:
        self.reach, self.chance, self.delay = reach, random.Random(seed), delay
        self.slow: dict[tuple[int, int], float] = {}  # by worker and interface
        self.apart: set[frozenset[int]] = set()  # pairs that do not reach each other
        self.clock, self.down, self.dead = Clock(), set[tuple[int, int]](), set[int]()
        self.ended: dict[frozenset[int], float] = {}  # since when, of pairs' connections
        self.sent: Counter[tuple[int, int]] = Counter()
        self._flows: dict[tuple[int, int, int], deque[Letter]] = {}
        self._agenda: list[tuple[float, int, tuple[int, int, int]]] = []
        self._count = itertools.count()
        n = len(reach)
        joined = [set().union(*cards) - {w} for w, cards in enumerate(reach)]
        all_joined = all(len(peers) == n - 1 for peers in joined)
        self.lines: list[str] = []
        self.boxes = [Box(self, worker) for worker in range(n)]
        self.streams = [self.new(w, [0] * n, None if all_joined else joined, patience)
                      for w in range(n)]  # fmt: skip
        self.joined, self.got = joined, {w: list[tuple[int, Any]]() for w in range(n)}
        self.plan: dict[tuple[int, int], deque[bytes]] = {}

    def new(self, worker: int, lives: list[int], joined: Any, patience: float) -> Streams:
        return Streams(
            self.boxes[worker], worker, len(self.reach), incarnations=lives, joined=joined, cut=2.0,
            timeout=patience, interface_name="eth{}".format,
            record=lambda _, text: self.lines.append(text),
            clock=self.clock,
        )  # fmt: skip

    def post(self, way: tuple[int, int, int], letter: Letter) -> None:
        self.sent[way[0], way[1]] += letter.size
        flow = self._flows.setdefault(way, deque())
        flow.append(letter)
        if len(flow) == 1:
            self._later(way)

    def _later(self, way: tuple[int, int, int]) -> None:
        delay = self.slow.get(way[:2], self.delay)
        when = self.clock.now + self.chance.random() * delay
        heapq.heappush(self._agenda, (when, next(self._count), way))

    def kill(self, worker: int) -> None:
        """End a process; the kernel ends its connections."""
        self.dead.add(worker)
        for peer in self.boxes[worker].peers:
            self.ended[frozenset((worker, peer))] = self.clock.now

    def cut(self, worker: int, interface: int) -> None:
        self.down.add((worker, interface))

    def mend(self, worker: int, interface: int) -> None:
        self.down.discard((worker, interface))
        for way, flow in self._flows.items():
            if flow:
                self._later(way)

    def _arrive(self, way: tuple[int, int, int]) -> None:
        source, interface, to = way
        flow = self._flows[way]
        theirs = [i for i, peers in enumerate(self.reach[to]) if source in peers]
        there = interface if interface in theirs else theirs[0]
        if frozenset((source, to)) in self.apart:
            return
        if not flow or {(source, interface), (to, there)} & self.down or to in self.dead:
            return
        letter = flow.popleft()
        letter.arrived = True
        copy = Letter(source, letter.kind, letter.payload, letter.ids, letter.size)
        for one, _, payload in self.streams[to].receive(copy):
            self.got[to].append((one, payload))
        if flow:
            self._later(way)

    def say(self, source: int, to: int, payloads: Sequence[bytes]) -> None:
        """Send these, one after the other, as soon as there is room."""
        self.plan.setdefault((source, to), deque()).extend(payloads)

    def run(
        self, seconds: float, step: float = 0.02, each: Callable[[], object] = lambda: None
    ) -> None:
        """Let time pass, and do something after each step."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            for (source, to), waiting in self.plan.items():
                streams = self.streams[source]
                while waiting and source not in self.dead and streams.send(to, BEGIN, waiting[0]):
                    waiting.popleft()
            for worker, streams in enumerate(self.streams):
                if worker not in self.dead:
                    streams.tick()
            self.clock.now += step
            while self._agenda and self._agenda[0][0] <= self.clock.now:
                self._arrive(heapq.heappop(self._agenda)[2])
            each()

    def from_(self, source: int, to: int) -> list[Any]:
        return [payload for one, payload in self.got[to] if one == source]


class Box:
    """A mailbox of one worker."""

    largest = 10_000

    def __init__(self, cards: Cards, number: int) -> None:
        self._cards, self._number = cards, number
        self.lost: dict[int, str] = {}
        self.left: frozenset[int] = frozenset()
        self.peers = tuple(sorted(set().union(*cards.reach[number]) - {number}))

    def unconnected(self) -> dict[int, float]:
        now, ended = self._cards.clock.now, self._cards.ended
        pairs = {peer: frozenset((self._number, peer)) for peer in self.peers}
        return {peer: now - ended[pair] for peer, pair in pairs.items() if pair in ended}

    def interfaces(self, peer: int) -> tuple[int, ...]:
        cards = enumerate(self._cards.reach[self._number])
        return tuple(i for i, peers in cards if peer in peers)

    def room(self, peer: int, *, interface: int, urgency: int) -> int:
        assert urgency == 0
        flow = self._cards._flows.get((self._number, interface, peer), ())
        return WINDOW - sum(letter.size for letter in flow)

    def post(
        self, peer: int, kind: int, payload: Any = b"", *, ids: Sequence[int], interface: int,
        urgency: int,
    ) -> Letter:  # fmt: skip
        if peer in self.lost:
            raise PeerError("it is lost")
        assert self.room(peer, interface=interface, urgency=urgency) >= len(payload)
        one, two, three, four = ids
        letter = Letter(peer, kind, payload, (one, two, three, four), 100 + len(payload))
        self._cards.post((self._number, interface, peer), letter)
        return letter


def star(workers: int, interfaces: int) -> list[list[list[int]]]:
    """All reach all over each interface."""
    return [[[w for w in range(workers) if w != me]] * interfaces for me in range(workers)]


def bcube(ports: int, levels: int) -> list[list[list[int]]]:
    """Interface l reaches those who differ in digit l alone."""
    out = []
    for me in range(ports**levels):
        digits = [me // ports**level % ports for level in range(levels)]
        out.append(
            [
                [me + (port - own) * ports**level for port in range(ports) if port != own]
                for level, own in enumerate(digits)
            ]
        )
    return out
