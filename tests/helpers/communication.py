"""Replicas of a few numbers, their payloads, and a training loop."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from helpers.staleness_simulation import gradient
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum

LONG = 200
"""Numbers in a payload: more than fit into one part."""


def pack(value: float) -> bytes:
    return struct.pack("<d", value) * LONG


def combine(colayer: int, piece: int, waiting: dict[Contribution, Any]) -> bytes | None:
    total = None
    for payload in waiting.values():
        value = struct.unpack_from("<d", payload)[0]
        total = value if total is None else total + value
    return None if total is None else pack(total)


class NumericReplica:
    """A replica of one number a piece, with momentum."""

    def __init__(self, n: int, k: int) -> None:
        self.values, self.momenta = [0.0] * (n * k), [0.0] * (n * k)
        self._n, self.steps, self.pulls = n, 0, 0

    def apply_round(self, parts: Sequence[PieceSum]) -> None:
        self.steps += 1
        for part in parts:
            if part.payload is not None:
                assert len(part.payload) == 8 * LONG
                place = part.colayer * self._n + part.piece
                grad = struct.unpack_from("<d", part.payload)[0]
                self.momenta[place] = 0.9 * self.momenta[place] + grad
                self.values[place] -= self.momenta[place]

    def load_state(self, payload: Any) -> None:
        self.values, self.momenta = json.loads(bytes(payload))
        self.pulls += 1

    def state_bytes(self) -> bytes:
        return json.dumps([self.values, self.momenta]).encode()


def in_threads(bodies: Sequence[Callable[[], object]]) -> list[Any]:
    """Run each in a thread; return the results, or the PeerErrors."""
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
        assert not thread.is_alive(), "it does not end"
    return results


def train(thread: CommunicationThread, n: int, colayers: int, iterations: int) -> list[int]:
    """Run iterations as a training loop does; return their numbers."""
    out = []
    for _ in range(iterations):
        at = thread.begin_iteration()
        for z in range(colayers):
            payloads = [pack(gradient(thread.machine.rank, at, z, q)) for q in range(n)]
            if not thread.send_colayer(z, payloads):
                break
        thread.end_iteration()
        out.append(at)
    return out
