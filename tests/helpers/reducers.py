"""Averages of groups in threads, without a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.static_client import ABANDONED, NO_INITIATOR, Arrival

TIMEOUT_S = 30.0


class FunctionReducer:
    """Averages by a function; keeps count of meetings."""

    def __init__(self, function: Callable[[Run, Callable[[], Arrival]], int | None]) -> None:
        self._function = function
        self.connections: list[int] = []
        self.closed: list[list[int] | None] = []

    def average(self, run: Run, connection: int, alive: Callable[[], Arrival]) -> int | None:
        self.connections.append(connection)
        return self._function(run, alive)

    def close(self, connections: Iterable[int] | None = None) -> None:
        self.closed.append(None if connections is None else list(connections))


class SharedValues:
    """Where members of a group meet and average a number each."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.dead: set[int] = set()
        self._came: dict[tuple[int, ...], set[int]] = {}
        self._done: set[tuple[int, ...]] = set()
        self._changed = threading.Condition()

    def average(self, worker: int, run: Run, alive: Callable[[], Arrival]) -> int | None:
        key = (run.initiator == NO_INITIATOR, run.number, run.epoch, *sorted(run.members))
        with self._changed:
            came = self._came.setdefault(key, set())
            came.add(worker)
            if len(came) == len(run.members):
                mean = sum(self.values[w] for w in run.members) / len(run.members)
                for member in run.members:
                    self.values[member] = mean
                self._done.add(key)
                self._changed.notify_all()
            deadline = time.monotonic() + TIMEOUT_S
            while key not in self._done:
                if lost := self.dead & set(run.members):
                    return min(lost)
                assert time.monotonic() < deadline, f"{run} does not meet: {came} did"
                if not alive():
                    came.discard(worker)
                    return ABANDONED
                self._changed.wait(0.05)
        return None

    def kill(self, worker: int) -> None:
        with self._changed:
            self.dead.add(worker)
            self._changed.notify_all()
