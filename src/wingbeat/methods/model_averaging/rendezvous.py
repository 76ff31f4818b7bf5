"""Information that workers and the group generator publish in the rendezvous store.

`StatusTable` replaces the generator when it is lost, or for the static schedule. `RejoinLog` lets a
restarted process return to the generator of a running job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from wingbeat.errors import RendezvousError
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.services import BackgroundThread
from wingbeat.transport.store import AtomicStore, Store

_log = logging.getLogger(__name__)

_POLL_S = 0.25
"""Interval between the generator's reads of the rejoin log, in seconds."""

_READ_S = 5.0
"""Timeout of a read of an existing key, in seconds."""

_LEFT = "left"


class Status(NamedTuple):
    """The progress of a worker. Its values only grow.

    Attributes:
        rounds: the number of synchronizations that it has completed.
        synchronizing: whether it waits for the next one, and makes no steps until then.
        steps: the number of its steps without a generator. A synchronization sets it to the maximum
            over all workers.
        failed: the number of the latest group that failed on it, whose connections it has closed;
            -1 for none.
    """

    rounds: int = 0
    synchronizing: bool = False
    steps: int = 0
    failed: int = -1


class StatusTable:
    """The status of all workers, and which are lost or have left. Empty while the store is down."""

    def __init__(self, store: Store, room: str, workers: int) -> None:
        self._store, self._room, self._workers = store, room, workers

    def publish(self, worker: int, status: Status) -> None:
        """Set the status of ``worker``."""
        self._set(f"status/{worker}", json.dumps(status))

    def statuses(self) -> dict[int, Status]:
        """Return the status of each worker that has published one."""
        found = {}
        for worker in range(self._workers):
            status = _parse_status(self._get(f"status/{worker}"))
            if status is not None:
                found[worker] = status
        return found

    def mark_lost(self, worker: int, *, left: bool = False) -> None:
        """Mark ``worker`` as inactive permanently; ``left`` if it has shut down gracefully."""
        self._set(f"lost/{worker}", _LEFT if left else "1")

    def mark_fallback(self, worker: int, last: int) -> None:
        """Mark that ``worker`` continues without the generator. No process can rejoin afterwards.

        ``last`` is the last group that it has completed; it joins no later one.
        """
        self._set(f"fallback/{worker}", str(last))
        self._set(_GENERATOR_LOST, "1")

    def fallbacks(self, workers: Iterable[int]) -> dict[int, int]:
        """Return the last group of each of ``workers`` that continues without the generator."""
        found = {}
        for worker in workers:
            with contextlib.suppress(ValueError):
                found[worker] = int(self._get(f"fallback/{worker}"))
        return found

    def lost(self) -> set[int]:
        """Return the workers that are permanently inactive."""
        return {w for w in range(self._workers) if self._store.has(f"{self._room}/lost/{w}")}

    def has_left(self, worker: int) -> bool:
        """Whether ``worker`` has shut down gracefully."""
        return self._get(f"lost/{worker}") == _LEFT

    def _set(self, key: str, value: str) -> None:
        # Groups with open connections do not need the store.
        with contextlib.suppress(TimeoutError, RuntimeError, OSError):
            self._store.set(f"{self._room}/{key}", value)

    def _get(self, key: str) -> str:
        with contextlib.suppress(TimeoutError, RuntimeError, OSError):
            if self._store.has(f"{self._room}/{key}"):
                return self._store.get(f"{self._room}/{key}", _READ_S)
        return ""


class Rejoin(NamedTuple):
    """A restarted worker.

    Attributes:
        incarnation: the number of its restarts; 0 is the first process.
        card: the address of its mailbox.
    """

    worker: int
    incarnation: int
    card: PeerInfo


def next_incarnation(store: Store, room: str, worker: int) -> int:
    """Return the incarnation of a restarted ``worker``; RendezvousError without the store."""
    try:
        incarnation, index = 1, 0
        while store.has(_entry(room, index)):
            entry = _parse_entry(store.get(_entry(room, index), _READ_S))
            incarnation += entry is not None and entry[0] == worker
            index += 1
    except TimeoutError as error:
        raise RendezvousError(f"rank {worker}: cannot rejoin: {error}") from None
    return incarnation


