"""A worker's client of the group generator, and of the static schedule without one.

Workers publish their status in the rendezvous store, which replaces the generator when it is lost.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.generator import (
    ID_LIMIT,
    MESSAGES,
    Added,
    Done,
    Fetched,
    FetchState,
    Keepalive,
    Lost,
    Member,
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
from wingbeat.methods.model_averaging.rules import PHASES, Rules, group_of
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.schema import MalformedMessage, Range, parse_json
from wingbeat.transport.detector import Failed, FailureDetector
from wingbeat.transport.failures import WaitLog
from wingbeat.transport.membership import MembershipClient, members
from wingbeat.transport.messages.frames import Message
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.store import AtomicStore, Store
from wingbeat.types import Layout

if TYPE_CHECKING:
    from wingbeat.methods.model_averaging.succession import GeneratorSearch

_log = logging.getLogger(__name__)

NO_INITIATOR = -1
"""The initiator of groups that no worker has requested. Their numbers grow with the step."""

ABANDONED = -1
"""Result of an abandoned average: members are missing and will not arrive."""

STATIC_CONNECTIONS = 1 << 31
"""The first connection id of groups without a generator; the generator's ids start at 1."""

SYNC_CALL = "the call of wingbeat.synchronize()"

_READ_S = 5.0  # timeout of a read of an existing key, in seconds
_CHECK_S = 0.25  # between checks of the generator while one of its messages is awaited
_KEEPALIVE_S = 1.0  # between keepalive messages, whose loss shows that the generator is dead
_REFRESH_S = 0.5  # between checks of the status table while members are awaited
_SYNC_CHECK_S = 0.05  # between checks of the status table during synchronization
_PUBLISH_S = 1.0  # between two publications of a worker's status
_SEARCH_S = 0.02  # between checks of the connection to the next generator

CONNECT_S = 10.0
"""Seconds for workers to connect to a generator that replaces another one."""

_REASONS = {
    Reason.LATE: "took too long for a step, or for an average",
    Reason.SILENT: "has given no sign for long",
    Reason.LEFT: "has left",
    Reason.DIED: "has ended",
}

State = TypeVar("State")


class Arrival(enum.Enum):
    """Whether the missing members of a group will arrive. True if they may."""

    POSSIBLE = enum.auto()
    DEPARTED = enum.auto()
    """Some will not; if they took part before, the data that they have sent may still arrive."""
    IMPOSSIBLE = enum.auto()
    """Some will not, and did not take part before."""

    def __bool__(self) -> bool:
        return self is Arrival.POSSIBLE


