"""Groups without a generator: the static schedule (Ripples, section 4.2), or all workers.

Figs. 9 and 10 have 4 hosts of 4 workers. Their rules, generalized to L workers per host:

===== ================================ ============================== =========================
phase local worker 0                   local worker 1                 the others
===== ================================ ============================== =========================
0     with local workers 0 everywhere  alone                          with one another
1     with its whole host              with its whole host            with their whole host
2     with local workers 3, 4, ...     with the one of another host   2 alone, 3... with 0
3     with its whole host              with its whole host            with their whole host
===== ================================ ============================== =========================

In phase 2, the last worker of a host with three acts as local worker 3, and the only worker of a
host as local worker 1. The other host is the *opposite on the ring*, half the number of hosts
ahead. With an odd number of hosts one has no opposite, a different one in each cycle.

The schedule needs no messages, and groups of one step never overlap. But the groups depend on the
step, which the convergence proof of AD-PSGD, the paper's third condition, does not allow (section
4.3), and one slow worker delays all.
"""

from __future__ import annotations

import enum
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.rendezvous import Status, StatusTable
from wingbeat.methods.model_averaging.rules import Layout
from wingbeat.observe.events import stream
from wingbeat.transport.failures import MAX_WAIT_FACTOR, WaitLog, stuck_peer_text

_log = logging.getLogger(__name__)

PHASES = 4
"""Steps after which the schedule repeats, with an even number of hosts."""

NO_INITIATOR = -1
"""The initiator of groups that no worker has requested. Their numbers grow with the step."""

ABANDONED = -1
"""Result of an abandoned average: members are missing and will not arrive."""

STATIC_CONNECTIONS = 1 << 31
"""The first connection id of groups without a generator; the generator's ids start at 1."""

SYNC_CALL = "the call of wingbeat.synchronize()"

_CHECK_S = 0.5
"""Interval between checks of the status table while members are awaited, in seconds."""

_SYNC_CHECK_S = 0.05
"""Interval between checks of the status table during synchronization, in seconds."""

_PUBLISH_S = 1.0
"""Interval in which a worker publishes its status, in seconds."""

_NO_STORE = "the rendezvous store is down (with rank 0, or the launcher), so peers cannot be found"


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


