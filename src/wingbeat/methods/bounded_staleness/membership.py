"""How a worker joins the others, and which workers it has removed by the membership log.

A worker writes an entry in the log when other workers are lost. It first waits until each remaining
worker has sent a message since then or is lost as well, so the entry names the whole other part. A
removed worker ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.streams import Streams
from wingbeat.transport import interfaces as nic
from wingbeat.transport.detector import ENDED, LEFT, RECONNECT_S, FailureDetector
from wingbeat.transport.interfaces import listening
from wingbeat.transport.membership import MembershipClient, View, members
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.frames import Limits
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.peers import PeerInfo
from wingbeat.transport.store import AtomicStore

if TYPE_CHECKING:
    from wingbeat.methods.bounded_staleness.worker import Worker
    from wingbeat.transport.graceful_shutdown import Departures
    from wingbeat.transport.mesh import Replica

_STORE_S = 10.0  # timeout for the store to decide which workers are lost


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
    name: Callable[[int], str] = "rank {}".format,
    inside: Replica | None = None,
    record: Callable[[str, str], None] | None = None,
) -> JoinedWorker:
    """Join the other workers, or rejoin them if this rank has joined before.

    The store must outlive every restarted worker, and should be a separate connection: a pending
    wait of other code would delay failure detection. ``namespace`` separates the trainings of a
    job. ``neighbours`` has by rank the workers that its interfaces reach (see `Streams`); None if
    all reach all. A worker is suspected after at least ``suspect_after`` seconds of silence.

    ``name`` returns the name of a worker in messages. If workers are ranks of replicas, the columns
    of the mesh have one membership log, whose members are replicas: a replica that has lost a rank
    is lost in all columns. ``inside`` is this worker's. No rank of it can be restarted. ``record``
    is as for `Streams`.
    """
    if inside is None:
        client = MembershipClient(store, namespace, rank, workers, name=name)
        incarnation = client.register()
    else:
        client = MembershipClient(inside.mesh_store, namespace, rank, workers, name=inside.name)
        incarnation = 0
    near = range(workers) if neighbours is None else neighbours[rank]

    def announce(left: float) -> dict[int, int]:
        found = client.announce(incarnation, left)
        return {other: found[other] for other in found if other in near}

    mailbox = open_mailbox(
        store, rank, near, namespace=namespace,
        interfaces=interfaces, classes=1, encrypted=encrypted, limits=limits, seconds=seconds,
        tolerate_silence=True, incarnation=incarnation,
        announce=announce if incarnation else None, name=name,
    )  # fmt: skip
    names = [interface.name for interface in listening(nic.local(), interfaces).interfaces]
    view = client.log.view
    streams = Streams(
        mailbox, rank, workers, incarnations=[number // 2 for number in view], joined=neighbours,
        timeout=suspect_after, begin=seconds, interface_name=names.__getitem__, name=name,
        record=record,
    )  # fmt: skip
    for lost in set(range(workers)) - set(members(view)):
        streams.forget(lost)
    return JoinedWorker(mailbox, streams, client, incarnation)


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
    itself which are. ``name`` and ``inside`` are as for `join_workers`.
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
        name: Callable[[int], str] = "rank {}".format,
        inside: Replica | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._inside = name, inside
        self._mailbox, self._streams, self._machine = mailbox, streams, machine
        self._membership, self._tolerates_loss = membership, tolerates_loss
        self._departures, self._clock = departures, clock
        self._me = name(machine.rank)
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
        when = self._clock() - RECONNECT_S
        for worker, failed in self._detector.failed().items():
            # A worker whose messages arrive through other workers is alive.
            if failed is not ENDED or not self._streams.has_sent_since(worker, when):
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
                reason = suspects.get(worker, self._reported(worker, change.author))
                yield self._lose(worker, change.incarnation, reason)
            elif change.peer_info is not None:
                self.lost.discard(worker)
                self._unneeded.pop(worker, None)
                self._departures.back(worker)
                yield WorkerRejoined(worker, change.incarnation, change.peer_info)
        yield from self._decide({w: r for w, r in suspects.items() if w not in self.lost})

    def _reported(self, worker: int, author: int) -> str:
        if self._inside is not None:
            return (
                f"is of {self._inside.name(worker)}, which {self._inside.name(author)} has "
                "reported lost"
            )
        if author == worker:
            return "was restarted"
        return f"was reported lost by {self._name(author)}"

    def _check_own(self, joined: bool, incarnation: int, author: int) -> None:
        own = self._machine.incarnation
        if joined and incarnation > own:
            raise PeerError(
                f"{self._me}: a second process with this rank was started, and continues"
            )
        if not joined and incarnation == own:
            if self._inside is not None:
                raise PeerError(
                    f"{self._me}: {self._inside.name(self._machine.rank)} was removed by "
                    f"{self._inside.name(author)}, which received nothing from one of its ranks; "
                    "the others continue"
                )
            raise PeerError(
                f"{self._me}: removed by {self._name(author)}, which received nothing from it; the "
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
            names = ", ".join(map(self._name, sorted(needed)))
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
        when = self._clock() - RECONNECT_S / 2
        closed = self._detector.closed_before(when)
        ended = [each for each in closed if not self._streams.has_sent_since(each, when)]
        worker, reason = (min(ended), ENDED.text) if ended else (worker, suspects[worker])
        failure = self._departures.first_failure() or f"{self._name(worker)} {reason}"
        raise PeerError(
            f"{self._me}: lost a worker before training ended: {failure}; "
            "start the job again from a checkpoint"
        )
