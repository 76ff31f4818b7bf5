"""The group generator's process: it serves requests, and detects dead and slow workers."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.methods.model_averaging.client import CONNECT_S, Client
from wingbeat.methods.model_averaging.generator import (
    ID_LIMIT,
    MESSAGES,
    Added,
    Done,
    Fetched,
    FetchState,
    Generator,
    Keepalive,
    Lost,
    ProtocolError,
    Reason,
    Refused,
    Removed,
    Request,
    Run,
    RunMessage,
    SendState,
    Synchronize,
)
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.static_client import Status, StatusTable
from wingbeat.methods.model_averaging.succession import START_S, GeneratorSearch
from wingbeat.observe.log import log_event
from wingbeat.schema import MalformedMessage
from wingbeat.transport.actor import Actor
from wingbeat.transport.detector import RECONNECT_S, Deadlines, Failure
from wingbeat.transport.membership import MembershipChange, MembershipClient, members
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.frames import Limits, Message
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.peers import PeerInfo
from wingbeat.transport.store import AtomicStore, Store
from wingbeat.types import Layout

_log = logging.getLogger(__name__)

MIN_TIMEOUT_S = 2.0
"""Lower bound of the timeout of a step, in seconds."""

CAPACITY = 16
"""Number of groups whose connections a worker keeps open."""

SILENCE_S = 5.0
"""Seconds without a message after which an awaited worker, or the generator, is dead."""

QUORUM_SILENCE_S = 2.0
"""The same for a worker if there is a quorum: one that responds again only copies a state."""

_PROBE_S = 1.0  # between messages to a member of a running group, in seconds
_KEEPALIVE_S = 5.0  # maximum interval between keepalive messages to waiting workers, in seconds

# -- what the service decides with --------------------------------------------------------


class ConnectionCache:
    """Decides which groups' connections stay open. Members with open connections keep their id.

    The paper keeps NCCL communicators until there are 64, and then makes one for each average
    (section 6.1). Here each worker keeps the connections of its most recent groups. The generator
    tracks all of them, decides which are closed, and notifies every member before it opens others.

    Raises:
        UsageError: the capacity is less than 1.
    """

    def __init__(self, workers: int, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise UsageError(
                f"ConnectionCache(capacity={capacity}): allowed are 1 group a worker and more"
            )
        self._capacity = capacity
        self._open: list[OrderedDict[tuple[int, ...], None]] = [
            OrderedDict() for _ in range(workers)
        ]
        self._ids: dict[tuple[int, ...], int] = {}
        self._closed: list[list[int]] = [[] for _ in range(workers)]
        self._last_id = 0

    def id_of(self, members: Sequence[int]) -> int:
        """Return the id of the members' connections, from 1 on; a new one if they are not open.

        Closes the least recently used connections of each member that has too many.
        """
        key = tuple(sorted(members))
        if key not in self._ids:
            for member in key:
                if len(self._open[member]) >= self._capacity:
                    self._close(next(iter(self._open[member])))
            self._ids[key] = self.new_id()
        for member in key:
            self._open[member][key] = None
            self._open[member].move_to_end(key)
        return self._ids[key]

    def new_id(self) -> int:
        """Return a new id, for connections that are not kept."""
        self._last_id += 1
        return self._last_id

    def close_all(self, worker: int) -> None:
        """Close all connections of a worker, because they may be broken."""
        for key in list(self._open[worker]):
            self._close(key)

    def pop_closed(self, worker: int) -> list[int]:
        """Return the ids that ``worker`` must close before it opens others; each once."""
        ids, self._closed[worker] = self._closed[worker], []
        return ids

    def _close(self, key: tuple[int, ...]) -> None:
        number = self._ids.pop(key)
        for member in key:
            del self._open[member][key]
            self._closed[member].append(number)


@dataclass(slots=True)
class _Worker:
    requests: int = 0
    gone: bool = False  # sends no more messages
    returned: bool = False  # the process was started again, and is not active yet
    silent: bool = False  # sends no messages, but may again
    stale: bool = False  # was silent, and has not copied a state since
    behind: bool = False  # groups have continued without it
    missed: bool = False  # others have synchronized without it
    probed: bool = False  # has sent nothing since
    probed_at: float = -math.inf
    fetching: bool = False  # has no complete state to send
    synchronizing: bool = False  # the group of all workers is not done
    expected: bool = False  # was connected to the generator before this one, and is not to this one
    synchronized: int = -1  # the number of the last group of all workers that it has completed


# -- the service --------------------------------------------------------------------------


class GroupService(Actor):
    """Serves one job's group generator until all workers have left, or one has fallen back.

    The mailbox is connected to all workers, numbered by rank. ``first`` is the timeout of a step in
    seconds while its worker's usual one is unknown, ``least`` the lower bound of others.
    ``membership`` has the restarted workers; None if there are none. ``started_by`` is the worker
    whose process has started this one, and ends with it; -1: none.

    A generator that replaces another one is not connected to any worker. ``expected`` are the
    workers that continued without one, None for the first generator. They count as active for
    `CONNECT_S`, in which they connect: groups of all workers wait for them. Any other worker copies
    a state before it is in a group.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        generator: Generator,
        workers: int,
        first: float,
        least: float = MIN_TIMEOUT_S,
        connections: ConnectionCache | None = None,
        clock: Callable[[], float] = time.monotonic,
        membership: MembershipClient | None = None,
        started_by: int = -1,
        incarnation: int = 0,
        expected: Collection[int] | None = None,
    ) -> None:
        super().__init__(mailbox, MESSAGES, GeneratorConfig.me, clock=clock, workers=workers)
        self._started_by, self._incarnation, self._expected = started_by, incarnation, expected
        self._generator, self._membership = generator, membership
        self._steps, self._first_s = Deadlines(least, first=first), first
        self._connections = connections or ConnectionCache(workers)
        self._workers = [_Worker() for _ in range(workers)]
        self._fetches: dict[int, FetchState] = {}  # that no worker can serve yet
        self._reports: dict[int, tuple[Lost, float]] = {}  # and when they count
        self._kept_alive_at = clock()
        for worker in range(workers):
            self._steps.start(worker, self._kept_alive_at)
            if expected is not None:
                self._workers[worker].expected = worker in expected
                if worker not in expected:
                    self._workers[worker].gone = True
                    generator.remove(worker)
        self._connect_by = self._kept_alive_at + CONNECT_S

    def work(self) -> None:
        """Connect to restarted workers, let no quorum wait, and end once no worker needs this."""
        if self._membership is not None:
            # If this process was suspended, workers may have continued without it.
            if self._membership.log.view[-1] != 2 * self._incarnation:
                self.closing = True
                return
            for change in self._membership.take_changes():
                self._follow_log(change)
        self._serve_fetches()  # also by a worker that has just connected
        for worker in self._generator.take_late(self.clock()):
            self._start(self._remove(worker))
        self.closing |= all(w.gone or w.silent for w in self._workers)

    def _follow_log(self, change: MembershipChange) -> None:
        worker = change.worker
        if change.peer_info is not None:
            if self._connect(worker, change.peer_info):
                assert self._membership is not None
                self._membership.acknowledge(worker, change.incarnation)
        elif worker < len(self._workers) and self._workers[worker].expected:
            assert self._membership is not None
            if self._membership.log.view[worker] % 2:  # others have detected its end
                self._remove_for_good(worker)

    def idle_s(self) -> float:
        """Return the seconds until the grace of a quorum ends, if that is sooner."""
        due = self._generator.due
        return self.check_s if due is None else min(self.check_s, max(0.0, due - self.clock()))

    def leave(self) -> None:
        """Remove the worker that has exited; otherwise each other one would have to detect it."""
        if self.quick and self._started_by >= 0 and not self._workers[self._started_by].gone:
            self._remove_for_good(self._started_by)

    def handle(self, message: Message, record: Any) -> None:
        """Handle a worker's message."""
        worker = message.peer
        if self._workers[worker].gone:
            return
        if self._workers[worker].silent:
            self._end_silence(worker)
        self._start(self._handle(worker, record))

    def refuse(self, message: Message, error: MalformedMessage) -> None:
        """Remove a worker that has violated the protocol."""
        self._send(message.peer, Refused(str(error).encode()))
        self._remove_for_good(message.peer)

    def _handle(self, worker: int, message: Any) -> list[Run]:
        now = self.clock()
        self._workers[worker].probed = False
        match message:
            case Request(copies_state):
                return self._handle_request(worker, now, copies_state=copies_state)
            case Synchronize():
                return self._handle_request(worker, now, synchronize=True)
            case Done(number, epoch):
                return self._handle_done(worker, number, epoch, now)
            case Lost():
                return self._handle_lost(worker, message, now)
            case FetchState():
                self._fetches[worker] = message
                return []
            case Fetched():
                state = self._workers[worker]
                if state.fetching:  # groups have not continued without it since
                    state.fetching = state.behind = state.stale = state.missed = False
                return []
            case Keepalive():
                return []
        raise ProtocolError(f"{type(message).__name__} was sent by a worker")

    def _handle_lost(self, worker: int, report: Lost, now: float) -> list[Run]:
        """Remove a member that a group has lost, unless the group already runs without it.

        A member that has completed the group may have ended before the others had its last data:
        the group runs again without it.

        A worker may synchronize alone only if the last other one has died, and a process that has
        just ended is not known to have died yet.
        """
        if not self._generator.run_together(worker, *report):
            return self._generator.run_without(worker, *report)
        alone = len(self._generator.unfinished(worker)) == 2
        if alone and self._workers[worker].synchronizing:
            self._reports[worker] = report, now + 2 * RECONNECT_S
            return []
        return self._remove(report.member)

    def _repeat_reports(self, now: float) -> None:
        for worker, (report, due) in list(self._reports.items()):
            together = self._generator.run_together(worker, *report)
            if now > due or not together:
                del self._reports[worker]
                self._start(self._remove(report.member) if together else [])

    def _handle_request(
        self, worker: int, now: float, *, copies_state: bool = False, synchronize: bool = False
    ) -> list[Run]:
        """Handle a request for a group, or for one of all workers; add an excluded worker.

        Not one that ``copies_state``, which may be at another fragment, or that was silent, whose
        model is old. Without other workers it has missed nothing.
        """
        generator, state = self._generator, self._workers[worker]
        state.requests += 1
        must_fetch = state.stale or (copies_state and state.behind)
        if must_fetch and not synchronize and self._others(worker):
            self._send_removed(worker, worker)
            return []
        self._add(worker)
        if not synchronize:
            self._steps.arrived(worker, now)
            self._serve_fetches(worker)  # before its group, which may run at once
            return generator.request(worker)
        self._steps.stop(worker)
        state.synchronizing = True
        return generator.synchronize(worker)

    def _add(self, worker: int, *, at_once: bool = False) -> None:
        if worker not in self._generator:
            self._generator.add(worker, at_once=at_once)
            self._workers[worker].returned = False
            for other in range(len(self._workers)):
                self._send(other, Added(worker))

    def _others(self, worker: int) -> list[int]:
        return [w for w in range(len(self._workers)) if w != worker and w in self._generator]

    def _serve_fetches(self, asking: int | None = None) -> None:
        """Let others send the states that workers have requested.

        One that joins needs a sender that waits for its group, or is ``asking`` for it: the others
        have nothing to send before, and the group must not run without the new member.
        """
        for worker, fetch in list(self._fetches.items()):
            others = [each for each in self._others(worker) if not self._workers[each].fetching]
            if fetch.join and others and not any(self._can_send(each, asking) for each in others):
                continue
            del self._fetches[worker]
            self._handle_fetch(worker, self.clock(), join=fetch.join)
            self._find_sender(worker, fetch, asking)

    def _can_send(self, worker: int, asking: int | None) -> bool:
        waits = self._generator.is_waiting(worker) and not self._generator.unfinished(worker)
        return waits or worker == asking

    def _handle_fetch(self, worker: int, now: float, *, join: bool) -> None:
        self._workers[worker].fetching = self._workers[worker].behind = True
        if join:
            self._add(worker, at_once=True)
        if worker in self._generator and not self._generator.is_waiting(worker):
            self._start_pause(worker, now)

    def _handle_done(self, worker: int, number: int, epoch: int, now: float) -> list[Run]:
        generator, steps, state = self._generator, self._steps, self._workers[worker]
        others = generator.unfinished(worker)
        runs = generator.acknowledge(worker, number, epoch)
        if worker not in generator:
            return runs
        if generator.is_waiting(worker):
            steps.stop(worker)
        elif state.synchronizing:
            state.synchronizing = state.behind = state.stale = False
            state.synchronized = number
            self._start_pause(worker, now)
        else:
            steps.start(worker, now)
        for other in others:
            if other != worker and other not in steps:  # it has not completed the group
                steps.start(other, now)
        return runs

    def _start_pause(self, worker: int, now: float) -> None:
        """Expect a step of a worker that may evaluate and save first."""
        self._steps.start(worker, now, self._first_s)

    def _start(self, runs: Iterable[Run]) -> None:
        """Send members the groups to run; remove a member that cannot be reached."""
        due = deque(runs)
        while due:
            run = due.popleft()
            connection = self._connections.id_of(run.members) if len(run.members) > 1 else 0
            if self._workers[run.members[0]].synchronizing:
                if len(run.members) == 1:
                    self._send_inactive(run.members[0])  # with the reasons as known by now
                self._send_finished(run.members)
                for worker, state in enumerate(self._workers):
                    if worker not in self._generator:  # the state that it copies may be of before
                        state.missed, state.fetching = True, False
                    state.missed &= worker not in run.members
            for member in run.members:
                close = tuple(self._connections.pop_closed(member))
                message = RunMessage(
                    run.number, run.epoch, run.initiator, connection, run.members, close
                )
                if not self._send(member, message):
                    due += self._remove(member)
                    break  # The others run the next epoch.
                self._workers[member].probed_at = self.clock()

    def _find_sender(self, receiver: int, fetch: FetchState, asking: int | None) -> None:
        """Let an active worker send its state to ``receiver``; the lost one only without any other.

        A worker that copies a state itself has none to send.
        """

        def rank(worker: int) -> tuple[bool, ...]:
            ready = self._can_send(worker, asking)
            return worker == fetch.lost, self._workers[worker].behind, not ready

        others = [each for each in self._others(receiver) if not self._workers[each].fetching]
        for sender in sorted(others, key=rank):
            message = SendState(sender, receiver, self._connections.new_id())
            if self._send(sender, message):
                self._send(receiver, message)
                return
        if any(state.expected for state in self._workers):
            self._fetches[receiver] = fetch  # one that connects soon has a state
        else:
            self._send(receiver, SendState(receiver, receiver, 0))

    def _connect(self, worker: int, info: PeerInfo) -> bool:
        """Connect to a restarted worker. Its first request makes it active."""
        expected = self._workers[worker].expected
        if not expected:
            self._workers[worker].returned = True
            self._remove_for_good(worker)  # the loss of the old process may not be detected yet
        try:
            self.mailbox.join(worker, info)
        except UsageError:
            return False  # Its mailbox has other options. Its own wait times out.
        self.replaced(worker)
        # Groups may have continued without a worker that this generator did not expect.
        stale = self._expected is not None and not expected
        behind = stale or self._workers[worker].behind
        missed = stale or self._workers[worker].missed
        self._workers[worker] = _Worker(
            returned=not expected, behind=behind, stale=stale, missed=missed
        )
        self._send_inactive(worker)
        self._generator.await_return(worker)
        return True

    def _end_silence(self, worker: int) -> None:
        """Send a worker that was silent what it has missed. Its next request makes it active."""
        self._workers[worker].silent = False
        self._generator.await_return(worker)
        self._send_inactive(worker)
        for other in self._others(worker):
            self._send(worker, Added(other))
        self._send_removed(worker, worker)

    def _send_inactive(self, worker: int) -> None:
        for other in range(len(self._workers)):
            if other != worker and other not in self._generator:
                self._send_removed(worker, other)

    def _send_finished(self, members: Sequence[int]) -> None:
        """Send members of a synchronization who left after one that none of them has completed."""
        last = max(self._workers[member].synchronized for member in members)
        for worker in sorted(self.mailbox.left):
            if worker < len(self._workers) and self._workers[worker].synchronized > last:
                for member in members:
                    self._send_removed(member, worker, Reason.FINISHED)

    def _remove_for_good(self, worker: int) -> None:
        state = self._workers[worker]
        state.gone, state.silent, state.expected = True, False, False
        self._fetches.pop(worker, None)
        self._start(self._remove(worker, gone=True))

    def _remove(self, worker: int, *, gone: bool = False) -> list[Run]:
        """Remove a worker; unless ``gone`` it counts as alive, and synchronization waits for it."""
        generator, state = self._generator, self._workers[worker]
        if worker in generator or (gone and generator.is_late(worker)):
            state.behind, state.fetching, state.synchronizing = True, False, False
            self._connections.close_all(worker)
            self._fetches.pop(worker, None)
            for other in range(len(self._workers)):
                self._send_removed(other, worker)
        if gone:
            self._steps.forget(worker)
            self._fetches.pop(worker, None)
            return generator.remove(worker, left=self._reason(worker) is Reason.LEFT)
        self._steps.stop(worker)
        return generator.mark_late(worker)

    def _send_removed(self, to: int, worker: int, reason: Reason | None = None) -> None:
        requests = self._workers[worker].requests % ID_LIMIT
        why = self._reason(worker) if reason is None else reason
        self._send(to, Removed(worker, requests, why, self._workers[to].missed))

    def _reason(self, worker: int) -> Reason:
        # A worker that ends without a generator leaves by the log alone.
        logged = self._membership is not None and worker in self._membership.log.left
        if logged or worker in self.mailbox.left:
            return Reason.LEFT
        state = self._workers[worker]
        if self._expected is not None and worker not in self.mailbox.peers:
            return Reason.SILENT  # it was never connected to this generator, so it may live
        if worker in self.mailbox.unconnected():
            return Reason.DIED
        if state.silent or state.stale:
            return Reason.SILENT
        return Reason.DIED if state.returned else Reason.LATE

    def _send(self, worker: int, message: Any) -> bool:
        """Send a message without blocking; return whether the worker can be sent anything."""
        if self._workers[worker].gone or self._workers[worker].expected:
            return False
        kind, ids, payload = MESSAGES.pack(message)
        try:
            self.mailbox.post(worker, kind, payload, ids=ids, urgency=0, seconds=0.0)
        except PeerError:
            return False
        return True

    def check(self, now: float) -> None:
        """Remove failed workers, and those whose step has timed out while others wait for it."""
        self._check_failures()
        self._repeat_reports(now)
        if now > self._connect_by:
            self._connect_by = math.inf
            for worker, state in enumerate(self._workers):
                if state.expected:
                    self._remove_for_good(worker)
        for worker, state in enumerate(self._workers):
            if self._generator.is_awaited(worker) and self._steps.is_overdue(worker, now):
                self._start(self._remove(worker))
            elif self._is_probe_due(worker, now):
                state.probed, state.probed_at = True, now
                self._send(worker, Keepalive())
        if now - self._kept_alive_at > min(_KEEPALIVE_S, self._first_s / 4):
            self._kept_alive_at = now
            self._send_keepalives()

    def _is_probe_due(self, worker: int, now: float) -> bool:
        """Whether to send ``worker`` a message, so that its silence shows.

        One whose step takes unusually long, even if no other waits for it; and the members of a
        running group, which all wait for each other, and send this process nothing until its end.
        """
        state = self._workers[worker]
        if self._generator.is_running(worker):
            return now >= state.probed_at + _PROBE_S
        return self._steps.is_unusual(worker, now) and not state.probed

    def _check_failures(self) -> None:
        for worker, state in enumerate(self._workers):
            how = self.gone[worker].how if worker in self.gone else None
            if how is Failure.LEFT and not state.gone:
                self._remove_for_good(worker)
            elif how is Failure.ENDED and not state.gone:
                self._start(self._remove(worker, gone=True))
            elif how is Failure.SILENT and not (state.silent or state.gone):
                state.silent = state.stale = True
                self._start(self._remove(worker, gone=True))
            elif how is None and state.silent:
                self._end_silence(worker)

    def _send_keepalives(self) -> None:
        """Notify waiting workers that a worker they wait for is alive."""
        for worker in range(len(self._workers)):
            waits = worker in self._generator and self._generator.is_waiting(worker)
            if waits and (awaited := self._generator.waiting_for(worker)):
                self._send(worker, Keepalive(awaited[0]))
        for worker in self._fetches:
            if others := self._others(worker):
                self._send(worker, Keepalive(others[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """Configuration of the generator's process, and how workers connect to it.

    Mailboxes of workers are numbered by rank; the generator's number is that of the workers.

    Attributes:
        room: prefix of keys in the rendezvous store.
        interfaces: names of those of this host to use; empty: all.
        timeout: seconds for connection setup, a worker's first step, and a wait for a group.
        rules: how groups are made.
        silence: seconds without a message after which an awaited peer is dead. With a quorum the
            generator waits for `QUORUM_SILENCE_S`, or the grace if that is longer, at most.
        least: lower bound of the adaptive timeout of a step, in seconds.
        capacity: groups whose connections a worker keeps open.
        started_by: the worker whose process has started it, and ends with it; -1: `wingbeat store`.
        ranks: the rank of each worker's process in the job, for messages; empty: its number.
        incarnation: above 0 for a generator that replaces one that has ended.
    """

    module: ClassVar[str] = "wingbeat.methods.model_averaging"
    uses_store_later: ClassVar[bool] = True
    me: ClassVar[str] = "the group generator"

    room: str
    host_of: tuple[int, ...]
    interfaces: tuple[str, ...]
    encrypted: bool = True
    timeout: float
    rules: Rules
    seed: int = 0
    silence: float = SILENCE_S
    least: float = MIN_TIMEOUT_S
    capacity: int = CAPACITY
    started_by: int = -1
    ranks: tuple[int, ...] = ()
    incarnation: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError if groups would run in the middle of steps."""
        if self.rules.notified:
            raise UsageError(
                "Rules(notified=True) is for simulations only: a worker receives groups only while "
                "its request waits; leave it out"
            )

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.host_of)

    def to_json(self) -> str:
        """Return the configuration as JSON."""
        return json.dumps(asdict(self))

    def connect(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        """Connect to all workers; return a function that serves them while its argument is true."""
        workers = self.workers
        membership = self._membership(store, workers)
        expected: tuple[int, ...] | None = None
        if self.incarnation:
            mailbox = self._replace(store, membership)
            expected = tuple(w for w in members(membership.log.view) if w < workers)
        else:
            mailbox = self._open(store, workers, range(workers))

        def serve(parent: Callable[[], bool]) -> None:
            service = GroupService(
                mailbox,
                Generator(Layout(self.host_of), self.rules, self.seed),
                workers,
                self.timeout,
                self.least,
                ConnectionCache(workers, self.capacity),
                membership=membership,
                started_by=self.started_by,
                incarnation=self.incarnation,
                expected=expected,
            )
            membership.start(mailbox.interrupter())
            try:
                service.run(parent)
            finally:
                membership.stop()

        return serve

    def _replace(self, store: Store, membership: MembershipClient) -> Mailbox:
        """Open the mailbox of a further generator; workers connect to it by the membership log."""

        def announce(seconds: float) -> dict[int, int]:
            return membership.announce(self.incarnation, seconds, [])

        return self._open(store, self.workers, [], self.incarnation, announce)

    def client(
        self,
        store: AtomicStore,
        rank: int,
        returned: bool = False,
        is_running: Callable[[int], bool] = lambda _: False,
        name: Callable[[int], str] = "rank {}".format,
        start: Callable[[int], None] | None = None,
        has_died: Callable[[int], bool] = lambda _: False,
    ) -> Client:
        """Connect a worker to the generator. The caller closes the client's mailbox.

        ``start`` starts an incarnation of the generator, after one has ended; None: there is no
        other one. ``has_died``: see `Client`. Raises RendezvousError if the generator did not
        connect, or is dead.
        """
        generator = self.workers
        layout, table = Layout(self.host_of), StatusTable(store, self.room, self.workers, rank)
        search, incarnation = None, 0
        if start is not None:
            reconnect = functools.partial(self._reconnect, store, rank)
            search = GeneratorSearch(table, reconnect, start, self._name(rank))
        if not returned:
            mailbox = self._open(store, rank, [generator])
        else:
            assert search is not None, "a worker that rejoins may start the generator"
            found, incarnation = search.find(self.timeout), search.number // 2
            if found is None:
                raise RendezvousError(
                    f"{self._name(rank)}: cannot rejoin: there was no group generator for "
                    f"{self.timeout:g} s; start all workers again from a checkpoint"
                )
            mailbox = found
            # Those that still have the former generator, and await this worker, search for it too.
            table.publish(rank, Status(incarnation))
        return Client(
            mailbox, rank, generator, layout, self.rules, self.timeout, table, is_running, name,
            search=search, generation=incarnation, has_died=has_died,
            record=functools.partial(log_event, rank=self.ranks[rank] if self.ranks else rank),
        )  # fmt: skip

    def _reconnect(self, store: AtomicStore, rank: int, generator: int) -> Mailbox:
        """Connect a worker to an incarnation of the generator, as a new incarnation of its own.

        Raises RendezvousError if it has ended, or did not accept this worker in time.
        """
        membership = self._membership(store, rank)
        incarnation = membership.next_incarnation()

        def announce(timeout: float) -> dict[int, int]:
            found = membership.announce(incarnation, min(timeout, START_S), [self.workers])
            if found != {self.workers: generator}:
                raise RendezvousError(f"{self._name(self.workers)} has ended")
            return found

        def watch() -> None:
            with contextlib.suppress(TimeoutError, RuntimeError):  # the store may be unavailable
                membership.synchronize()
            if membership.log.view[self.workers] != 2 * generator:
                raise RendezvousError(f"{self._name(self.workers)} has ended")

        return self._open(store, rank, [self.workers], incarnation, announce, watch)

    def _name(self, member: int) -> str:
        if member == self.workers:
            return self.me
        return f"rank {self.ranks[member] if self.ranks else member}"

    def _membership(self, store: Store, member: int) -> MembershipClient:
        return MembershipClient(store, self.room, member, self.workers + 1, name=self._name)

    def _silence_of(self, number: int) -> float:
        """Return after how many seconds others are silent for a worker, or for the generator."""
        if number < self.workers or self.rules.quorum is None:
            return self.silence
        return min(self.silence, max(QUORUM_SILENCE_S, self.rules.grace))

    def _open(
        self,
        store: Store,
        number: int,
        peers: Iterable[int],
        incarnation: int = 0,
        announce: Callable[[float], Mapping[int, int]] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> Mailbox:
        return open_mailbox(
            store,
            number,
            peers,
            namespace=self.room,
            interfaces=self.interfaces or None,
            classes=1,
            encrypted=self.encrypted,
            limits=Limits(silence=self._silence_of(number)),
            seconds=self.timeout,
            name=self._name,
            incarnation=incarnation,
            announce=announce,
            watch=watch,
        )
