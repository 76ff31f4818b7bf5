"""Endpoints on a lossy network in virtual time: no thread, no wait, everything from a seed."""

from __future__ import annotations

from helpers.lossy_network import Faults, Network
from wingbeat._native import Endpoint
from wingbeat.transport.messages.frames import DTYPES, Limits, Message, Posted


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Play:
    """Some processes that all know each other, each with one interface and so many classes."""

    def __init__(
        self,
        size: int = 2,
        faults: Faults | None = None,
        seed: int = 0,
        limits: Limits | None = None,
        classes: int = 1,
    ) -> None:
        self.clock = Clock()
        self.network = Network(faults, seed, self.clock)
        limits = limits or Limits()
        self.ends = [Endpoint(n, 1000 + n, limits.window, limits.silence) for n in range(size)]
        for n, end in enumerate(self.ends):
            for peer in range(size):
                for urgency in range(classes):
                    if peer != n:
                        end.add(peer, 0, urgency, 1000 + peer)
                        end.connected(peer, 0, urgency, n < peer, 0.0)

    def post(
        self,
        source: int,
        target: int,
        kind: int,
        payload: bytes = b"",
        urgency: int = 0,
        ids: tuple[int, int, int, int] = (0, 0, 0, 0),
        dtype: str = "",
    ) -> Posted:
        """Post a message, for which the window has room."""
        posted = self.ends[source].post(
            *(target, 0, urgency), kind, payload, ids, DTYPES.index(dtype), self.clock.now
        )
        assert posted is not None, "the window has no room"
        self.send(source)
        return posted

    def send(self, number: int) -> None:
        """Send the frames of a process that are due."""
        end = self.ends[number]
        for peer, interface, urgency in end.take_busy():
            while (frame := end.next(peer, interface, urgency, self.clock.now)) is not None:
                self.network.send(number, peer, urgency, frame)

    def take(self, number: int) -> list[Message]:
        """Take every message that has arrived at a process."""
        out = []
        while (found := self.ends[number].take(self.clock.now)) is not None:
            out.append(found)
        return out

    def step(self) -> bool:
        """Send and receive all that can be now, then go to when more happens; False if never."""
        self.exchange()
        if any(end.busy for end in self.ends):
            return True
        arrives = self.network.next_at()
        soonest = min([end.due for end in self.ends] + ([] if arrives is None else [arrives]))
        if soonest == float("inf"):
            return False
        self.clock.now = max(self.clock.now, soonest)
        return True

    def exchange(self) -> None:
        """Receive what has arrived, and send what is due."""
        now = self.clock.now
        for each in self.network.arrived():
            self.ends[each.target].accept(
                *(each.source, 0, each.urgency), each.header, each.payload, now
            )
        for number, end in enumerate(self.ends):
            end.tick(now)
            self.send(number)
