"""Membership: the log in the rendezvous store, how a worker joins, and failure detection.

The log is an append-only list of views; each entry names its author. The first entry written at an
index is binding, so one part of a partitioned network continues. A worker writes an entry when
other workers are lost. It first waits until each remaining worker has sent a message since then or
is lost as well, so the entry names the whole other part. A removed worker ends.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.errors import PeerError, RendezvousError
from wingbeat.methods.bounded_staleness.messages import (
    View,
    WholeView,
    WorkerId,
    initial_view,
    members,
    merge_views,
    with_incarnation,
)
from wingbeat.methods.bounded_staleness.streams import Streams
from wingbeat.observe.log import log
from wingbeat.schema import MalformedMessage, parse_json
from wingbeat.transport import interfaces as nic
from wingbeat.transport.detector import ENDED, LEFT, RECONNECT_S, FailureDetector
from wingbeat.transport.interfaces import listen_interfaces
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.frames import Limits
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.services import BackgroundThread
from wingbeat.transport.store import AtomicStore

if TYPE_CHECKING:
    from wingbeat.methods.bounded_staleness.worker import Worker
    from wingbeat.transport.graceful_shutdown import Departures

_LOG_POLL_S = 0.2  # between reads of the log
_PEER_INFO_S = 5.0  # timeout for the contact information of an announced worker
_STORE_S = 10.0  # timeout for the store to decide which workers are lost


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


@dataclass(frozen=True, slots=True)
class JoinedWorker:
    """A worker's connections: the mailbox to the workers that its interfaces reach, streams to all.

    ``incarnation`` is counted from 0; above 0, parameters must be pulled.
    """

    mailbox: Mailbox
    streams: Streams
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
    suspect_after: float = 10.0,
    seconds: float = 300.0,
) -> JoinedWorker:
    """Join the other workers, or rejoin them if this rank has joined before.

    The store must outlive every restarted worker, and should be a separate connection: a pending
    wait of other code would delay failure detection. ``namespace`` separates the trainings of a
    job. ``neighbours`` has by rank the workers that its interfaces reach (see `Streams`); None if
    all reach all. A worker is suspected after at least ``suspect_after`` seconds of silence.
    """
    client = MembershipClient(store, namespace, rank, workers)
    incarnation = client.register()
    near = range(workers) if neighbours is None else neighbours[rank]

    def announce(left: float) -> dict[int, int]:
        found = client.announce(incarnation, left)
        return {other: found[other] for other in found if other in near}

    mailbox = open_mailbox(
        store, rank, near, namespace=namespace,
        interfaces=interfaces, classes=1, encrypted=encrypted, limits=limits, seconds=seconds,
        tolerate_silence=True, incarnation=incarnation,
        announce=announce if incarnation else None,
    )  # fmt: skip
    names = [interface.name for interface in listen_interfaces(nic.local(), interfaces)]
    view = client.log.view
    streams = Streams(
        mailbox, rank, workers, incarnations=[number // 2 for number in view], joined=neighbours,
        timeout=suspect_after, begin=seconds, interface_name=names.__getitem__,
    )  # fmt: skip
    for lost in set(range(workers)) - set(members(view)):
        streams.forget(lost)
    return JoinedWorker(mailbox, streams, client, incarnation)


# -- failure detection -----------------------------------------------------------------------


class WorkerLost(NamedTuple):
    """An incarnation of a worker has ended; ``needed`` if training still needed it."""

    worker: int
    incarnation: int
    needed: bool


class WorkerRejoined(NamedTuple):
    """A worker has joined again."""

    worker: int
    incarnation: int
    peer_info: PeerInfo


class MembershipMonitor:
    """Suspects workers locally, and has them removed by the membership log.

    ``lost`` are the workers that are currently lost. Without ``membership`` each worker decides by
    itself which are.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        streams: Streams,
        machine: Worker,
        membership: MembershipClient | None,
        *,
        tolerates_loss: bool,
        departures: Departures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox, self._streams, self._machine = mailbox, streams, machine
        self._membership, self._tolerates_loss = membership, tolerates_loss
        self._departures, self._clock = departures, clock
        self._me = f"rank {machine.rank}"
        self._workers = len(streams.known) + 1
        self._suspected_at: dict[int, float] = {}
        self._unneeded: dict[int, int] = {}  # incarnations that ended after all had drained
        self._detector = FailureDetector(mailbox, clock, lambda: streams.reached)
        self.lost: set[int] = set()
        if membership is not None:
            view = membership.log.view
            self.lost |= {worker for worker, number in enumerate(view) if number % 2}
            self._workers = len(view)

    def suspects(self) -> dict[int, str]:
        """Return the workers that may be lost, each with the reason."""
        if not self._machine.drained:  # training has resumed and needs them
            self.lost.difference_update(self._unneeded)
        found = dict.fromkeys(self._unneeded, LEFT.text) | self._streams.silent()
        ended = self._ended_before(self._clock() - RECONNECT_S)
        for worker, failed in self._detector.failed().items():
            if failed is not ENDED or worker in ended:
                found[worker] = failed.text
        return {worker: reason for worker, reason in found.items() if worker not in self.lost}

    def poll(self, suspects: Mapping[int, str]) -> Iterator[WorkerLost | WorkerRejoined]:
        """Yield the workers that were lost or have rejoined since the last call.

        Take ``suspects`` before the latest messages, so that a worker's last messages count.
        """
        if self._membership is None:
            for worker, reason in suspects.items():
                yield self._lose(worker, self._machine.incarnation_of(worker), reason)
            return
        for change in self._membership.take_changes():
            worker = change.worker
            if worker == self._machine.rank:
                self._check_own(change.joined, change.incarnation, change.author)
            elif not change.joined:
                restarted = change.author == worker
                reported = f"was reported lost by rank {change.author}"
                reason = suspects.get(worker, "was restarted" if restarted else reported)
                yield self._lose(worker, change.incarnation, reason)
            elif change.peer_info is not None:
                self.lost.discard(worker)
                self._unneeded.pop(worker, None)
                self._departures.back(worker)
                yield WorkerRejoined(worker, change.incarnation, change.peer_info)
        yield from self._decide({w: r for w, r in suspects.items() if w not in self.lost})

    def _ended_before(self, when: float) -> list[int]:
        """Return the workers whose connections closed before ``when`` and that are silent since.

        A worker whose messages arrive through other workers is alive.
        """
        closed = self._detector.closed_before(when)
        return [worker for worker in closed if not self._streams.has_sent_since(worker, when)]

    def _check_own(self, joined: bool, incarnation: int, author: int) -> None:
        own = self._machine.incarnation
        if joined and incarnation > own:
            raise PeerError(
                f"{self._me}: a second process with this rank was started, and continues"
            )
        if not joined and incarnation == own:
            raise PeerError(
                f"{self._me}: removed by rank {author}, which received nothing from it; the "
                "others continue: restart this worker"
            )

    def _decide(self, suspects: Mapping[int, str]) -> Iterator[WorkerLost]:
        """Propose a view without the suspects once all other workers have sent a message since."""
        assert self._membership is not None
        now = self._clock()
        self._suspected_at = {worker: self._suspected_at.get(worker, now) for worker in suspects}
        if self._machine.drained:
            for worker in suspects:
                yield self._lose_unneeded(worker)
            return
        needed = [w for w in suspects if self._machine.incarnation_of(w) is not None]
        if needed:
            self._check_tolerated(suspects, min(needed))
        since = min((self._suspected_at[worker] for worker in needed), default=now)
        others = set(self._streams.known) - set(suspects)
        # A worker that misses the majority is probably isolated itself; the others propose first.
        minority = 2 * len(needed) > len(needed) + len(others) + 1
        due = now >= since + (self._streams.timeout if minority else 0.0)
        if needed and due and all(self._streams.has_sent_since(each, since) for each in others):
            ended = {worker: 2 * self._incarnation(worker) + 1 for worker in needed}
            self._membership.propose(View(tuple(ended.get(w, 0) for w in range(self._workers))))
        if reason := self._membership.unavailable_reason(_STORE_S):
            names = ", ".join(f"rank {worker}" for worker in sorted(needed))
            raise PeerError(
                f"{self._me}: lost {names}, and cannot reach the rendezvous store to decide which "
                f"workers continue: {reason}; restart this worker when the store is reachable"
            )

    def _lose(self, worker: int, incarnation: int | None, reason: str) -> WorkerLost:
        if self._machine.drained:
            return self._lose_unneeded(worker)
        needed = incarnation is not None
        self._unneeded.pop(worker, None)
        if needed:
            self._check_tolerated({worker: reason}, worker)
            self._departures.lost(worker, reason)
        self.lost.add(worker)
        own = self._incarnation(worker) if incarnation is None else incarnation
        return WorkerLost(worker, own, needed)

    def _lose_unneeded(self, worker: int) -> WorkerLost:
        """Mark a worker as lost that training needs only if it resumes."""
        incarnation = self._unneeded.setdefault(worker, self._incarnation(worker))
        self.lost.add(worker)
        return WorkerLost(worker, incarnation, needed=False)

    def _incarnation(self, worker: int) -> int:
        return self._unneeded.get(worker, self._streams.incarnation(worker))

    def _check_tolerated(self, suspects: Mapping[int, str], worker: int) -> None:
        if self._tolerates_loss:
            return
        # A worker that has left may have been the first to miss a worker that is found lost next.
        ended = self._ended_before(self._clock() - RECONNECT_S / 2)
        worker, reason = (min(ended), ENDED.text) if ended else (worker, suspects[worker])
        failure = self._departures.first_failure() or f"rank {worker} {reason}"
        raise PeerError(
            f"{self._me}: lost a worker before training ended: {failure}; "
            "start the job again from a checkpoint"
        )
