"""A network in virtual time that loses, delays, reorders and repeats frames, with a seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from wingbeat._native import Header


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of loss and duplication of frames; maximum delay in seconds.

    With ``reorder``, frames may overtake each other within a flow.
    """

    drop: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    reorder: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Sent:
    """A frame on its way; the earliest is first."""

    at: float
    number: int
    source: int
    target: int
    urgency: int
    header: Header
    payload: bytes


class Network:
    """Carries frames between processes; ``clock`` returns seconds."""

    def __init__(self, faults: Faults | None, seed: int, clock: Callable[[], float]) -> None:
        self.faults, self.clock = faults or Faults(), clock
        self.broken: set[frozenset[int]] = set()
        self._random = random.Random(seed)
        self._sent: list[Sent] = []
        self._count = itertools.count()
        self._latest: dict[tuple[int, int, int], float] = {}

    def cut_off(self, a: int, b: int) -> None:
        """Lose all frames between two processes until `join`."""
        self.broken.add(frozenset((a, b)))

    def join(self, a: int, b: int) -> None:
        """End `cut_off`."""
        self.broken.discard(frozenset((a, b)))

    def next_at(self) -> float | None:
        """Time of the next arrival at any process; None if no frame is in flight."""
        return self._sent[0].at if self._sent else None

    def send(self, source: int, target: int, urgency: int, frame: tuple[Header, bytes]) -> None:
        """Send a frame subject to faults."""
        if frozenset((source, target)) in self.broken:
            return
        faults, chance = self.faults, self._random.random
        copies = 0 if chance() < faults.drop else 2 if chance() < faults.repeat else 1
        for _ in range(copies):
            at = self.clock() + chance() * faults.delay
            if not faults.reorder:
                flow = (source, target, urgency)
                at = self._latest[flow] = max(at, self._latest.get(flow, at))
            sent = Sent(at, next(self._count), source, target, urgency, *frame)
            heapq.heappush(self._sent, sent)

    def arrived(self) -> list[Sent]:
        """Return the frames that have arrived by now."""
        found = []
        while self._sent and self._sent[0].at <= self.clock():
            found.append(heapq.heappop(self._sent))
        return found
