"""Membership: an append-only log of views in the rendezvous store, and a client of it.

The first entry written at an index is binding, so one part of a partitioned network continues. A
process that is started again appends its next incarnation, and waits until the members that it
connects to have acknowledged it. A member that is removed ends, or continues alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple, NewType, TypeAlias

from wingbeat.errors import PeerError, RendezvousError
from wingbeat.observe.log import log
from wingbeat.schema import Length, MalformedMessage, Range, parse_json
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.services import BackgroundThread
from wingbeat.transport.store import AtomicStore

_LOG_POLL_S = 0.2  # between reads of the log
_PEER_INFO_S = 5.0  # timeout for the contact information of an announced worker

MAX_NUMBER = 1 << 48
"""Upper bound of iterations, rounds and incarnations, exclusive."""

Number: TypeAlias = Annotated[int, Range(0, MAX_NUMBER)]
WorkerId: TypeAlias = Annotated[int, Range(0, "workers")]

View = NewType("View", tuple[Number, ...])
"""One number for each worker, even while the worker is alive, in incarnation number / 2, and odd
when that incarnation has ended. Numbers only grow, so merging two views takes the larger ones."""

WholeView: TypeAlias = Annotated[View, Length("workers")]


def initial_view(workers: int) -> View:
    """Return the view in which a job starts: all workers are alive in their first incarnation."""
    return View((0,) * workers)


def merge_views(a: View, b: View) -> View:
    """Return the view with all information of both."""
    return View(tuple(map(max, a, b)))


def covers(a: View, b: View) -> bool:
    """Whether ``a`` contains all information of ``b``."""
    return all(x >= y for x, y in zip(a, b, strict=True))


def without_worker(view: View, worker: int) -> View:
    """Return the view in which the current incarnation of ``worker`` has ended."""
    return View((*view[:worker], view[worker] | 1, *view[worker + 1 :]))


def with_incarnation(view: View, worker: int, incarnation: int) -> View:
    """Return the view in which ``worker`` is alive in ``incarnation``, counted from 0."""
    return View((*view[:worker], max(view[worker], 2 * incarnation), *view[worker + 1 :]))


@functools.lru_cache(maxsize=64)
def members(view: View) -> tuple[int, ...]:
    """Return the workers that are alive."""
    return tuple(worker for worker, number in enumerate(view) if number % 2 == 0)


class MembershipChange(NamedTuple):
    """The end or the start of an incarnation in the log, and how to reach a worker that started."""

    worker: int
    incarnation: int
    joined: bool
    author: int
    peer_info: PeerInfo | None = None


class LogEntry(NamedTuple):
    """One entry of the membership log.

    Attributes:
        author: the worker that appended it.
        view: what it has learned.
    """

    author: WorkerId
    view: WholeView


class MembershipLog:
    """The entries that have been read, merged into ``view``."""

    def __init__(self, workers: int) -> None:
        self.view = initial_view(workers)
        self.length = 0

    def append(self, text: str) -> list[MembershipChange]:
        """Append the next entry; return its changes, ends before starts."""
        entry = parse_json(LogEntry, text, workers=len(self.view))
        before, self.view = self.view, merge_views(self.view, entry.view)
        self.length += 1
        author = entry.author
        changed = [w for w, number in enumerate(before) if self.view[w] != number]
        ended = [w for w in changed if before[w] % 2 == 0]
        joined = [w for w in changed if self.view[w] % 2 == 0]
        return [
            *(MembershipChange(w, before[w] // 2, False, author) for w in ended),
            *(MembershipChange(w, self.view[w] // 2, True, author) for w in joined),
        ]

    def lacks(self, view: View) -> bool:
        """Whether ``view`` contains something that is not in the log."""
        return merge_views(self.view, view) != self.view


class MembershipClient:
    """Reads and writes the membership log of a namespace of the store.

    `register` and `announce` join this worker. Later a thread calls the store, which may block.
    """

    def __init__(
        self,
        store: AtomicStore,
        namespace: str,
        rank: int,
        workers: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._path, self._rank = store, f"membership/{namespace}", rank
        self._namespace, self._clock, self.log = namespace, clock, MembershipLog(workers)
        self._proposal: View | None = None
        self._proposed_at: float | None = None
        self._failure = ""
        self._changes: deque[MembershipChange] = deque()
        self._acknowledgements: deque[tuple[int, int]] = deque()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._notify: Callable[[], None] = lambda: None
        self._thread = BackgroundThread(
            self._run, "wingbeat-membership", died=lambda: self._notify()
        )

    def register(self) -> int:
        """Register this worker; return its incarnation, counted from 0.

        Raises RendezvousError if the store does not answer, or has a malformed entry.
        """
        mine = f"{time.time_ns()}-{id(self)}"
        with self._joining():
            if self._store.claim(f"{self._path}/workers/{self._rank}", mine) == mine:
                return 0
            while (text := self._read_entry(self.log.length)) is not None:
                self.log.append(text)
        return self.log.view[self._rank] // 2 + 1

    def announce(self, incarnation: int, seconds: float) -> dict[int, int]:
        """Log the start of an incarnation; return the other members once all have acknowledged it.

        Raises RendezvousError if a worker did not acknowledge it, or another process has this rank.
        """
        rank, log, deadline = self._rank, self.log, time.monotonic() + seconds
        with self._joining():
            while log.view[rank] < 2 * incarnation:
                log.append(self._claim_entry(with_incarnation(log.view, rank, incarnation)))
            if log.view[rank] != 2 * incarnation:
                raise RendezvousError(
                    f"rank {rank}: another process has joined with this rank; end one of the two"
                )
            others = [worker for worker in members(log.view) if worker != rank]
            ahead = copy.copy(log)  # later entries are read again when the thread runs
            accepted = f"{self._path}/accepted/{rank}.{incarnation}"
            while missing := [w for w in others if not self._store.has(f"{accepted}/{w}")]:
                while (text := self._read_entry(ahead.length)) is not None:
                    ahead.append(text)
                others = [worker for worker in others if ahead.view[worker] == log.view[worker]]
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"rank {rank}: rank {missing[0]} did not accept the restarted worker "
                        f"within {seconds:g} s; check that it still trains"
                    )
                time.sleep(0.05)
        return {other: log.view[other] // 2 for other in others}

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, MalformedMessage) as error:
            raise RendezvousError(f"rank {self._rank}: cannot join again: {error}") from None

    def start(self, notify: Callable[[], None]) -> None:
        """Start the thread; it calls ``notify`` when there are changes or a failure."""
        self._notify = notify
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current call of the store."""
        self._stopped.set()
        self._wake.set()

    def propose(self, view: View) -> None:
        """Append ``view`` to the log unless the log already contains it."""
        merged = view if self._proposal is None else merge_views(self._proposal, view)
        if merged != self._proposal:
            self._proposal = merged
            if self._proposed_at is None:
                self._proposed_at = self._clock()
            self._wake.set()

    def unavailable_reason(self, seconds: float) -> str:
        """Return why no proposal was written within ``seconds``; empty without a problem."""
        if self._proposed_at is None:
            return ""
        if self._failure:
            return self._failure
        waited = self._clock() - self._proposed_at
        return f"no answer for {waited:.1f} s" if waited > seconds else ""

    def take_changes(self) -> list[MembershipChange]:
        """Return the changes since the last call; raise PeerError if the thread has failed."""
        if self._thread.failure:
            raise PeerError(f"rank {self._rank}: {self._thread.failure}")
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def acknowledge(self, worker: int, incarnation: int) -> None:
        """Acknowledge a rejoined worker: this worker is ready for it."""
        self._acknowledgements.append((worker, incarnation))
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(_LOG_POLL_S)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                self.synchronize()
                self._failure = ""
            except (TimeoutError, MalformedMessage, RuntimeError) as error:
                self._failure = str(error)
            if self._changes or self._failure:
                self._notify()

    def synchronize(self) -> None:
        """Read new entries, and write the proposal if the log lacks it."""
        while self._acknowledgements:
            worker, incarnation = self._acknowledgements.popleft()
            self._store.set(f"{self._path}/accepted/{worker}.{incarnation}/{self._rank}", "1")
        while (text := self._read_entry(self.log.length)) is not None:
            self._append(text)
        while self._proposal is not None:
            proposal, removed = self._proposal, self.log.view[self._rank] % 2
            if removed or not self.log.lacks(proposal):
                self._proposal = self._proposed_at = None
                return
            self._append(self._claim_entry(merge_views(self.log.view, proposal)))

    def _read_entry(self, number: int) -> str | None:
        key = f"{self._path}/{number}"
        return self._store.get(key, _PEER_INFO_S) if self._store.has(key) else None

    def _claim_entry(self, view: View) -> str:
        """Write the next entry; return the one that is binding."""
        entry = json.dumps(LogEntry(self._rank, view))
        return self._store.claim(f"{self._path}/{self.log.length}", entry)

    def _append(self, text: str) -> None:
        for change in self.log.append(text):
            found, worker = change, change.worker
            if change.joined and worker != self._rank:
                try:
                    info = read_peer_info(
                        self._store, self._namespace, worker, change.incarnation, _PEER_INFO_S
                    )
                except TimeoutError:
                    continue  # the incarnation has ended meanwhile
                except ValueError as error:
                    log.warning(
                        "rank %d: cannot accept rank %d again: %s", self._rank, worker, error
                    )
                    continue
                found = change._replace(peer_info=info)
            self._changes.append(found)
