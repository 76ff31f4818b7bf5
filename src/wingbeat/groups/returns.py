"""How a process that was started again alone comes back to the group generator of a running job."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from typing import NamedTuple

from wingbeat.errors import RendezvousError
from wingbeat.transport.background import BackgroundThread
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.store import AtomicStore, Store

_log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Seconds between two looks at who has come back."""

_READ_S = 5.0
"""Seconds that the store may take for what is there."""


class Back(NamedTuple):
    """A worker has come again.

    Attributes:
        worker: its rank.
        life: which of its lives this is; the first is 0.
        card: how its mailbox is reached.
    """

    worker: int
    life: int
    card: PeerInfo


def life_of(store: Store, room: str, worker: int) -> int:
    """Return which life of ``worker`` begins now, if it has been there before.

    Raises:
        RendezvousError: the store does not answer.
    """
    try:
        lives, line = 1, 0
        while store.has(_line(room, line)):
            back = _parsed(store.get(_line(room, line), _READ_S))
            lives += back is not None and back[0] == worker
            line += 1
    except TimeoutError as error:
        raise RendezvousError(f"rank {worker}: cannot come back: {error}") from None
    return lives


def announce(store: AtomicStore, room: str, worker: int, life: int, seconds: float) -> None:
    """Say that ``worker`` is back, and wait until the generator knows.

    Raises:
        RendezvousError: it is dead, or does not answer within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    text, line = json.dumps([worker, life]), 0
    try:
        while store.claim(_line(room, line), text) != text:
            line += 1
        while not store.has(_met(room, worker, life)):
            if store.has(_over(room)):
                raise RendezvousError(
                    f"rank {worker}: cannot come back: the group generator has died, and the "
                    "others go on without one; start all workers again from a checkpoint"
                )
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank {worker}: came back, and the group generator did not answer within "
                    f"{seconds:g} s; check that rank 0 runs, which has started it"
                )
            time.sleep(0.05)
    except TimeoutError as error:
        raise RendezvousError(f"rank {worker}: cannot come back: {error}") from None


def say_over(store: Store, room: str) -> None:
    """Publish that there is no generator any more."""
    store.set(_over(room), "1")


class Returns:
    """The generator's list of who has come back, read by a thread, as the store may hang.

    Args:
        store: keeps it; used by this thread alone.
        room: keeps those of one job apart.
        workers: how many there are.

    Attributes:
        over: whether a worker has published that it goes on without the generator.
    """

    def __init__(self, store: Store, room: str, workers: int) -> None:
        self._store, self._room, self._workers = store, room, workers
        self._lines = 0
        self._news: deque[Back] = deque()
        self._met: deque[tuple[int, int]] = deque()
        self._ended = threading.Event()
        self.over = False
        self._thread = BackgroundThread(self._run, "wingbeat-returns")

    def start(self) -> None:
        """Look again and again, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once the store has answered."""
        self._ended.set()

    def news(self) -> Back | None:
        """Return who has come back, one at a time.

        Raises:
            RendezvousError: the thread has failed; says how.
        """
        if self._thread.failure:
            raise RendezvousError(f"group generator: {self._thread.failure}")
        return self._news.popleft() if self._news else None

    def met(self, back: Back) -> None:
        """Let a worker that has come back know that it is connected."""
        self._met.append(back[:2])

    def look(self) -> None:
        """Read what is new, and tell who is connected.

        Raises:
            TimeoutError: the store does not answer.
        """
        while self._met:
            self._store.set(_met(self._room, *self._met.popleft()), "1")
        while self._store.has(line := _line(self._room, self._lines)):
            back, card = _parsed(self._store.get(line, _READ_S)), None
            if back is None:
                _log.warning("%s in the store is malformed and does not count", line)
            elif back[0] < self._workers:
                try:
                    card = read_peer_info(self._store, self._room, *back, _READ_S)
                except ValueError as error:
                    _log.warning("rank %d comes back, and is refused: %s", back[0], error)
            self._lines += 1  # not before: what a slow store did not answer is asked again
            if back is not None and card is not None:
                self._news.append(Back(*back, card))
        self.over = self.over or self._store.has(_over(self._room))

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self.look()
            except (TimeoutError, RuntimeError):
                continue  # whoever comes back says that nobody answers


def _parsed(text: str) -> tuple[int, int] | None:
    try:
        match json.loads(text):
            case [int(worker), int(life)] if worker >= 0 and life > 0:
                return worker, life
    except (ValueError, RecursionError):
        pass
    return None


def _line(room: str, number: int) -> str:
    return f"{room}/back/{number}"


def _met(room: str, worker: int, life: int) -> str:
    return f"{room}/met/{worker}.{life}"


def _over(room: str) -> str:
    return f"{room}/over"
