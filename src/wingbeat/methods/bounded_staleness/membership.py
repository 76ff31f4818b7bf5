"""The membership log in the rendezvous store, and how a worker joins the others.

The log is a list of views that only grows; each entry names its author. Whoever writes an entry
first decides it, so a partitioned network has one part that continues. A worker writes an entry
when it misses others: it waits until it has heard every other worker since then, or misses it as
well, so the entry names the whole other part. A worker that finds itself removed ends.
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
from wingbeat.methods.bounded_staleness.messages import MAX_NUMBER, MalformedMessage
from wingbeat.methods.bounded_staleness.view import (
    View,
    initial_view,
    members,
    merge_views,
    with_incarnation,
)
from wingbeat.observe.log import log
from wingbeat.transport import interfaces as nic
from wingbeat.transport.background import BackgroundThread
from wingbeat.transport.messages.card import Card
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.meeting import card_of, open_mailbox
from wingbeat.transport.messages.reach import usable
from wingbeat.transport.store import Ledger

_POLL_S = 0.2
"""Seconds between two reads of the log."""

_CARD_S = 5.0
"""Seconds to wait for the contact card of a worker that has been announced."""


class MembershipChange(NamedTuple):
    """What an entry changes for one worker.

    Attributes:
        worker: the worker.
        incarnation: the incarnation that has ended or started.
        joined: whether it has started.
        author: the worker that wrote the entry.
    """

    worker: int
    incarnation: int
    joined: bool
    author: int


class MembershipEvent(NamedTuple):
    """A change of the log, and the contact card of a worker that has joined again."""

    change: MembershipChange
    card: Card | None


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
        """Decode an entry.

        Raises:
            MalformedMessage: the text is not an entry for this number of workers.
        """
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
        length: number of entries.
    """

    def __init__(self, workers: int) -> None:
        self.view = initial_view(workers)
        self.length = 0

    def append(self, text: str) -> list[MembershipChange]:
        """Append the next entry; return what it changes, ends before starts."""
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
    """Reads and writes the membership log in a thread of its own, as the store may hang."""

    def __init__(
        self,
        store: Ledger,
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
        """Have the thread end when the store has answered."""
        self._stopped.set()
        self._wake.set()

    def propose(self, view: View) -> None:
        """Have ``view`` appended to the log, unless the log contains it by then."""
        merged = view if self._proposal is None else merge_views(self._proposal, view)
        if merged != self._proposal:
            self._proposal = merged
            if self._proposed_at is None:
                self._proposed_at = self._clock()
            self._wake.set()

    def unavailable_reason(self, seconds: float) -> str:
        """Return why a proposal was not written in ``seconds``; empty if there is no problem."""
        if self._proposed_at is None:
            return ""
        if self._failure:
            return self._failure
        waited = self._clock() - self._proposed_at
        return f"no answer for {waited:.1f} s" if waited > seconds else ""

    def take_events(self) -> list[MembershipEvent]:
        """Return the events since the last call.

        Raises:
            PeerError: the thread has failed.
        """
        if self._thread.failure:
            raise PeerError(f"rank {self._rank}: {self._thread.failure}")
        out = []
        while self._events:
            out.append(self._events.popleft())
        return out

    def acknowledge(self, worker: int, incarnation: int) -> None:
        """Tell a worker that has joined again that this worker is ready for it."""
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
                    card = card_of(
                        self._store, self._namespace, worker, change.incarnation, _CARD_S
                    )
                except TimeoutError:
                    continue  # it has ended meanwhile
                except ValueError as error:
                    log.warning(
                        "rank %d: cannot accept rank %d again: %s", self._rank, worker, error
                    )
                    continue
            self._events.append(MembershipEvent(change, card))


def register_worker(
    store: Ledger, namespace: str, rank: int, workers: int
) -> tuple[MembershipLog, int]:
    """Register this worker; return the log, and its incarnation, counted from 0.

    Raises:
        RendezvousError: the store does not answer, or has a malformed entry.
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
    store: Ledger,
    namespace: str,
    rank: int,
    incarnation: int,
    membership_log: MembershipLog,
    seconds: float,
) -> dict[int, int]:
    """Append to the log that an incarnation starts, and wait until all others acknowledge it.

    Returns:
        The other members with their incarnations.

    Raises:
        RendezvousError: a worker did not acknowledge it, or another process took the place.
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
        ahead = MembershipLog(len(view))  # later entries are read by `MembershipClient`
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
    store: Ledger, namespace: str, rank: int, incarnation: int, others: Iterable[int]
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
        mailbox: to the workers that its interfaces reach.
        lanes: to all workers.
        membership: to the membership log.
        incarnation: counted from 0; if it is larger, parameters have to be pulled.
    """

    mailbox: Mailbox
    lanes: Lanes
    membership: MembershipClient
    incarnation: int


def join_workers(
    store: Ledger,
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
    """Join the other workers, or join them again if this rank has joined before.

    Args:
        store: the rendezvous store. It must outlive every worker that is restarted, and should be a
            connection of its own: a pending wait of other code would delay failure detection.
        rank: of this worker.
        workers: number of workers.
        namespace: separates the trainings of a job; the same on all workers.
        interfaces: names of the interfaces to use; None for all.
        neighbours: by rank, the workers that its interfaces reach (see `Lanes`); None if all do.
        encrypted: as for `open_mailbox`.
        limits: as for `open_mailbox`.
        patience: seconds of silence, at least, after which a worker is suspected.
        seconds: timeout for the others to join.
    """
    membership_log, incarnation = register_worker(store, namespace, rank, workers)
    near = range(workers) if neighbours is None else neighbours[rank]

    def announce(left: float) -> dict[int, int]:
        found = announce_incarnation(store, namespace, rank, incarnation, membership_log, left)
        return {other: found[other] for other in found if other in near}

    mailbox = open_mailbox(
        store, rank, near, room=namespace,
        interfaces=interfaces, classes=1, encrypted=encrypted, limits=limits, seconds=seconds,
        forgiving=True, life=incarnation,
        announce=announce if incarnation else None,
    )  # fmt: skip
    names = [interface.name for interface in usable(nic.local(), interfaces)]
    view = membership_log.view
    lanes = Lanes(
        mailbox, rank, workers, lives=[number // 2 for number in view], joined=neighbours,
        patience=patience, begin=seconds, card=names.__getitem__,
    )  # fmt: skip
    for lost in set(range(workers)) - set(members(view)):
        lanes.forget(lost)
    client = MembershipClient(store, namespace, rank, membership_log)
    return JoinedWorker(mailbox, lanes, client, incarnation)
