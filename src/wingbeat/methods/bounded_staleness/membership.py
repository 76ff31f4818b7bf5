"""The membership log in the rendezvous store, and how a worker joins.

The log is an append-only list of views; each entry names its author. The first entry written at an
index is binding, so one part of a partitioned network continues. A worker writes an entry when
other workers are lost. It first waits until each remaining worker has sent a message since then or
is lost as well, so the entry names the whole other part. A removed worker ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wingbeat.errors import PeerError, RendezvousError
from wingbeat.exchanges.lanes.lanes import Lanes
from wingbeat.methods.bounded_staleness.messages import (
    MAX_NUMBER,
    MalformedMessage,
    View,
    initial_view,
    members,
    merge_views,
    with_incarnation,
)
from wingbeat.observe.log import log
from wingbeat.transport import interfaces as nic
from wingbeat.transport.background import BackgroundThread
from wingbeat.transport.interfaces import listen_interfaces
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.store import AtomicStore

_POLL_S = 0.2
"""Interval between reads of the log, in seconds."""

_CARD_S = 5.0
"""Seconds to wait for the contact information of an announced worker."""


class MembershipChange(NamedTuple):
    """"""

    worker: int
    incarnation: int
    joined: bool
    author: int


class MembershipEvent(NamedTuple):
    """A change of the log, with the contact information of a worker that has rejoined."""

    change: MembershipChange
    card: PeerInfo | None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the membership log."""

    author: int
    view: View

    def to_json(self) -> str:
        """Encode the entry."""
        return json.dumps({"author": self.author, "view": self.view})

    @classmethod
    def from_json(cls, text: str, workers: int) -> LogEntry:
        """Decode an entry for this number of workers; raise MalformedMessage if it is not one."""
        try:
            fields = json.loads(text)
            author, view = fields["author"], fields["view"]
            valid = type(author) is int and 0 <= author < workers and len(view) == workers
            valid = valid and all(type(n) is int and 0 <= n < MAX_NUMBER for n in view)
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise MalformedMessage(f"{text!r:.60} is not a membership log entry")
        return cls(author, View(tuple(view)))