def group_of(layout: Layout, worker: int, step: int) -> tuple[int, ...]:
    """Return the group of ``worker`` in a step, in ascending order: ``(worker,)`` if it is alone.

    >>> group_of(Layout.even(hosts=4, workers=4), worker=5, step=2)
    (5, 13)
    """
    host = layout.host_of[worker]
    local = layout.hosts[host]
    match step % PHASES:
        case 0:
            return _phase_0(layout, local, worker)
        case 2:
            return _phase_2(layout, host, worker, step // PHASES)
    return local


def _phase_0(layout: Layout, local: tuple[int, ...], worker: int) -> tuple[int, ...]:
    if worker == local[0]:
        return tuple(sorted(workers[0] for workers in layout.hosts))
    return (worker,) if worker == local[1] else local[2:]


def _phase_2(layout: Layout, host: int, worker: int, cycle: int) -> tuple[int, ...]:
    local = layout.hosts[host]
    if worker == _outgoing(local):
        other = _opposite(host, len(layout.hosts), cycle)
        return tuple(sorted({worker, _outgoing(layout.hosts[other])}))
    staying = local[:1] + (local[3:] or local[2:])
    return staying if worker in staying else (worker,)


def _outgoing(local: tuple[int, ...]) -> int:
    """Return the worker of a host that averages with the opposite host."""
    return local[1] if len(local) > 1 else local[0]


def _opposite(host: int, hosts: int, cycle: int) -> int:
    """Return the host half a ring away; the host itself if it has none in this cycle."""
    half = hosts // 2
    # With an odd number of hosts, half a ring forth and back leads to another host. So pairs start
    # at another host in each cycle, and the last host is left over.
    first = cycle % hosts if hosts % 2 else 0
    place = (host - first) % hosts
    if place >= 2 * half:
        return host
    return (first + (place + half) % (2 * half)) % hosts


def isolation_text(worker: int, others: str) -> str:
    """Return the error of a synchronization of one worker alone; ``others`` states why."""
    return (
        f"rank {worker}: no other worker takes part in the mean of all models: {others}; this "
        "rank's weights are its own alone: start the job again from a checkpoint, or save them "
        "with model.state_dict() if the others' are not needed"
    )


class StaticClient:
    """Averages with the groups of a schedule known to all workers. Not thread-safe.

    Lost workers are left out. Workers learn of losses from the status table. It also shows which
    workers synchronize, and so make no step, and which are past a step that others could not
    complete; groups run without both.

    A worker is lost after ``timeout`` seconds without a status change, or if it is in ``lost``.
    With ``everyone`` all workers are one group in each step, instead of the static schedule.
    ``is_running`` returns whether the process of a silent worker is known to run.

    Attributes:
        fallback: None; there is no generator that could be lost.
        lost_peers: the workers that this worker knows to be lost or to have left.
        silent: those of them that were silent while all others synchronized.
        on_lost: called with each worker that is lost.
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
    ) -> None:
        self._worker, self._layout, self._timeout = worker, layout, timeout
        self._table, self._everyone, self._is_running = table, everyone, is_running
        self._status, self._published = Status(), Status()
        self._published_at = self._checked_at = time.monotonic()
        self._statuses: dict[int, Status] = {}
        self._connections: dict[tuple[int, ...], int] = {}  # by members: their first group's number
        self.fallback: str | None = None
        self.lost_peers = set(lost)
        self.silent: set[int] = set()
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
        known = [s.steps for worker, s in self._statuses.items() if worker not in self.lost_peers]
        last = max(self.steps, *known, 0)
        self._average(range(self._layout.workers), reducer, 2 * last + 1, keep=False)
        reducer.close()
        self._connections.clear()
        self._status = Status(self._status.rounds + 1, False, last + 1, self._status.failed)
        self._publish()
        if self._is_isolated():
            others = set(range(self._layout.workers)) - {self._worker}
            silent = f"gave no sign for {self._timeout:g} s"
            names = "; ".join(
                f"rank {each} {silent if each in self.silent else 'was lost or has left'}"
                for each in sorted(others)
            )
            if self._worker in self.lost_peers:
                names = f"the others have gone on without rank {self._worker}"
            raise PeerError(isolation_text(self._worker, names))

    def _is_isolated(self) -> bool:
        """Whether the mean just made is of this worker alone, while others have another model."""
        if self._worker in self.lost_peers:
            return True
        others = set(range(self._layout.workers)) - {self._worker}
        if not others or not others <= self.lost_peers:
            return False
        if not all(map(self._table.has_left, others)):
            return True
        # A worker that left after a synchronization without this one has another model.
        rounds = self._status.rounds
        return any(self._statuses.get(w, Status()).rounds >= rounds for w in others)

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
                "rank %d: the others go on without this worker, which they could not reach; "
                "it trains alone: start the job again from a checkpoint to have it take part",
                self._worker,
            )
            return False
        if self._unavailable() & set(members):
            return True
        others = (self._statuses.get(w, Status()) for w in members if w != self._worker)
        if first < number and any(status.failed >= first for status in others):
            return True  # A member has closed the kept connections, and opens new ones.
        if lost in (ABANDONED, self._worker):
            return False
        self._mark_lost(lost, "was lost in an average")
        return True

    def _mark_lost(self, worker: int, why: str) -> None:
        _log.warning("rank %d: rank %d %s; groups go on without it", self._worker, worker, why)
        self._add_lost({worker})
        self._table.mark_lost(worker)

    def _add_lost(self, workers: Collection[int]) -> None:
        for worker in sorted(set(workers) - self.lost_peers):
            self.lost_peers.add(worker)
            self.on_lost(worker)
            stream.happened("left", (worker,))

    def _unavailable(self) -> set[int]:
        """Return the workers that do not take part in this worker's current or next group."""
        own = self._status
        if own.synchronizing:  # the numbers of steps may differ then
            past = {w for w, status in self._statuses.items() if status.rounds > own.rounds}
        else:
            past = {w for w, status in self._statuses.items() if status[:3] > own[:3]}
        return (self.lost_peers | past) - {self._worker}

    def _arrival(self, members: Collection[int]) -> Arrival:
        now = time.monotonic()
        if now - self._checked_at >= _CHECK_S:
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
        """Whether ``worker`` synchronizes, after no more steps than this worker has made."""
        own, status = self._status, self._statuses.get(worker)
        if status is None or own.synchronizing or not status.synchronizing:
            return False
        return status.rounds == own.rounds and status.steps <= own.steps

    def _refresh(self) -> None:
        self._statuses = self._table.statuses()
        self._add_lost(self._table.lost())

    def _publish(self) -> None:
        self._published, self._published_at = self._status, time.monotonic()
        self._table.publish(self._worker, self._status)

    def _await_all(self) -> None:
        """Wait until all active workers synchronize; silent dead ones are lost."""
        self._publish()
        wait = WaitLog(f"rank {self._worker}", SYNC_CALL, time.monotonic)
        since: dict[int, tuple[Status | None, float]] = {}
        while True:
            self._refresh()
            if self._worker in self.lost_peers:
                return
            if self._worker not in self._statuses:
                raise PeerError(isolation_text(self._worker, _NO_STORE))
            missing = self._not_synchronizing(since)
            if not missing:
                return
            peers = ", ".join(f"rank {worker}" for worker in missing)
            wait.log_if_due(peers)
            if wait.seconds() > MAX_WAIT_FACTOR * self._timeout:
                me = f"rank {self._worker}"
                raise PeerError(stuck_peer_text(me, peers, SYNC_CALL, self._timeout))
            time.sleep(_SYNC_CHECK_S)

    def _not_synchronizing(self, since: dict[int, tuple[Status | None, float]]) -> list[int]:
        """Return the active workers that do not synchronize yet; mark silent dead ones as lost.

        ``since`` has the last status of each worker, and when it was first seen.
        """
        now, missing = time.monotonic(), []
        for worker in sorted(set(range(self._layout.workers)) - self.lost_peers - {self._worker}):
            status = self._statuses.get(worker)
            if status is not None and status[:2] >= self._status[:2]:
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
