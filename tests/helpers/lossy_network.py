"""An in-memory network that loses, delays, reorders and repeats frames, with a seed. For tests."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wingbeat.transport.messages.frames import Arrival, Buffer, ConnectionId


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of loss, duplication and truncation of frames; maximum delay in seconds.

    With ``reorder``, frames may overtake each other within a flow.
    """

    drop: float = 0.0
    repeat: float = 0.0
    cut: float = 0.0
    delay: float = 0.0
    reorder: bool = False


Name = tuple[int, int]
"""Number of a process, and one of its interfaces."""


class Network:
    """Connects the carriers of several processes; ``clock`` returns seconds and may be virtual."""

    def __init__(
        self,
        faults: Faults | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.faults = faults or Faults()
        self.clock = clock
        self.changed = threading.Condition()
        self.broken: set[frozenset[int]] = set()
        self.interrupted: set[int] = set()
        self.ended = 0
        self._random = random.Random(seed)
        self._mail: dict[int, list[tuple[float, int, Arrival]]] = {}
        self._count = itertools.count()
        self._latest: dict[tuple[Name, Name, int], float] = {}

    def carrier(self, number: int) -> LoopbackCarrier:
        """Return the carrier of process ``number``."""
        with self.changed:
            self._mail[number] = []
        return LoopbackCarrier(self, number)

    def cut_off(self, a: int, b: int) -> None:
        """Lose all frames between two processes until `join`."""
        with self.changed:
            self.broken.add(frozenset((a, b)))

    def join(self, a: int, b: int) -> None:
        """End `cut_off`."""
        with self.changed:
            self.broken.discard(frozenset((a, b)))

    def next_at(self) -> float | None:
        """Time of the next arrival at any process; None if no frame is in flight."""
        with self.changed:
            return min((mail[0][0] for mail in self._mail.values() if mail), default=None)

    def post(self, source: Name, target: Name, urgency: int, parts: Sequence[bytes]) -> bool:
        """Send a frame subject to faults; False if the receiver has left."""
        with self.changed:
            if target[0] not in self._mail:
                return False
            if frozenset((source[0], target[0])) in self.broken:
                return True
            faults, chance = self.faults, self._random.random
            copies = 0 if chance() < faults.drop else 2 if chance() < faults.repeat else 1
            for _ in range(copies):
                self._deliver(source, target, urgency, self._maybe_cut(parts))
            self.changed.notify_all()
            return True

    def take(self, number: int, seconds: float) -> Arrival | None:
        """Return the next frame of a process; wait up to ``seconds`` of its clock."""
        deadline = self.clock() + seconds
        with self.changed:
            while True:
                mail, now = self._mail.get(number, []), self.clock()
                if mail and mail[0][0] <= now:
                    return heapq.heappop(mail)[2]
                until = min(deadline, mail[0][0]) if mail else deadline
                if now >= deadline or number in self.interrupted:
                    self.interrupted.discard(number)
                    return None
                self.changed.wait(min(1.0, until - now))

    def interrupt(self, number: int) -> None:
        """End a process's wait in `take`."""
        with self.changed:
            self.interrupted.add(number)
            self.changed.notify_all()

    def leave(self, number: int) -> None:
        """Remove a process from the network."""
        with self.changed:
            self.ended += self._mail.pop(number, None) is not None
            self.changed.notify_all()

    def _maybe_cut(self, parts: Sequence[bytes]) -> list[bytes]:
        out = list(parts)
        if self._random.random() < self.faults.cut:
            which = self._random.randrange(len(out))
            out[which] = out[which][: self._random.randrange(len(out[which]) + 1)]
        return out

    def _deliver(self, source: Name, target: Name, urgency: int, parts: list[bytes]) -> None:
        at = self.clock() + self._random.random() * self.faults.delay
        if not self.faults.reorder:
            flow = (source, target, urgency)
            at = self._latest[flow] = max(at, self._latest.get(flow, at))
        place = ConnectionId(target[1], urgency, source)
        payload = parts[1] if len(parts) > 1 else None
        arrival = Arrival(place, parts[0], payload, source[0])
        heapq.heappush(self._mail[target[0]], (at, next(self._count), arrival))


class LoopbackCarrier:
    """`Carrier` on an in-memory `Network`."""

    def __init__(self, network: Network, number: int) -> None:
        self._network = network
        self._number = number

    @property
    def refused_connections(self) -> Counter[str]:
        """As `Carrier.refused_connections`: always empty."""
        return Counter()

    @property
    def ended(self) -> int:
        """As `Carrier.ended`, of all processes."""
        return self._network.ended

    def is_disconnected(self, place: ConnectionId) -> bool:
        """As `Carrier.is_disconnected`; `send` detects it here."""
        return False

    def connect(
        self, peer: int, interface: int, urgency: int, *, theirs: int
    ) -> ConnectionId | None:
        """As `Carrier.connect`."""
        return None if peer < self._number else ConnectionId(interface, urgency, (peer, theirs))

    def send(self, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
        """As `Carrier.send`; the frame is copied."""
        name = place.name
        assert isinstance(name, tuple)
        source = (self._number, place.interface)
        return self._network.post(source, name, place.urgency, [bytes(part) for part in parts])

    def receive(self, seconds: float) -> Arrival | None:
        """As `Carrier.receive`."""
        return self._network.take(self._number, seconds)

    def interrupter(self) -> Callable[[], None]:
        """As `Carrier.interrupter`."""
        return functools.partial(self._network.interrupt, self._number)

    def close(self, linger: float = 0.0) -> None:
        """As `Carrier.close`; sent frames have arrived."""
        self._network.leave(self._number)