class Reducer(Protocol):
    """Averages this worker's parameters with those of a group.

    A protocol, because the implementation, `GroupAllReduce`, needs torch.
    """

    def average(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        """Average the parameters of a group of two or more members over its connection id.

        ``arrival`` returns whether missing members will arrive: a member may have died, or may
        never receive the group because the generator has died. Returns a lost member, `ABANDONED`,
        or None for success.
        """
        ...

    def close(self, connections: Iterable[int] | None = None) -> None:
        """Close the connections with these ids; all if None."""


def isolation_text(me: str, others: str) -> str:
    """Return the error of a synchronization of one worker alone; ``others`` states why."""
    return (
        f"{me}: no other worker takes part in the mean of all models: {others}; its weights are "
        "its own alone: start the job again from a checkpoint, or save them with "
        "model.state_dict() if the others' are not needed"
    )


# -- without a generator ------------------------------------------------------------------


Steps: TypeAlias = Annotated[int, Range(0, 1 << 48)]


class Status(NamedTuple):
    """The progress of a worker. Its values only grow.

    Attributes:
        generation: the incarnation of the generator that it was connected to last.
        rounds: the number of synchronizations that it has completed since.
        synchronizing: whether it waits for the next one, and makes no steps until then.
        steps: the number of its steps without a generator. A synchronization sets it to the maximum
            over all workers.
        failed: the number of the latest group that failed on it, whose connections it has closed;
            -1 for none.
        former_rounds: ``rounds`` when it found this generator.
        former_steps: ``steps`` when it found this generator.
    """

    generation: Steps = 0
    rounds: Steps = 0
    synchronizing: bool = False
    steps: Steps = 0
    failed: Annotated[int, Range(-1, 1 << 48)] = -1
    former_rounds: Steps = 0
    former_steps: Steps = 0


_SUPPRESSED = contextlib.suppress(TimeoutError, RuntimeError, OSError)


class StatusTable:
    """The status of all workers, and which are lost or have left. Empty while the store is down.

    The members of the log are the workers and, with the number after them, the group generator.
    ``worker`` is the one that writes, in any of its threads.
    """

    def __init__(self, store: Store, room: str, workers: int, worker: int) -> None:
        self._store, self._room, self._workers, self._worker = store, room, workers, worker
        self._membership = MembershipClient(store, room, worker, workers + 1)
        self._reading = threading.Lock()

    def publish(self, worker: int, status: Status) -> None:
        """Set the status of ``worker``."""
        self._set(f"status/{worker}", json.dumps(status))

    def statuses(self) -> dict[int, Status]:
        """Return the status of each worker that has published one."""
        found = {}
        for worker in range(self._workers):
            with contextlib.suppress(MalformedMessage):
                found[worker] = parse_json(Status, self._get(f"status/{worker}"))
        return found

    def mark_lost(self, worker: int, *, left: bool = False) -> None:
        """Mark ``worker`` as inactive permanently; ``left`` if it has shut down gracefully.

        Unless this worker was marked before: the others have continued without it.
        """
        with self._reading, _SUPPRESSED:
            self._membership.end(worker, left=left)

    def mark_fallback(self, worker: int, last: int, generation: int = 0) -> None:
        """Mark that ``worker`` continues without this incarnation of the generator.

        ``last`` is the last group that it has completed; it joins no later one.
        """
        self._set(f"fallback/{generation}/{worker}", str(last))
        self.end_generator(generation)

    def fallbacks(self, workers: Iterable[int], generation: int = 0) -> dict[int, int]:
        """Return the last group of each of ``workers`` that continues without the generator."""
        found = {}
        for worker in workers:
            with contextlib.suppress(ValueError):
                found[worker] = int(self._get(f"fallback/{generation}/{worker}"))
        return found

    def generator(self) -> int:
        """Return the generator's number in the log, as last read."""
        self.lost()
        return self._membership.log.view[self._workers]

    def claim_generator(self, incarnation: int) -> bool | None:
        """Claim the start of an incarnation of the generator; None if the store is unavailable."""
        mine = f"{self._worker} {secrets.token_hex(8)}"
        assert isinstance(self._store, AtomicStore), "stores of a job have claims"
        with _SUPPRESSED:
            return self._store.claim(f"{self._room}/generator/{incarnation}", mine) == mine
        return None

    def end_generator(self, incarnation: int) -> None:
        """Log the end of an incarnation of the generator, unless there is a later one."""
        with self._reading, _SUPPRESSED:
            self._membership.end(self._workers, incarnation=incarnation)

    def lost(self) -> set[int]:
        """Return the workers that are permanently inactive."""
        with self._reading, _SUPPRESSED:
            self._membership.synchronize()
        return set(range(self._workers)).difference(members(self._membership.log.view))

    def has_left(self, worker: int) -> bool:
        """Whether ``worker`` has shut down gracefully."""
        return worker in self._membership.log.left

    def _set(self, key: str, value: str) -> None:
        # Groups with open connections do not need the store.
        with _SUPPRESSED:
            self._store.set(f"{self._room}/{key}", value)

    def _get(self, key: str) -> str:
        with _SUPPRESSED:
            if self._store.has(f"{self._room}/{key}"):
                return self._store.get(f"{self._room}/{key}", _READ_S)
        return ""


class GeneratorIsBack(Exception):
    """Other workers have another generator, so a group of the static schedule fails."""


class StaticClient:
    """Averages with the groups of a schedule known to all workers. Not thread-safe.

    Lost workers are left out. Workers learn of losses from the status table. It also shows which
    workers synchronize, and so make no step, and which are past a step that others could not
    complete; groups run without both.

    A worker is lost after ``timeout`` seconds without a status change, or if it is in ``lost``.
    With ``everyone`` all workers are one group in each step, instead of the static schedule.
    ``is_running`` returns whether the process of a silent worker is known to run. ``name`` returns
    the name of a worker in messages. ``generation`` is the incarnation of the generator that was
    lost; see `newer`.

    Attributes:
        newer: up to this generation, workers of a later one do not end a call with
            `GeneratorIsBack`.
        fallback: None; there is no generator that could be lost.
        lost_peers: the workers that this worker knows to be lost or to have left.
        silent: those of them that were silent while all others synchronized.
        excluded, must_fetch, copies_state: False; see `Client`.
        on_lost: called with each worker that is lost.
        watch: called while it waits; may raise.
    """

    def __init__(
        self,
        worker: int,
        layout: Layout,
        timeout: float,
        table: StatusTable,
        *,
        everyone: bool = False,
        lost: Collection[int] = (),
        is_running: Callable[[int], bool] = lambda _: False,
        name: Callable[[int], str] = "rank {}".format,
        generation: int | None = None,
    ) -> None:
        self._worker, self._layout, self._timeout = worker, layout, timeout
        self._name, self._me = name, name(worker)
        self.newer: float = math.inf if generation is None else generation
        self._table, self._everyone, self._is_running = table, everyone, is_running
        self._others = set(range(layout.workers)) - {worker}
        self._status = self._published = Status(generation or 0)
        self._published_at = self._checked_at = time.monotonic()
        self._statuses: dict[int, Status] = {}
        self._connections: dict[tuple[int, ...], int] = {}  # by members: their first group's number
        self.fallback: str | None = None
        self.lost_peers = set(lost)
        self.silent: set[int] = set()
        self.excluded = self.must_fetch = self.copies_state = False
        self.watch: Callable[[], None] = lambda: None
        self.on_lost: Callable[[int], None] = lambda _: None

    @property
    def steps(self) -> int:
        """The number of steps that it has made."""
        return self._status.steps

    def step(self, reducer: Reducer) -> None:
        """Average with this step's group."""
        step = self.steps
        group: Collection[int] = range(self._layout.workers)
        keep = True
        if not self._everyone:
            group = group_of(self._layout, self._worker, step)
            # With an odd number of hosts each cycle has other pairs: too many connections to keep.
            keep = step % PHASES != 2 or len(self._layout.hosts) % 2 == 0
        self._average(group, reducer, 2 * step + 2, keep=keep)
        self._status = self._status._replace(steps=step + 1)
        if time.monotonic() - self._published_at >= _PUBLISH_S:
            self._publish()

    def synchronize(self, reducer: Reducer) -> None:
        """Average with all active workers, once all of them have called this.

        Raises PeerError if no other worker is active, and not all have left gracefully after a mean
        with this one; a live worker does not call this; or the store is down.
        """
        self._status = self._status._replace(synchronizing=True)
        self._await_all()
        # All statuses are published before any worker continues.
        own = self._status.generation
        known = [
            s.steps
            for worker, s in self._statuses.items()
            if worker not in self.lost_peers and s.generation == own
        ]
        last = max(self.steps, *known, 0)
        self._average(range(self._layout.workers), reducer, 2 * last + 1, keep=False)
        reducer.close()
        self._connections.clear()
        self._status = self._status._replace(
            rounds=self._status.rounds + 1, synchronizing=False, steps=last + 1
        )
        self._publish()
        if self._worker in self.lost_peers:
            text = f"the others have continued without {self._me}"
            raise PeerError(isolation_text(self._me, text))
        if self._others and self._others <= self.lost_peers and self._have_another_model():
            silent = f"gave no sign for {self._timeout:g} s"
            names = "; ".join(
                f"{self._name(each)} {silent if each in self.silent else 'was lost or has left'}"
                for each in sorted(self._others)
            )
            raise PeerError(isolation_text(self._me, names))

    def _have_another_model(self) -> bool:
        """Whether an inactive worker was lost, or left after a synchronization without this one."""
        rounds = self._status.rounds
        return not all(map(self._table.has_left, self._others)) or any(
            self._statuses.get(w, Status()).rounds >= rounds for w in self._others
        )

    def found_generator(self, generation: int) -> None:
        """Publish that this worker has another generator."""
        own = self._status
        self._status = Status(generation, former_rounds=own.rounds, former_steps=own.steps)
        self._publish()

    def leave(self, *, failed: bool = False) -> None:
        """Publish that this worker has left; ``failed`` if an exception ends it."""
        self._status = self._status._replace(synchronizing=True)  # it makes no more steps
        self._publish()
        self._table.mark_lost(self._worker, left=not failed)

    def _average(
        self, group: Collection[int], reducer: Reducer, number: int, *, keep: bool
    ) -> None:
        """Average with the available members of a group; ``keep`` its connections for the next."""
        while True:
            self._check_generation()
            members = tuple(sorted(set(group) - self._unavailable() | {self._worker}))
            if len(members) == 1 or self._worker in self.lost_peers:
                return
            first = self._connections.setdefault(members, number)
            run = Run(number, 0, members, NO_INITIATOR)
            arrival = functools.partial(self._arrival, members)
            lost = reducer.average(run, STATIC_CONNECTIONS + first, arrival)
            if lost is None and keep:
                return
            del self._connections[members]
            reducer.close([STATIC_CONNECTIONS + first])
            if lost is None or not self._should_retry(members, lost, first, number):
                return

    def _should_retry(self, members: tuple[int, ...], lost: int, first: int, number: int) -> bool:
        """Determine why a group failed; return whether to try again."""
        self._status = self._status._replace(failed=number)
        self._publish()
        self._refresh()
        if self._worker in self.lost_peers:
            _log.warning(
                "%s: the others continue without this worker, which they could not reach; "
                "it trains alone: start the job again from a checkpoint to have it take part",
                self._me,
            )
            return False
        if self._unavailable() & set(members):
            return True
        statuses = (self._statuses.get(w, Status()) for w in members if w != self._worker)
        others = [each for each in statuses if each.generation == self._status.generation]
        if first < number and any(status.failed >= first for status in others):
            return True  # A member has closed the kept connections, and opens new ones.
        if lost in (ABANDONED, self._worker):
            return False
        self._mark_lost(lost, "was lost in an average")
        return True

    def _mark_lost(self, worker: int, why: str) -> None:
        name = self._name(worker)
        _log.warning("%s: %s %s; groups continue without it", self._me, name, why)
        self._add_lost({worker})
        self._table.mark_lost(worker)

    def _add_lost(self, workers: Collection[int]) -> None:
        for worker in sorted(set(workers) - self.lost_peers):
            self.lost_peers.add(worker)
            self.on_lost(worker)
            stream.happened("left", (worker,))

    def _check_generation(self) -> None:
        """Raise `GeneratorIsBack` if another worker has a generator that this one should find."""
        others = [s.generation for w, s in self._statuses.items() if w not in self.lost_peers]
        if max(others, default=0) > self.newer:
            raise GeneratorIsBack

    def _unavailable(self) -> set[int]:
        """Return the workers that do not take part in this worker's current or next group."""
        own = self._status
        values = 2 if own.synchronizing else 4  # the numbers of steps may differ then
        past = {w for w, status in self._statuses.items() if status[:values] > own[:values]}
        return (self.lost_peers | past) - {self._worker}

    def _arrival(self, members: Collection[int]) -> Arrival:
        now = time.monotonic()
        if now - self._checked_at >= _REFRESH_S:
            self._checked_at = now
            if self._published != self._status:
                self._publish()
            self._refresh()
        if self._worker in self.lost_peers:
            return Arrival.IMPOSSIBLE
        unavailable = self._unavailable() & set(members)
        if not unavailable:
            return Arrival.POSSIBLE
        never = any(map(self._stops_earlier, unavailable))
        return Arrival.IMPOSSIBLE if never else Arrival.DEPARTED

    def _stops_earlier(self, worker: int) -> bool:
        """Whether ``worker`` takes no part in this worker's average.

        It synchronizes, or has another generator, after no more steps than this worker has made.
        """
        own, status = self._status, self._statuses.get(worker)
        if status is not None and status.generation == own.generation + 1:
            steps = 0 if own.synchronizing else status.former_steps
            return (status.former_rounds, steps) <= (own.rounds, own.steps)
        if status is None or own.synchronizing or not status.synchronizing:
            return False
        return status[:2] == own[:2] and status.steps <= own.steps

    def _refresh(self) -> None:
        self._statuses = self._table.statuses()
        self._add_lost(self._table.lost())

    def _publish(self) -> None:
        self._published, self._published_at = self._status, time.monotonic()
        self._table.publish(self._worker, self._status)

    def _await_all(self) -> None:
        """Wait until all active workers synchronize; silent dead ones are lost."""
        self._publish()
        wait = WaitLog(self._me, SYNC_CALL, time.monotonic)
        # The last status of each worker, and when it was first seen.
        since: dict[int, tuple[Status | None, float]] = {}
        while True:
            self.watch()
            self._refresh()
            self._check_generation()
            if self._worker in self.lost_peers:
                return
            if self._worker not in self._statuses:
                raise PeerError(
                    isolation_text(
                        self._me,
                        "the rendezvous store is down (with rank 0, or the launcher), so peers "
                        "cannot be found",
                    )
                )
            missing = self._not_synchronizing(since)
            if not missing:
                return
            wait.check(", ".join(map(self._name, missing)), self._timeout)
            time.sleep(_SYNC_CHECK_S)

    def _not_synchronizing(self, since: dict[int, tuple[Status | None, float]]) -> list[int]:
        """Return the active workers that do not synchronize yet; mark silent dead ones as lost."""
        now, missing = time.monotonic(), []
        for worker in sorted(self._others - self.lost_peers):
            status = self._statuses.get(worker)
            if status is not None and status[:3] >= self._status[:3]:
                continue
            missing.append(worker)
            if worker not in since or since[worker][0] != status:
                since[worker] = status, now
            elif now - since[worker][1] > self._timeout:
                if self._is_running(worker):
                    since[worker] = status, now
                    continue
                self.silent.add(worker)
                self._mark_lost(worker, f"has given no sign for {self._timeout:g} s")
        return missing


# -- with the generator -------------------------------------------------------------------


class GeneratorLost(Exception):
    """The generator has died, left or is unreachable; the text states how."""


def violation(me: str, error: MalformedMessage) -> PeerError:
    """Return the error of a malformed or unexpected message of the generator."""
    return PeerError(f"{me}: the group generator violated the protocol: {error}")


class GeneratorConnection:
    """Messages to and from the generator. Not thread-safe.

    Attributes:
        received: messages that were received and not handled, oldest first.
        watch: called while it waits; may raise.
    """

    def __init__(self, mailbox: Mailbox, me: str, generator: int, timeout: float) -> None:
        self._mailbox, self._me, self._generator = mailbox, me, generator
        self._timeout, self._sent_at = timeout, 0.0
        self._detector = FailureDetector(mailbox)
        self._failed: Failed | None = None
        self.received: deque[Any] = deque()
        self.watch: Callable[[], None] = lambda: None

    @property
    def lost(self) -> bool:
        """Whether the generator has failed; permanent."""
        self._failed = self._failed or self._detector.failed().get(self._generator)
        return self._failed is not None

    def send(self, message: Any) -> None:
        """Send a message; raise GeneratorLost if the generator cannot receive it."""
        kind, ids, _ = MESSAGES.pack(message)
        try:
            self._mailbox.post(self._generator, kind, ids=ids, urgency=0)
        except PeerError as error:
            raise GeneratorLost(str(error)) from None

    def receive(self, deadline: float) -> Any:
        """Wait for the next message.

        Raises GeneratorLost if the generator is lost. Raises PeerError if the deadline has passed,
        or the message is malformed.
        """
        while not self.received:
            lost = self.lost  # read before its last messages
            self.poll(0.0 if lost else _CHECK_S)
            if self.received:
                break
            if lost and self._failed:
                raise GeneratorLost(f"it {self._failed.text}")
            if time.monotonic() >= deadline:
                raise PeerError(
                    f"{self._me}: no group came from the group generator within "
                    f"{self._timeout:g} s; check that the others still train"
                )
            self.keep_alive()
            self.watch()
        return self.received.popleft()

    def poll(self, seconds: float = 0.0) -> None:
        """Append all messages that have arrived to `received`; wait for the first of them."""
        message = self._mailbox.next(seconds) if seconds else self._mailbox.poll()
        while message is not None:
            self.received.append(self._parse(message))
            message = self._mailbox.poll()

    def _parse(self, message: Message) -> Any:
        try:
            # The generator's number is that of the workers.
            return MESSAGES.parse(message, workers=self._generator)
        except MalformedMessage as error:
            raise violation(self._me, error) from None

    def keep_alive(self) -> None:
        """Send a keepalive message if the last one is old enough."""
        now = time.monotonic()
        if now - self._sent_at >= _KEEPALIVE_S:
            self._sent_at = now
            with contextlib.suppress(GeneratorLost):
                self.send(Keepalive())


class Client:
    """Takes part in the groups that the generator makes. Not thread-safe.

    When the generator is lost, all workers continue with the static schedule from its first step,
    or with groups of all workers if the rules require these, each as soon as it detects the loss.
    Members of a group wait for those that have not detected it yet.

    A wait fails after ``timeout`` seconds without a message from the generator. The generator sends
    messages while the awaited workers live; then a wait fails after `MAX_WAIT_FACTOR` times the
    timeout. ``table`` and ``is_running`` (whether a worker's process is known to run) are used
    without a generator. ``name`` returns the name of a worker in messages.

    Meanwhile ``search`` finds the next generator, which one of the workers starts; None: there is
    none. This worker connects to it in a thread, and follows it from its next step on.
    ``generation`` is the incarnation of the generator.

    Attributes:
        mailbox: its connection to the generator, which the caller closes.
        on_generation: called with the incarnation of a generator before its first group.
        fallback: why groups are made without the generator; None if they are not.
        excluded: whether groups have continued without this worker since it last synchronized, or
            copied a peer's state.
        stale: whether it was silent for so long that it must copy a peer's state before it joins a
            group again. Until then steps end without an average.
        copies_state: whether an excluded worker always copies a peer's state before it joins a
            group again. Until then steps end without an average.
        on_lost: called with each worker that is lost.
        on_back: called with each worker that is active again.
        on_fetch: called with a worker that requests this one's state, and their connection id,
            while this worker waits for a group.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        worker: int,
        generator: int,
        layout: Layout,
        rules: Rules,
        timeout: float,
        table: StatusTable,
        is_running: Callable[[int], bool] = lambda _: False,
        name: Callable[[int], str] = "rank {}".format,
        *,
        search: GeneratorSearch | None = None,
        generation: int = 0,
    ) -> None:
        self.mailbox = mailbox
        self._connection = GeneratorConnection(mailbox, name(worker), generator, timeout)
        self._generator, self._search, self._generation = generator, search, generation
        self._renewed = 0  # the last argument of `on_generation`
        self.on_generation: Callable[[int], None] = lambda _: None
        self._worker, self._name, self._me = worker, name, name(worker)
        self._layout, self._rules, self._timeout = layout, rules, timeout
        self._table, self._is_running = table, is_running
        self._member = Member(worker, rules)
        self._synchronizes = self._joins = False
        self._requests = self._waiting_since = 0
        self._inactive: dict[int, Reason] = {}
        self._missed = False  # whether others have synchronized without this worker
        self._fetching = False
        self._unserved: list[SendState] = []  # requests that arrived while it had no state to send
        self._members: tuple[int, ...] = ()  # of the last group
        self._static: StaticClient | None = None
        self.fallback: str | None = None
        self.excluded = self.stale = self.copies_state = False
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_back: Callable[[int], None] = lambda _: None
        self.on_fetch: Callable[[int, int], None] = lambda _worker, _connection: None

    @property
    def must_fetch(self) -> bool:
        """Whether this worker must copy a peer's state before it joins a group again."""
        lags = self.stale or (self.copies_state and self.excluded)
        return lags and self.fallback is None

    @property
    def lost_peers(self) -> set[int]:
        """The workers that this worker does not know to be active."""
        return set(self._inactive) if self._static is None else self._static.lost_peers

    def set_watch(self, watch: Callable[[], None]) -> None:
        """Call a function while this client waits, which may raise."""
        self._connection.watch = watch

    def step(self, reducer: Reducer) -> None:
        """Take part in groups until the next step may begin."""
        self._take_part(reducer, synchronize=False)

    def synchronize(self, reducer: Reducer) -> None:
        """Average with all active workers, once all of them have called this.

        The others may make steps before; their groups do not wait for this worker. Lost workers are
        left out. Afterwards all have the same parameters. Raises PeerError if the mean is of this
        worker alone, and others have another model.
        """
        if not self._take_part(reducer, synchronize=True):
            return
        # Others have no other model if all have died or left, none after one without this worker.
        alive = set(self._inactive.values()) - {Reason.DIED, Reason.LEFT}
        if len(self._members) <= 1 and (self._missed or alive):
            inactive = sorted(self._inactive.items())
            names = "; ".join(f"{self._name(w)} {_REASONS[reason]}" for w, reason in inactive)
            missed = f"; the others have made theirs without {self._me}" if self._missed else ""
            raise PeerError(isolation_text(self._me, names + missed))
        self.excluded = self.stale = self._missed = False

    def leave(self, *, failed: bool = False) -> None:
        """Publish that this worker has left, if there is no generator that detects it."""
        if self._search is not None:
            self._search.stop()
        if self._static is not None:
            self._static.leave(failed=failed)

    def fetch_state(
        self, receive: Callable[[int, int, Callable[[], bool]], State | None], *, join: bool = False
    ) -> State:
        """Return the state of an active peer.

        ``receive(worker, connection, is_active)`` returns None if the worker was lost. With
        ``join`` this worker is active from now on, otherwise from its next request. Raises
        PeerError if no peer is active or has sent the state in time, or the generator is lost.
        """
        self._joins, self.excluded, self.stale, self._missed = join, False, False, False
        lost, deadline = -1, time.monotonic() + self._timeout
        self._renew()
        self._fetching = True
        try:
            while True:
                self._connection.send(FetchState(lost, join))
                sender, connection = self._await_sender(deadline)
                state = receive(sender, connection, functools.partial(self._is_active, sender))
                if state is not None:
                    with contextlib.suppress(GeneratorLost):
                        self._connection.send(Fetched())
                    return state
                lost = sender
        except GeneratorLost as error:
            raise PeerError(
                f"{self._me}: cannot find a peer to copy training state from: the group "
                f"generator is unreachable: {error}"
            ) from None
        finally:
            self._fetching = False

    def _await_sender(self, deadline: float) -> tuple[int, int]:
        while True:
            message = self._connection.receive(deadline)
            if not isinstance(message, SendState) or message.receiver != self._worker:
                self._handle_between_steps(message)
            elif message.sender == message.receiver:
                raise PeerError(
                    f"{self._me}: cannot find a peer to copy training state from: no "
                    "other worker is active: start from a checkpoint"
                )
            else:
                return message.sender, message.connection

    def _is_active(self, worker: int) -> bool:
        self._handle_received()
        return worker not in self._inactive and not self._connection.lost

    # -- messages -------------------------------------------------------------------------

    def _handle_received(self) -> None:
        self._connection.poll()
        while self._connection.received:
            self._handle_between_steps(self._connection.received.popleft())

    def _handle_between_steps(self, message: Any) -> bool:
        """Handle a message that may arrive at any time; return whether it was one."""
        match message:
            case Removed(self._worker, _, reason):
                self._note_exclusion(reason)
            case Removed(worker, _, reason, missed):
                self._missed = missed
                self._note_removed(worker, reason)
            case Added(worker):
                if self._inactive.pop(worker, None) is not None:
                    self.on_back(worker)
                    stream.happened("joined", (worker,))
            case SendState(self._worker) if self._fetching:
                self._unserved.append(message)
            case SendState(self._worker, receiver, connection):
                self.on_fetch(receiver, connection)
            case Keepalive():
                pass
            case _:
                return False
        return True

    def _note_removed(self, worker: int, reason: Reason) -> None:
        before, self._inactive[worker] = self._inactive.get(worker), reason
        if reason != Reason.LATE and before in (None, Reason.LATE):
            self.on_lost(worker)
        elif reason == Reason.LATE and before is None:
            _log.info(
                "%s: %s took too long for a step, or for an average: groups continue "
                "without it until its next step; wingbeat.synchronize() waits for it",
                self._me,
                self._name(worker),
            )
        if before is None:
            stream.happened("left", (worker,))

    def _note_exclusion(self, reason: Reason) -> None:
        """Record that groups have continued without this worker; fail if it must copy a state."""
        self.excluded = True
        self.stale |= reason == Reason.SILENT
        if self._joins:
            raise PeerError(
                f"{self._me}: groups continued without this worker before it had a peer's "
                "state; start it again, or give it more time: wingbeat.init(timeout=...)"
            )

    def _handle(self, message: Any, reducer: Reducer) -> None:
        """Handle a message while this worker waits for a group."""
        if isinstance(message, RunMessage):
            reducer.close(message.close)
            if self._member.start(message.run):
                self._run(message, reducer)
        elif isinstance(message, Refused):
            text = bytes(message.reason[:200]).decode(errors="replace")
            raise ProtocolError(f"a refusal: {text}")
        elif not self._handle_between_steps(message):
            raise ProtocolError(f"{type(message).__name__} was sent by the generator")
        elif isinstance(message, Removed) and message[:2] == (self._worker, self._requests):
            # All groups of this worker continue without it. A request makes it active again, unless
            # the generator has sent this before it had received the last request.
            self._member = Member(self._worker, self._rules)
            if self._synchronizes or not (self.copies_state or self.stale):
                self._request()

    # -- groups ---------------------------------------------------------------------------

    def _take_part(self, reducer: Reducer, *, synchronize: bool) -> bool:
        """Average with the groups of a step, or with all; return whether a generator made them."""
        newer = 0
        while not self._follow_generator(reducer, synchronize=synchronize, newer=newer):
            static = self._static
            assert static is not None, "without a generator groups follow the schedule"
            try:
                static.synchronize(reducer) if synchronize else static.step(reducer)
            except GeneratorIsBack:
                newer = self._generation + 1
                continue
            return False
        return True

    def _follow_generator(self, reducer: Reducer, *, synchronize: bool, newer: int) -> bool:
        """Request a group and average; return False without a generator and without an average.

        ``newer`` is an incarnation of the generator that others have already, or 0.
        """
        if self._static is not None and not self._return(reducer, newer):
            return False
        self._renew()
        self._synchronizes = synchronize
        try:
            self._request()
            while self._unserved:
                self.on_fetch(*self._unserved.pop(0)[1:])
            self._average_while_waiting(reducer)
        except GeneratorLost as error:
            self._fall_back(str(error), reducer)
            return not self._member.waiting
        return True

    def _request(self) -> None:
        self._member.request(synchronize=self._synchronizes)
        self._requests = (self._requests + 1) % ID_LIMIT
        self._waiting_since = time.monotonic_ns()
        stream.happened("request")
        if self._synchronizes:
            self._connection.send(Synchronize())
        else:
            self._connection.send(Request(self.copies_state))

    def _average_while_waiting(self, reducer: Reducer) -> None:
        what = SYNC_CALL if self._synchronizes else "the end of its step"
        wait = WaitLog(self._me, what, time.monotonic)
        deadline = wait.begun + self._timeout
        while self._member.waiting:
            message = self._connection.receive(deadline)
            # The others may have long steps, so each message extends the deadline.
            deadline = time.monotonic() + self._timeout
            if isinstance(message, Keepalive) and message.awaited >= 0:
                wait.check(self._name(message.awaited), self._timeout)
            try:
                self._handle(message, reducer)
            except ProtocolError as error:
                raise violation(self._me, error) from None

    def _run(self, message: RunMessage, reducer: Reducer) -> None:
        run, lost = message.run, None
        self._members = run.members
        stream.record(
            "group_wait", self._waiting_since, time.monotonic_ns(), lane=AVERAGES, group=run.members
        )
        if len(run.members) > 1:
            lost = reducer.average(run, message.connection, functools.partial(self._arrival, run))
            self._waiting_since = time.monotonic_ns()
        if lost == ABANDONED:
            if self._connection.lost:
                raise GeneratorLost("it died before it had told all members of a group")
            return  # The generator has sent that the group runs again.
        if lost is not None:
            # The group runs again without that member.
            self._connection.send(Lost(run.number, run.epoch, lost))
            return
        self._joins = False
        if self.copies_state:  # an excluded worker would not join a group
            self.excluded = False
        self._member.finish()
        self._connection.send(Done(run.number, run.epoch))

    def _arrival(self, run: Run) -> Arrival:
        self._connection.poll()
        if any(self._supersedes(message, run) for message in self._connection.received):
            return Arrival.IMPOSSIBLE
        self._connection.keep_alive()
        if not self._connection.lost:
            return Arrival.POSSIBLE
        # A worker that falls back abandons its group.
        others = set(run.members) - {self._worker}
        lasts = self._table.fallbacks(others, self._generation).values()
        return Arrival.IMPOSSIBLE if any(last < run.number for last in lasts) else Arrival.DEPARTED

    def _supersedes(self, message: Any, run: Run) -> bool:
        """Whether a message starts a new epoch of ``run``, or removes this worker."""
        if isinstance(message, RunMessage):
            return message.number == run.number and message.epoch > run.epoch
        return isinstance(message, Removed) and message[:2] == (self._worker, self._requests)

    def _fall_back(self, why: str, reducer: Reducer) -> None:
        self.fallback = why
        reducer.close()
        self._handle_received()
        self._table.mark_fallback(self._worker, self._member.last, self._generation)
        for worker, reason in self._inactive.items():
            # The other workers may not have detected the loss.
            self._table.mark_lost(worker, left=reason == Reason.LEFT)
        self._make_static(self._inactive)
        if self._search is not None:
            self._search.begin(self._generation)
        _log.warning(
            "%s: the group generator is gone (%s); groups %s %s",
            self._me,
            why,
            "contain all workers" if self._rules.whole else "follow the static schedule",
            "from now on" if self._search is None else "until a worker has started another one",
        )

    def _make_static(self, lost: Collection[int]) -> None:
        self._static = StaticClient(
            self._worker, self._layout, self._timeout, self._table,
            everyone=self._rules.whole, lost=lost, is_running=self._is_running,
            name=self._name, generation=None if self._search is None else self._generation,
        )  # fmt: skip
        self._static.on_lost, self._static.watch = self.on_lost, self._connection.watch

    def _renew(self) -> None:
        if self._renewed != self._generation:
            self._renewed = self._generation
            self.on_generation(self._generation)

    # -- the next generator ---------------------------------------------------------------

    def _return(self, reducer: Reducer, newer: int) -> bool:
        """Follow the next generator, if there is one; return whether this worker does.

        If others have it already, this worker waits for its own connection.
        """
        search, static = self._search, self._static
        if search is None or static is None:
            return False
        deadline = time.monotonic() + CONNECT_S
        found = search.take()
        while found is None and search.runs and time.monotonic() < deadline:
            started = search.number % 2 == 0 and search.number // 2 > static.newer
            if not started and search.number // 2 >= newer:
                break
            self._connection.watch()
            time.sleep(_SEARCH_S)
            found = search.take()
        if found is not None:
            self._adopt_generator(found, search.number // 2, reducer)
            return True
        if search.number % 2 and search.number // 2 > self._generation:
            # It has ended before this worker was connected; the others begin again too.
            self._generation = search.number // 2
            reducer.close()
            self._make_static(static.lost_peers)
            self._renew()
        else:
            static.newer = max(static.newer, search.number // 2, newer)
        return False

    def _adopt_generator(self, mailbox: Mailbox, generation: int, reducer: Reducer) -> None:
        static, watch, former = self._static, self._connection.watch, self.mailbox
        assert static is not None
        static.found_generator(generation)
        reducer.close()
        former.abandon()
        self.mailbox, self._generation = mailbox, generation
        self._connection = GeneratorConnection(mailbox, self._me, self._generator, self._timeout)
        self._connection.watch = watch
        self._member, self._requests = Member(self._worker, self._rules), 0
        self._inactive = dict.fromkeys(static.lost_peers - {self._worker}, Reason.DIED)
        self._unserved.clear()
        self._static, self.fallback = None, None
        _log.warning(
            "%s: another group generator was started: groups are its own again, and workers can "
            "rejoin",
            self._me,
        )
