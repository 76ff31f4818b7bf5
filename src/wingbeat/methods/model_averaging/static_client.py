"""A worker's client of the static schedule, without a group generator.

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
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, NamedTuple, Protocol, TypeAlias

from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.rules import PHASES, group_of
from wingbeat.observe.events import stream
from wingbeat.schema import MalformedMessage, Range, parse_json
from wingbeat.transport.failures import WaitLog
from wingbeat.transport.membership import MembershipClient, members
from wingbeat.transport.store import AtomicStore, Store, again_text
from wingbeat.types import Layout

_log = logging.getLogger(__name__)

NO_INITIATOR = -1
"""The initiator of groups that no worker has requested. Their numbers grow with the step."""

ABANDONED = -1
"""Result of an abandoned average: members are missing and will not arrive."""

STATIC_CONNECTIONS = 1 << 31
"""The first connection id of groups without a generator; the generator's ids start at 1."""

SYNC_CALL = "the call of wingbeat.synchronize()"

_READ_S = 5.0  # timeout of a read of an existing key, in seconds
_REFRESH_S = 0.5  # between checks of the status table while members are awaited
_SYNC_CHECK_S = 0.05  # between checks of the status table during synchronization
_PUBLISH_S = 1.0  # between two publications of a worker's status


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
        excluded, must_fetch, stale, copies_state: False; see `Client`.
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
        self.excluded = self.must_fetch = self.stale = self.copies_state = False
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

    def has_missed(self) -> bool:
        """Whether other workers have synchronized without this one since the generator was lost."""
        self._refresh()
        own = self._status
        others = [status for worker, status in self._statuses.items() if worker != self._worker]
        return any(
            (each.rounds if each.generation == own.generation else each.former_rounds) > own.rounds
            for each in others
            if own.generation <= each.generation <= own.generation + 1
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
                    f"{self._me}: the rendezvous store does not answer, so the others cannot be "
                    f"found for the mean of all models: {again_text('wingbeat.synchronize()')}"
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