class MembershipLog:
    """The entries that have been read.

    Attributes:
        view: all entries merged.
    """

    def __init__(self, workers: int) -> None:
        self.view = initial_view(workers)
        self.length = 0

    def append(self, text: str) -> list[MembershipChange]:
        """Append the next entry; return its changes, ends before starts."""
        entry = LogEntry.from_json(text, len(self.view))
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
    """Reads and writes the membership log in a separate thread, because the store may block."""

    def __init__(
        self,
        store: AtomicStore,
        namespace: str,
        rank: int,
        log: MembershipLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._namespace, self._rank, self.log = store, namespace, rank, log
        self._clock = clock
        self._proposal: View | None = None
        self._proposed_at: float | None = None
        self._failure = ""
        self._events: deque[MembershipEvent] = deque()
        self._acknowledgements: deque[tuple[int, int]] = deque()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._notify: Callable[[], None] = lambda: None
        self._thread = BackgroundThread(
            self._run, "wingbeat-membership", died=lambda: self._notify()
        )

    def start(self, notify: Callable[[], None]) -> None:
        """Start the thread; it calls ``notify`` when there are events or a failure."""
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

    def take_events(self) -> list[MembershipEvent]:
        """Return the events since the last call; raise PeerError if the thread has failed."""
        if self._thread.failure:
            raise PeerError(f"rank {self._rank}: {self._thread.failure}")
        out = []
        while self._events:
            out.append(self._events.popleft())
        return out

    def acknowledge(self, worker: int, incarnation: int) -> None:
        """Acknowledge a rejoined worker: this worker is ready for it."""
        self._acknowledgements.append((worker, incarnation))
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(_POLL_S)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                self.synchronize()
                self._failure = ""
            except (TimeoutError, MalformedMessage, RuntimeError) as error:
                self._failure = str(error)
            if self._events or self._failure:
                self._notify()

    def synchronize(self) -> None:
        """Read new entries, and write the proposal if the log lacks it."""
        while self._acknowledgements:
            worker, incarnation = self._acknowledgements.popleft()
            key = _acknowledgement_key(self._namespace, worker, incarnation, self._rank)
            self._store.set(key, "1")
        while self._store.has(key := _entry_key(self._namespace, self.log.length)):
            self._append(self._store.get(key, _CARD_S))
        while self._proposal is not None:
            proposal, removed = self._proposal, self.log.view[self._rank] % 2
            if removed or not self.log.lacks(proposal):
                self._proposal = self._proposed_at = None
                return
            text = LogEntry(self._rank, merge_views(self.log.view, proposal)).to_json()
            key = _entry_key(self._namespace, self.log.length)
            self._append(self._store.claim(key, text))

    def _append(self, text: str) -> None:
        for change in self.log.append(text):
            card, worker = None, change.worker
            if change.joined and worker != self._rank:
                try:
                    card = read_peer_info(
                        self._store, self._namespace, worker, change.incarnation, _CARD_S
                    )
                except TimeoutError:
                    continue  # the incarnation has ended meanwhile
                except ValueError as error:
                    log.warning(
                        "rank %d: cannot accept rank %d again: %s", self._rank, worker, error
                    )
                    continue
            self._events.append(MembershipEvent(change, card))


def register_worker(
    store: AtomicStore, namespace: str, rank: int, workers: int
) -> tuple[MembershipLog, int]:
    """Register this worker; return the log, and the worker's incarnation, counted from 0.

    Raises RendezvousError if the store does not answer, or has a malformed entry.
    """
    membership_log = MembershipLog(workers)
    try:
        mine = f"{time.time_ns()}-{id(membership_log)}"
        if store.claim(f"membership/{namespace}/workers/{rank}", mine) == mine:
            return membership_log, 0
        while store.has(key := _entry_key(namespace, membership_log.length)):
            membership_log.append(store.get(key, _CARD_S))
    except (TimeoutError, MalformedMessage) as error:
        raise RendezvousError(f"rank {rank}: cannot join again: {error}") from None
    return membership_log, membership_log.view[rank] // 2 + 1


def announce_incarnation(
    store: AtomicStore,
    namespace: str,
    rank: int,
    incarnation: int,
    membership_log: MembershipLog,
    seconds: float,
) -> dict[int, int]:
    """Log the start of an incarnation; return the other members once all have acknowledged it.

    Raises RendezvousError if a worker did not acknowledge it, or another process has this rank.
    """
    deadline = time.monotonic() + seconds
    try:
        while membership_log.view[rank] < 2 * incarnation:
            entry = LogEntry(rank, with_incarnation(membership_log.view, rank, incarnation))
            key = _entry_key(namespace, membership_log.length)
            membership_log.append(store.claim(key, entry.to_json()))
        view = membership_log.view
        if view[rank] != 2 * incarnation:
            raise RendezvousError(
                f"rank {rank}: another process has joined with this rank; end one of the two"
            )
        ahead = MembershipLog(len(view))  # `MembershipClient` reads later entries
        ahead.view, ahead.length = view, membership_log.length
        others = [worker for worker in members(view) if worker != rank]
        while missing := _missing(store, namespace, rank, incarnation, others):
            while store.has(key := _entry_key(namespace, ahead.length)):
                ahead.append(store.get(key, _CARD_S))
            others = [worker for worker in others if ahead.view[worker] == view[worker]]
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {rank}: rank {missing[0]} did not accept the restarted worker within "
                    f"{seconds:g} s; check that it still trains"
                )
            time.sleep(0.05)
    except (TimeoutError, MalformedMessage) as error:
        raise RendezvousError(f"rank {rank}: cannot join again: {error}") from None
    return {other: view[other] // 2 for other in others}


def _missing(
    store: AtomicStore, namespace: str, rank: int, incarnation: int, others: Iterable[int]
) -> list[int]:
    return [
        other
        for other in others
        if not store.has(_acknowledgement_key(namespace, rank, incarnation, other))
    ]


def _entry_key(namespace: str, number: int) -> str:
    return f"membership/{namespace}/{number}"


def _acknowledgement_key(namespace: str, worker: int, incarnation: int, by: int) -> str:
    return f"membership/{namespace}/accepted/{worker}.{incarnation}/{by}"


@dataclass(frozen=True, slots=True)
class JoinedWorker:
    """The connections of a worker to the others.

    Attributes:
        mailbox: connects to the workers that its interfaces reach.
        lanes: connect to all workers.
        membership: the client of the membership log.
        incarnation: counted from 0; above 0, parameters must be pulled.
    """

    mailbox: Mailbox
    lanes: Lanes
    membership: MembershipClient
    incarnation: int


def join_workers(
    store: AtomicStore,
    rank: int,
    workers: int,
    *,
    namespace: str,
    interfaces: Sequence[str] | None = None,
    neighbours: Sequence[Collection[int]] | None = None,
    encrypted: bool = True,
    limits: Limits | None = None,
    patience: float = 10.0,
    seconds: float = 300.0,
) -> JoinedWorker:
    """Join the other workers, or rejoin them if this rank has joined before.

    The store must outlive every restarted worker, and should be a separate connection: a pending
    wait of other code would delay failure detection. ``namespace`` separates the trainings of a
    job. ``neighbours`` has by rank the workers that its interfaces reach (see `Lanes`); None if all
    reach all. A worker is suspected after at least ``patience`` seconds of silence.
    """
    membership_log, incarnation = register_worker(store, namespace, rank, workers)
    near = range(workers) if neighbours is None else neighbours[rank]

    def announce(left: float) -> dict[int, int]:
        found = announce_incarnation(store, namespace, rank, incarnation, membership_log, left)
        return {other: found[other] for other in found if other in near}

    mailbox = open_mailbox(
        store, rank, near, namespace=namespace,
        interfaces=interfaces, classes=1, encrypted=encrypted, limits=limits, seconds=seconds,
        tolerate_silence=True, incarnation=incarnation,
        announce=announce if incarnation else None,
    )  # fmt: skip
    names = [interface.name for interface in listen_interfaces(nic.local(), interfaces)]
    view = membership_log.view
    lanes = Lanes(
        mailbox, rank, workers, lives=[number // 2 for number in view], joined=neighbours,
        patience=patience, begin=seconds, card=names.__getitem__,
    )  # fmt: skip
    for lost in set(range(workers)) - set(members(view)):
        lanes.forget(lost)
    client = MembershipClient(store, namespace, rank, membership_log)
    return JoinedWorker(mailbox, lanes, client, incarnation)