def announce_rejoin(
    store: AtomicStore, room: str, worker: int, incarnation: int, timeout: float
) -> None:
    """Append ``worker`` to the rejoin log, and wait until the generator has connected to it.

    Raises RendezvousError if the generator is lost, or does not answer within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    text, index = json.dumps([worker, incarnation]), 0
    try:
        while store.claim(_entry(room, index), text) != text:
            index += 1
        while not store.has(_confirmed(room, worker, incarnation)):
            if store.has(f"{room}/{_GENERATOR_LOST}"):
                raise RendezvousError(
                    f"rank {worker}: cannot rejoin: the group generator has died, and the "
                    "others go on without one; start all workers again from a checkpoint"
                )
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank {worker}: rejoined, and the group generator did not answer within "
                    f"{timeout:g} s; check that rank 0 runs, which has started it"
                )
            time.sleep(0.05)
    except TimeoutError as error:
        raise RendezvousError(f"rank {worker}: cannot rejoin: {error}") from None


class RejoinLog:
    """The generator's reader of the rejoin log, with a thread because the store may block.

    Attributes:
        generator_lost: whether a worker has published that it continues without the generator.
    """

    def __init__(self, store: Store, room: str, workers: int) -> None:
        self._store, self._room, self._workers = store, room, workers
        self._read = 0
        self._rejoined: deque[Rejoin] = deque()
        self._to_confirm: deque[tuple[int, int]] = deque()
        self._stopped = threading.Event()
        self.generator_lost = False
        self._thread = BackgroundThread(self._run, "wingbeat-rejoin-log")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current call of the store."""
        self._stopped.set()

    def next_rejoin(self) -> Rejoin | None:
        """Return the next restarted worker, if any; RendezvousError if the thread has failed."""
        if self._thread.failure:
            raise RendezvousError(f"group generator: {self._thread.failure}")
        return self._rejoined.popleft() if self._rejoined else None

    def confirm(self, rejoin: Rejoin) -> None:
        """Publish to a restarted worker that the generator has connected to it."""
        self._to_confirm.append(rejoin[:2])

    def poll(self) -> None:
        """Read new entries, and write confirmations."""
        while self._to_confirm:
            self._store.set(_confirmed(self._room, *self._to_confirm.popleft()), "1")
        while self._store.has(key := _entry(self._room, self._read)):
            entry, card = _parse_entry(self._store.get(key, _READ_S)), None
            if entry is None:
                _log.warning("ignoring the malformed value of %s in the store", key)
            elif entry[0] < self._workers:
                try:
                    card = read_peer_info(self._store, self._room, *entry, _READ_S)
                except ValueError as error:
                    _log.warning("rank %d rejoins, and is refused: %s", entry[0], error)
            self._read += 1  # after the reads, so that an entry whose read timed out is read again
            if entry is not None and card is not None:
                self._rejoined.append(Rejoin(*entry, card))
        lost = f"{self._room}/{_GENERATOR_LOST}"
        self.generator_lost = self.generator_lost or self._store.has(lost)

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            # A worker that rejoins raises when its own wait times out.
            with contextlib.suppress(TimeoutError, RuntimeError):
                self.poll()


_GENERATOR_LOST = "generator-lost"


def _entry(room: str, index: int) -> str:
    return f"{room}/rejoin/{index}"


def _confirmed(room: str, worker: int, incarnation: int) -> str:
    return f"{room}/confirmed/{worker}.{incarnation}"


def _parse_entry(text: str) -> tuple[int, int] | None:
    try:
        match json.loads(text):
            case [int(worker), int(incarnation)] if worker >= 0 and incarnation > 0:
                return worker, incarnation
    except (ValueError, RecursionError):
        pass
    return None


def _parse_status(text: str) -> Status | None:
    try:
        match json.loads(text):
            case [int(rounds), bool(synchronizing), int(steps), int(failed)]:
                return Status(rounds, synchronizing, steps, failed)
    except (ValueError, RecursionError):
        pass
    return None
