"""Reads and writes the roll in the rendezvous store, in its own thread, as a store may hang."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from wingbeat.errors import PeerError, RendezvousError
from wingbeat.stale.letters import Malformed
from wingbeat.stale.roll import Change, Entry, Roll
from wingbeat.stale.view import View, members, merge, with_life
from wingbeat.transport.background import BackgroundThread
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.store import AtomicStore

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""Seconds between two looks at the roll."""

_CARD_S = 5.0
"""Seconds that a card may take which has been announced."""


class News(NamedTuple):
    """A change of the roll, and the card of a worker that has come again."""

    change: Change
    card: PeerInfo | None


class Attendance:
    """One worker's way to the roll.

    Args:
        store: keeps it; whoever cannot reach it cannot go on when somebody is missed.
        room: keeps the rolls of one job apart.
        rank: this worker's.
        roll: what has been read.
        clock: seconds.
    """

    def __init__(
        self,
        store: AtomicStore,
        room: str,
        rank: int,
        roll: Roll,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._room, self._rank, self.roll = store, room, rank, roll
        self._clock = clock
        self._wish: View | None = None
        self._since: float | None = None
        self._failure = ""
        self._news: deque[News] = deque()
        self._to_meet: deque[tuple[int, int]] = deque()
        self._changed, self._ended = threading.Event(), threading.Event()
        self._heard: Callable[[], None] = lambda: None
        self._thread = BackgroundThread(self._run, "wingbeat-roll", died=lambda: self._heard())

    def start(self, heard: Callable[[], None]) -> None:
        """Look again and again, in a thread; call ``heard`` when there is news."""
        self._heard = heard
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once the store has answered."""
        self._ended.set()
        self._changed.set()

    def miss(self, view: View) -> None:
        """Have it written that this is who takes part, as others are missed."""
        if self._wish is None or merge(self._wish, view) != self._wish:
            self._wish = view if self._wish is None else merge(self._wish, view)
            if self._since is None:
                self._since = self._clock()
            self._changed.set()

    def overdue(self, seconds: float) -> str:
        """Return why it cannot be decided who is gone; empty if it can.

        Args:
            seconds: how long the store may take.
        """
        since = self._since
        if since is None:
            return ""
        if self._failure:
            return self._failure
        waited = self._clock() - since
        return f"it has not answered for {waited:.1f} s" if waited > seconds else ""

    def news(self) -> list[News]:
        """Return what has changed since the last time.

        Raises:
            PeerError: the thread that reads the roll has failed; says how.
        """
        if self._thread.failure:
            raise PeerError(f"rank {self._rank}: {self._thread.failure}")
        out = []
        while self._news:
            out.append(self._news.popleft())
        return out

    def met(self, worker: int, life: int) -> None:
        """Tell a worker that has come again that it is known here."""
        self._to_meet.append((worker, life))
        self._changed.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(_LOOK_S)
            self._changed.clear()
            if self._ended.is_set():
                return
            try:
                self.work()
                self._failure = ""
            except (TimeoutError, Malformed, RuntimeError) as error:
                self._failure = str(error)
            if self._news or self._failure:
                self._heard()

    def work(self) -> None:
        """Read what is new, and write what is wished if that is not known yet.

        Raises:
            TimeoutError: the store does not answer.
            Malformed: somebody has written something else.
        """
        while self._to_meet:
            self._store.set(_met(self._room, *self._to_meet.popleft(), self._rank), "1")
        self._read()
        while self._wish is not None:
            wish, over = self._wish, self.roll.view[self._rank] % 2
            if over or not self.roll.wants(wish):
                self._wish = self._since = None
                return
            text = Entry(self._rank, merge(self.roll.view, wish)).to_text()
            self._take(self._store.claim(_line(self._room, self.roll.entries), text))

    def _read(self) -> None:
        while self._store.has(line := _line(self._room, self.roll.entries)):
            self._take(self._store.get(line, _CARD_S))

    def _take(self, text: str) -> None:
        for change in self.roll.read(text):
            card = None
            if change.begun and change.worker != self._rank:
                try:
                    card = read_peer_info(
                        self._store, self._room, change.worker, change.life, _CARD_S
                    )
                except TimeoutError:
                    continue  # it has ended meanwhile
                except ValueError as error:
                    _log.warning("rank %d comes back, and is refused: %s", change.worker, error)
                    continue
            self._news.append(News(change, card))


def arrive(store: AtomicStore, room: str, rank: int, workers: int) -> tuple[Roll, int]:
    """Say that this worker is there; return the roll, and which of its lives this is, from 0.

    Raises:
        RendezvousError: the store does not answer, or has something else.
    """
    roll = Roll(workers)
    try:
        mine = f"{time.time_ns()}-{id(roll)}"
        if store.claim(f"roll/{room}/here/{rank}", mine) == mine:
            return roll, 0
        while store.has(line := _line(room, roll.entries)):
            roll.read(store.get(line, _CARD_S))
    except (TimeoutError, Malformed) as error:
        raise RendezvousError(f"rank {rank}: cannot come back: {error}") from None
    return roll, roll.view[rank] // 2 + 1


def announce(
    store: AtomicStore, room: str, rank: int, life: int, roll: Roll, seconds: float
) -> dict[int, int]:
    """Write on the roll that a life begins, and wait until all others know of it.

    Args:
        store: keeps the roll.
        room: which one.
        rank: whose life.
        life: which.
        roll: what has been read of it; afterwards it ends with this entry.
        seconds: how long to wait.

    Returns:
        The others that live, each with its life.

    Raises:
        RendezvousError: one did not answer; names it.
    """
    deadline = time.monotonic() + seconds
    try:
        while roll.view[rank] < 2 * life:
            text = Entry(rank, with_life(roll.view, rank, life)).to_text()
            roll.read(store.claim(_line(room, roll.entries), text))
        if roll.view[rank] != 2 * life:
            raise RendezvousError(f"rank {rank}: another process came back in its place; end one")
        ahead = Roll(len(roll.view))  # whoever comes later is heard of by the one that stays
        ahead.view, ahead.entries = roll.view, roll.entries
        others = [worker for worker in members(roll.view) if worker != rank]
        while waiting := _unmet(store, room, rank, life, others):
            while store.has(line := _line(room, ahead.entries)):
                ahead.read(store.get(line, _CARD_S))
            others = [worker for worker in others if ahead.view[worker] == roll.view[worker]]
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {rank}: came back, and rank {waiting[0]} did not answer within "
                    f"{seconds:g} s; check that it still trains"
                )
            time.sleep(0.05)
    except (TimeoutError, Malformed) as error:
        raise RendezvousError(f"rank {rank}: cannot come back: {error}") from None
    return {other: roll.view[other] // 2 for other in others}


def _unmet(store: AtomicStore, room: str, rank: int, life: int, others: Iterable[int]) -> list[int]:
    return [other for other in others if not store.has(_met(room, rank, life, other))]


def _line(room: str, number: int) -> str:
    return f"roll/{room}/{number}"


def _met(room: str, worker: int, life: int, by: int) -> str:
    return f"roll/{room}/met/{worker}.{life}/{by}"
