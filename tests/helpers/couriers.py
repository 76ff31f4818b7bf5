"""What couriers carry in tests: replicas of a few numbers, and a user's loop."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from helpers.stale import gradient
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.courier import Courier
from wingbeat.methods.bounded_staleness.messages import Entry, Round

LONG = 200
"""Numbers in a payload: more than one message takes."""


def packed(value: float) -> bytes:
    return struct.pack("<d", value) * LONG


def summed(colayer: int, piece: int, waiting: dict[Entry, Any]) -> bytes | None:
    total = None
    for payload in waiting.values():
        value = struct.unpack_from("<d", payload)[0]
        total = value if total is None else total + value
    return None if total is None else packed(total)


class Numbers:
    """A replica of one number a piece, with momentum."""

    def __init__(self, n: int, k: int) -> None:
        self.values, self.momenta = [0.0] * (n * k), [0.0] * (n * k)
        self._n, self.steps, self.pulls = n, 0, 0

    def step(self, parts: Sequence[Round]) -> None:
        self.steps += 1
        for part in parts:
            if part.payload is not None:
                assert len(part.payload) == 8 * LONG
                place = part.colayer * self._n + part.piece
                grad = struct.unpack_from("<d", part.payload)[0]
                self.momenta[place] = 0.9 * self.momenta[place] + grad
                self.values[place] -= self.momenta[place]

    def put(self, payload: Any) -> None:
        self.values, self.momenta = json.loads(bytes(payload))
        self.pulls += 1

    def copied(self) -> bytes:
        return json.dumps([self.values, self.momenta]).encode()


def in_threads(bodies: Sequence[Callable[[], object]]) -> list[Any]:
    """Run each in a thread; return what it has returned, or raised."""
    results: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except PeerError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive(), "it waits for ever"
    return results


def trained(courier: Courier, n: int, colayers: int, iterations: int) -> list[int]:
    """So many iterations, as a user's loop makes them; return their numbers."""
    out = []
    for _ in range(iterations):
        at = courier.begin()
        for z in range(colayers):
            payloads = [packed(gradient(courier.machine.rank, at, z, q)) for q in range(n)]
            if not courier.computed(z, payloads):
                break
        courier.finish()
        out.append(at)
    return out
