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
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, NamedTuple, NewType, TypeAlias

from wingbeat.errors import PeerError, RendezvousError
from wingbeat.observe.log import log
from wingbeat.schema import Length, MalformedMessage, Range, WorkerId, parse_json
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.services import BackgroundThread
from wingbeat.transport.store import AtomicStore, Store

_LOG_POLL_S = 0.2  # between reads of the log
_READ_S = 5.0  # timeout for a value that exists

MAX_NUMBER = 1 << 48
"""Upper bound of iterations, rounds and incarnations, exclusive."""

Number: TypeAlias = Annotated[int, Range(0, MAX_NUMBER)]

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
        left: whether the workers that end in this view have shut down gracefully.
    """

    author: WorkerId
    view: WholeView
    left: bool = False


class MembershipLog:
    """The entries that have been read, merged into ``view``.

    ``left`` are the workers that have shut down gracefully.
    """

    def __init__(self, workers: int) -> None:
        self.view = initial_view(workers)
        self.length = 0
        self.left: frozenset[int] = frozenset()

    def append(self, text: str) -> list[MembershipChange]:
        """Append the next entry; return its changes, ends before starts.

        A malformed entry is a `MalformedMessage`. It counts, and changes nothing.
        """
        self.length += 1
        entry = parse_json(LogEntry, text, workers=len(self.view))
        before, self.view = self.view, merge_views(self.view, entry.view)
        author = entry.author
        changed = [w for w, number in enumerate(before) if self.view[w] != number]
        ended = [w for w in changed if before[w] % 2 == 0]
        joined = [w for w in changed if self.view[w] % 2 == 0]
        self.left = self.left.difference(joined).union(ended if entry.left else ())
        return [
            *(MembershipChange(w, before[w] // 2, False, author) for w in ended),
            *(MembershipChange(w, self.view[w] // 2, True, author) for w in joined),
        ]

    def lacks(self, view: View) -> bool:
        """Whether ``view`` contains something that is not in the log."""
        return merge_views(self.view, view) != self.view


class MembershipClient:
    """Reads and writes the membership log of a namespace of the store.

    `register` and `announce` join this worker. Later a thread calls the store, which may block, or
    the caller does, in `synchronize` and `end`. ``name`` returns the name of a member in messages.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        rank: int,
        workers: int,
        *,
        name: Callable[[int], str] = "rank {}".format,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me, self._name = name(rank), name
        self._store, self._path, self._rank = store, f"membership/{namespace}", rank
        self._namespace, self._clock, self.log = namespace, clock, MembershipLog(workers)
        self._proposal: View | None = None
        self._proposed_at: float | None = None
        self._failure = ""
        self._changes: deque[MembershipChange] = deque()
        self._started: deque[MembershipChange] = deque()  # contact information is not read yet
        self._acknowledgements: deque[tuple[int, int]] = deque()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._notify: Callable[[], None] = lambda: None
        self._thread = BackgroundThread(
            self._run, "wingbeat-membership", died=lambda: self._notify()
        )

    def register(self) -> int:
        """Register this worker; return its incarnation, counted from 0.

        Raises RendezvousError if the store does not answer.
        """
        mine = f"{time.time_ns()}-{id(self)}"
        with self._joining():
            if self._claim(f"{self._path}/workers/{self._rank}", mine) == mine:
                return 0
        return self.next_incarnation()

    def next_incarnation(self) -> int:
        """Return the incarnation of a process that is not the first one; raises as `register`."""
        with self._joining():
            self._read(self.log)
        return self.log.view[self._rank] // 2 + 1

    def announce(
        self, incarnation: int, seconds: float, peers: Collection[int] | None = None
    ) -> dict[int, int]:
        """Log the start of an incarnation; return the members that have acknowledged it.

        These are all members among ``peers``, by default all others, with their incarnations.
        Raises RendezvousError if one did not acknowledge it, or another process has this rank.
        """
        rank, own, deadline = self._rank, self.log, time.monotonic() + seconds
        with self._joining():
            while own.view[rank] < 2 * incarnation:
                self._append(own, self._claim_entry(with_incarnation(own.view, rank, incarnation)))
            if own.view[rank] != 2 * incarnation:
                raise RendezvousError(
                    f"{self._me}: another process has joined with this rank; end one of the two"
                )
            awaited = set(members(own.view) if peers is None else peers) - {rank}
            others = [worker for worker in members(own.view) if worker in awaited]
            ahead = copy.copy(own)  # later entries are read again when the thread runs
            accepted = f"{self._path}/accepted/{rank}.{incarnation}"
            while missing := [w for w in others if not self._store.has(f"{accepted}/{w}")]:
                self._read(ahead)
                others = [worker for worker in others if ahead.view[worker] == own.view[worker]]
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"{self._me}: {self._name(missing[0])} did not accept the restarted "
                        f"process within {seconds:g} s; check that it still runs"
                    )
                time.sleep(0.05)
        return {other: own.view[other] // 2 for other in others}

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise RendezvousError(f"{self._me}: cannot join again: {error}") from None

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
            raise PeerError(f"{self._me}: {self._thread.failure}")
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
                self._read_peer_infos()
            except (TimeoutError, RuntimeError) as error:
                self._failure = str(error)
            if self._changes or self._failure:
                self._notify()

    def synchronize(self) -> None:
        """Read new entries, and write the proposal if the log lacks it."""
        while self._acknowledgements:
            worker, incarnation = self._acknowledgements.popleft()
            self._store.set(f"{self._path}/accepted/{worker}.{incarnation}/{self._rank}", "1")
        self._apply(self._read(self.log))
        while self._proposal is not None:
            proposal, removed = self._proposal, self.log.view[self._rank] % 2
            if removed or not self.log.lacks(proposal):
                self._proposal = self._proposed_at = None
                return
            self._write(merge_views(self.log.view, proposal))

    def end(self, worker: int, *, left: bool = False, incarnation: int | None = None) -> None:
        """Log the end of a worker's incarnation, unless it or this worker has ended before.

        ``left`` is whether it has shut down gracefully. ``incarnation``: not of a later one; None:
        of the current one. Raises the errors of the store.
        """
        self._apply(self._read(self.log))
        while self.log.view[worker] % 2 == self.log.view[self._rank] % 2 == 0:
            if incarnation is not None and self.log.view[worker] > 2 * incarnation:
                return
            self._write(without_worker(self.log.view, worker), left=left)

    def _write(self, view: View, *, left: bool = False) -> None:
        self._apply(self._append(self.log, self._claim_entry(view, left=left)))

    def _claim_entry(self, view: View, *, left: bool = False) -> str:
        """Write the next entry; return the one that is binding."""
        entry = json.dumps(LogEntry(self._rank, view, left))
        return self._claim(f"{self._path}/{self.log.length}", entry)

    def _claim(self, key: str, value: str) -> str:
        assert isinstance(self._store, AtomicStore), "stores of a job have claims"
        return self._store.claim(key, value)

    def _read(self, entries: MembershipLog) -> list[MembershipChange]:
        """Read the log to its end; return the changes."""
        found: list[MembershipChange] = []
        while self._store.has(key := f"{self._path}/{entries.length}"):
            found += self._append(entries, self._store.get(key, _READ_S))
        return found

    def _append(self, entries: MembershipLog, text: str) -> list[MembershipChange]:
        try:
            return entries.append(text)
        except MalformedMessage as error:
            number = entries.length - 1
            log.warning("%s: entry %d of %s is ignored: %s", self._me, number, self._path, error)
            return []

    def _apply(self, changes: list[MembershipChange]) -> None:
        for change in changes:
            starts = change.joined and change.worker != self._rank
            (self._started if starts else self._changes).append(change)

    def _read_peer_infos(self) -> None:
        """Read how to reach the processes that have started; once more if the store is slow."""
        for _ in range(len(self._started)):
            change = self._started.popleft()
            worker, incarnation = change.worker, change.incarnation
            if self.log.view[worker] != 2 * incarnation:
                continue  # it has ended meanwhile
            try:
                info = read_peer_info(self._store, self._namespace, worker, incarnation, _READ_S)
            except TimeoutError:
                self._started.append(change)
            except ValueError as error:
                log.warning("%s: cannot accept %s again: %s", self._me, self._name(worker), error)
            else:
                self._changes.append(change._replace(peer_info=info))
