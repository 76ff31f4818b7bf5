"""Endpoints on a loopback network in virtual time: no thread, no wait, everything from a seed."""

from __future__ import annotations

from helpers.lossy_network import Faults, LoopbackCarrier, Network
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership, Message, Route
from wingbeat.transport.messages.frames import Posted, Type


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def message(kind: int, payload: bytes = b"", **fields: object) -> Posted:
    """A message as `Mailbox.post` makes it."""
    ids = fields.get("ids", (0, 0, 0, 0))
    return Posted(Type.DATA, kind, ids, 0, (), payload)


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
        self.carriers: list[LoopbackCarrier] = [self.network.carrier(n) for n in range(size)]
        sessions = {n: 1000 + n for n in range(size)}
        self.ends = [
            Endpoint(Membership(n, sessions[n], sessions), limits or Limits()) for n in range(size)
        ]
        for n, end in enumerate(self.ends):
            for peer in range(size):
                for urgency in range(classes):
                    if peer != n:
                        place = self.carriers[n].connect(peer, 0, urgency, theirs=0)
                        end.add(Route(peer, 0, urgency), place, 0.0)

    def post(self, source: int, target: int, posted: Posted, urgency: int = 0) -> Posted:
        """Post a message, whether the window has room or not."""
        send = self.carriers[source].send
        self.ends[source].post(Route(target, 0, urgency), posted, send, self.clock.now)
        return posted

    def take(self, number: int) -> list[Message]:
        """Take every message that has arrived at a process."""
        out = []
        while (found := self.ends[number].take(self.clock.now)) is not None:
            out.append(found)
        return out

    def step(self) -> bool:
        """Send and receive all that can be now, then go to when more happens; False if never."""
        for end, carrier in zip(self.ends, self.carriers, strict=True):
            self._exchange(end, carrier)
        if any(end.busy for end in self.ends):
            return True
        arrives = self.network.next_at()
        times = [end.due() for end in self.ends] + ([] if arrives is None else [arrives])
        soonest = min(times)
        if soonest == float("inf"):
            return False
        self.clock.now = max(self.clock.now, soonest)
        return True

    def _exchange(self, end: Endpoint, carrier: LoopbackCarrier) -> None:
        while (arrival := carrier.receive(0.0)) is not None:
            end.accept(arrival, self.clock.now)
        end.tick(self.clock.now)
        end.flush(carrier.send, self.clock.now)
