"""The group generator's protocol (Ripples, sections 4.1 and 5): state machines and messages.

`Generator` receives requests and acknowledgements, and returns the groups that run now. `Member` is
a worker's side. Neither has a clock or does I/O. Decisions:

- *A group runs when it is the oldest group of each member, and all members have sent a request*
  (section 5.1). So models are averaged between two steps, as a Group Buffer requires. With
  ``Rules(notified=True)`` a group does not wait for requests (Fig. 8), and workers average in the
  middle of a step.
- *The lock vector is the front of all buffers.* A group holds the locks of the members whose oldest
  group it is. All other groups form the pending queue. Each member's acknowledgement releases that
  member's lock.
- *All members see one order,* in which groups were made. A group never overtakes another one with a
  common member, even one that waits for locks. So the globally oldest group is the oldest of each
  of its members and runs once these have sent requests: there is no deadlock.
- *A worker continues when the group that answers its request is done:* its oldest group with a
  Group Buffer, otherwise the one made for it. Before that it takes part in all older groups.
- *With a quorum* a group of all workers waits for the others for the grace window, and then runs
  without those that are late. They are no longer active, as if they had left. One that copies a
  state has been there, and is waited for.
- *A worker that synchronizes waits for a group of all workers,* and is in no other group until
  then, because the others may have more steps to make. Once all workers synchronize, that group is
  made; afterwards all are idle.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, NamedTuple, TypeAlias

from wingbeat.methods.model_averaging.rules import Connectivity, Rules, WorkerPool, policy_of
from wingbeat.schema import Length, MalformedMessage, Messages, Payload, Range, Word, WorkerId
from wingbeat.types import Layout


class ProtocolError(MalformedMessage):
    """A message is not allowed in the current state; the text states why."""


class Run(NamedTuple):
    """Command: average the parameters of a group now.

    Attributes:
        number: of the group, in the order in which groups are made.
        epoch: 0, plus 1 each time that a member was lost while the group ran. A member that is in
            an older epoch abandons it and runs this one. A member that has completed an epoch
            ignores later ones.
        initiator: the worker whose request the group was made for, which may not be a member.
    """

    number: int
    epoch: int
    members: tuple[int, ...]
    initiator: int


class _Group:
    """A group that is not done. ``members`` shrinks only when members are removed.

    ``missing`` counts the members that have sent no request, or have an older group. ``since`` is
    the time from which there is a quorum; None without one.
    """

    __slots__ = ("epoch", "initiator", "members", "missing", "number", "running", "since")

    def __init__(self, number: int, initiator: int, members: list[int]) -> None:
        self.number, self.initiator, self.members = number, initiator, members
        self.epoch, self.running, self.missing = 0, False, len(members)
        self.since: float | None = None

    def run(self, members: Sequence[int]) -> Run:
        return Run(self.number, self.epoch, tuple(members), self.initiator)


class Generator:
    """Decides whose parameters are averaged. Initially all workers of the layout are active."""

    def __init__(self, layout: Layout, rules: Rules | None = None, seed: int = 0) -> None:
        self.rules = rules or Rules()
        self._pool = WorkerPool(layout, self.rules, Random(seed))
        self._connectivity = Connectivity(layout.workers, self.rules.connect)
        self._policy = policy_of(self.rules)
        self._buffers: list[deque[_Group]] = [deque() for _ in range(layout.workers)]
        self._answer: list[_Group | None] = [None] * layout.workers
        self._synchronizing: dict[int, None] = {}  # disjoint from the pool
        self._late: set[int] = set()  # disjoint from both
        self._left: set[int] = set()  # never return
        self._copying: set[int] = set()  # are active, and have no state yet
        self._workers = layout.workers
        self._next_number = 0

    def __contains__(self, worker: int) -> bool:
        return worker in self._pool or worker in self._synchronizing

    def is_late(self, worker: int) -> bool:
        """Whether groups continue without ``worker``, while synchronization waits for it."""
        return worker in self._late

    def is_waiting(self, worker: int) -> bool:
        """Whether ``worker`` has sent a request whose group is not done."""
        return self._answer[worker] is not None or worker in self._synchronizing

    def waiting_for(self, worker: int) -> tuple[int, ...]:
        """Return the workers that the waiting ``worker`` waits for."""
        if worker in self._synchronizing:
            return tuple(sorted([*self._pool.active, *self._late]))
        own = self._buffers[worker]
        return tuple(w for w in own[0].members if not self.is_waiting(w)) if own else ()

    def is_running(self, worker: int) -> bool:
        """Whether ``worker`` is in a running group that it has not completed."""
        own = self._buffers[worker]
        return bool(own) and own[0].running

    def is_awaited(self, worker: int) -> bool:
        """Whether another worker waits for a request or an acknowledgement of ``worker``."""
        own = self._buffers[worker]
        if own and own[0].running:
            return len(self.unfinished(worker)) < len(own[0].members)
        if self._answer[worker] is not None:
            return False
        # The members of its oldest group may all compute, while a later group waits for it.
        return any(self.is_waiting(member) for group in own for member in group.members)

    def unfinished(self, worker: int) -> tuple[int, ...]:
        """Return the unfinished members of the group that ``worker`` runs."""
        return tuple(self._unfinished(self._buffers[worker][0])) if self.is_running(worker) else ()

    def run_together(self, worker: int, number: int, epoch: int, other: int) -> bool:
        """Whether ``worker`` and ``other`` both run this epoch of a group, and are not done."""
        own = self._buffers[worker]
        at_epoch = bool(own) and (own[0].number, own[0].epoch) == (number, epoch)
        return at_epoch and other != worker and other in self.unfinished(worker)

    def run_without(self, worker: int, number: int, epoch: int, other: int) -> list[Run]:
        """Run a group again that ``worker`` cannot complete because ``other``, which has, is lost.

        Return the group with its unfinished members; nothing if it is not so.
        """
        runs: list[Run] = []
        own = self._buffers[worker]
        if not own or (own[0].number, own[0].epoch) != (number, epoch) or not own[0].running:
            return runs
        if other in own[0].members and other not in self._unfinished(own[0]):
            self._rerun(own[0], runs)
        return runs

    def request(self, worker: int) -> list[Run]:
        """Handle the request of a worker that has ended a step; return the groups that run now."""
        self._check_free(worker, "requests a group")
        self._copying.discard(worker)
        runs: list[Run] = []
        own = self._buffers[worker]
        if not own:
            self._pool.mark_busy(worker)
        self._pool.count_request(worker)
        disconnected = self._connectivity.count_request()
        if own and self.rules.buffer:
            self._answer[worker] = own[0]
        else:
            self._answer[worker] = self._make_groups(worker, disconnected, runs)
        if not self.rules.notified:
            self._count_present(own[0], runs)
        return runs

    def synchronize(self, worker: int) -> list[Run]:
        """Handle a worker that waits for a group of all workers; return the groups that run now.

        It leaves its groups, which run without it, and is in no other group until all active
        workers synchronize. Then one group of all runs, which is acknowledged like any other.

        Raises ProtocolError if it is not active, already waits, or might be in a running group
        because of ``Rules(notified=True)``.
        """
        self._check_free(worker, "synchronizes")
        if self.rules.notified:
            raise ProtocolError(f"worker {worker} synchronizes, but may be in a running group")
        runs: list[Run] = []
        self._leave_waiting_groups(worker, runs)
        self._pool.remove(worker)
        self._connectivity.reset(len(self._pool.active))
        self._synchronizing[worker] = None
        self._run_if_all_synchronize(runs)
        self._run_complete(runs)
        return runs

    def take_late(self, now: float) -> list[int]:
        """Return the workers without which groups run now: their grace has passed.

        To be called after each event and at `due`. The caller marks them as late by `mark_late`.
        """
        if self.rules.quorum is None:
            return []
        late: dict[int, None] = {}
        for group in self._waiting_groups():
            if len(group.members) - group.missing < self._quorum:
                group.since = None
                continue
            group.since = now if group.since is None else group.since
            if now >= group.since + self.rules.grace:
                absent = (w for w in group.members if not self._is_present(w, group))
                late.update(dict.fromkeys(w for w in absent if w not in self._copying))
        return list(late)

    @property
    def due(self) -> float | None:
        """When the grace of a waiting group ends; None if none has a quorum."""
        if self.rules.quorum is None:
            return None
        since = [group.since for group in self._waiting_groups() if group.since is not None]
        return min(since) + self.rules.grace if since else None

    @property
    def _quorum(self) -> int:
        """The workers with which a group runs: no more than can come."""
        may_come = self._workers - len(self._left) - len(self._synchronizing)
        return max(1, min(self.rules.quorum or 1, may_come))

    def acknowledge(self, worker: int, number: int, epoch: int = 0) -> list[Run]:
        """Handle a worker that has completed group ``number``; return the groups that run now.

        Raises ProtocolError if this group does not run on the worker.
        """
        own = self._buffers[worker]
        if not own or own[0].number != number or not own[0].running or epoch > own[0].epoch:
            if worker not in self:
                return []  # The worker has not received its removal yet.
            raise ProtocolError(f"worker {worker} acknowledges group {number}, which does not run")
        runs: list[Run] = []
        group = own.popleft()
        if self._answer[worker] is group:
            self._answer[worker] = None
        if not own:
            self._pool.mark_idle(worker)
        elif self.rules.notified or self._answer[worker] is not None:
            self._count_present(own[0], runs)
        if epoch < group.epoch:
            # The members of the new epoch wait for this worker, which ignores it.
            self._rerun(group, runs)
        return runs

    def await_return(self, worker: int) -> None:
        """Let synchronization wait for a worker that can join again, as for one that is late."""
        if worker not in self:
            self._late.add(worker)

    def mark_late(self, worker: int) -> list[Run]:
        """Let groups continue without a live worker; return the groups that run now.

        It is active again after `add`. Until then, or until `remove`, there is no group of all
        workers: its model may differ from the others'.
        """
        if worker in self:
            self._late.add(worker)
        return self._remove(worker)

    def remove(self, worker: int, *, left: bool = False) -> list[Run]:
        """Remove a worker that has died or left; return the groups that run now.

        Its groups continue without it. Running ones start a new epoch with the members that have
        not acknowledged them. A quorum does not wait for one that has ``left``.
        """
        self._late.discard(worker)
        if left:
            self._left.add(worker)
        return self._remove(worker)

    def _remove(self, worker: int) -> list[Run]:
        runs: list[Run] = []
        running = [group for group in self._buffers[worker] if group.running]
        self._leave_waiting_groups(worker, runs)
        for group in running:
            group.members.remove(worker)
            self._rerun(group, runs)
        self._answer[worker] = None
        if worker in self._pool:
            self._pool.remove(worker)
            self._connectivity.reset(len(self._pool.active))
        self._synchronizing.pop(worker, None)
        self._copying.discard(worker)
        self._run_if_all_synchronize(runs)
        self._run_complete(runs)
        return runs

    def add(self, worker: int, *, at_once: bool = False) -> None:
        """Add a worker (again). It is idle, and counts as one of the fastest.

        With ``at_once`` it joins the groups of all workers that were made and do not run yet, which
        wait for it, because it copies a state; otherwise the next one. Raises ProtocolError if the
        worker is active.
        """
        if worker in self:
            raise ProtocolError(f"worker {worker} joins, but is active")
        waiting = self._waiting_groups()
        self._late.discard(worker)
        self._left.discard(worker)
        if at_once:
            self._copying.add(worker)
        self._pool.add(worker)
        self._connectivity.reset(len(self._pool.active))
        for group in waiting if at_once and self.rules.whole else ():
            group.members.append(worker)
            group.missing += 1
            self._buffers[worker].append(group)
            self._pool.mark_busy(worker)

    def _waiting_groups(self) -> list[_Group]:
        """Return the groups that do not run, oldest first."""
        found = {group.number: group for own in self._buffers for group in own if not group.running}
        return [found[number] for number in sorted(found)]

    def _is_present(self, worker: int, group: _Group) -> bool:
        return self._answer[worker] is not None and self._buffers[worker][0] is group

    def _new_group(self, initiator: int, members: list[int]) -> _Group:
        self._next_number += 1
        return _Group(self._next_number - 1, initiator, members)

    def _check_free(self, worker: int, action: str) -> None:
        if worker not in self:
            raise ProtocolError(f"worker {worker} {action}, but is not active")
        if self.is_waiting(worker):
            raise ProtocolError(f"worker {worker} {action}, but already waits for a group")

    def _unfinished(self, group: _Group) -> list[int]:
        buffers = self._buffers
        return [w for w in group.members if buffers[w] and buffers[w][0] is group]

    def _leave_waiting_groups(self, worker: int, runs: list[Run]) -> None:
        own = self._buffers[worker]
        present = self.rules.notified or self._answer[worker] is not None
        for place, group in enumerate(own):
            if group.running:
                continue
            group.members.remove(worker)
            if place or not present:
                self._count_present(group, runs)
        own.clear()

    def _run_if_all_synchronize(self, runs: list[Run]) -> None:
        if self._pool.active or self._late or not self._synchronizing:
            return
        members = list(self._synchronizing)
        self._synchronizing.clear()
        group = self._new_group(members[0], members)
        for member in members:
            self._pool.add(member)
            self._pool.mark_busy(member)
            self._buffers[member].append(group)
            self._answer[member] = group
        group.missing = 0
        self._run(group, runs)
        self._connectivity.reset(len(members))

    def _make_groups(self, initiator: int, disconnected: bool, runs: list[Run]) -> _Group:
        """Make groups; return the first of ``initiator``, which ``disconnected`` extends."""
        buffers, own = self._buffers, None
        for members in self._policy(initiator, self._pool):
            if disconnected and initiator in members:
                disconnected = False
                other = self._connectivity.find_unconnected(initiator, self._pool)
                if other is not None and other not in members:
                    self._pool.mark_busy(other)
                    members.append(other)
            self._connectivity.add_group(members, len(self._pool.active))
            group = self._new_group(initiator, members)
            for member in members:
                buffers[member].append(group)
            if own is None and initiator in members:
                own = group
            if self.rules.notified:
                for member in tuple(members):
                    if buffers[member][0] is group:
                        self._count_present(group, runs)
        assert own is not None, "a policy makes a group with the initiator"
        return own

    def _count_present(self, group: _Group, runs: list[Run]) -> None:
        """Decrement the missing members; run the group if none is missing."""
        group.missing -= 1
        if not group.missing and group.members and len(group.members) >= self._quorum:
            self._run(group, runs)

    def _run(self, group: _Group, runs: list[Run]) -> None:
        group.running = True
        runs.append(group.run(group.members))

    def _run_complete(self, runs: list[Run]) -> None:
        """Run groups that have waited for a quorum which fewer workers are now."""
        for group in self._waiting_groups() if self.rules.quorum is not None else ():
            if not group.missing and len(group.members) >= self._quorum:
                self._run(group, runs)

    def _rerun(self, group: _Group, runs: list[Run]) -> None:
        left = self._unfinished(group)
        if not left:
            return
        group.epoch += 1
        if len(left) == len(group.members) < self._quorum:
            group.running = False  # until others join: none of its members has an average
            return
        runs.append(group.run(left))


class Member:
    """A worker's view of its groups.

    Attributes:
        waiting: whether it has sent a request whose group is not done.
        running: the group that it averages with.
        last: the number of the last group that it has completed; -1 before the first.
    """

    def __init__(self, worker: int, rules: Rules) -> None:
        self._worker, self._buffer = worker, rules.buffer
        self.waiting = self._synchronizes = False
        self.running: Run | None = None
        self.last = -1

    def request(self, *, synchronize: bool = False) -> None:
        """Record a request for a group; with ``synchronize``, for a group of all workers."""
        assert not self.waiting, "a worker sends one request per step"
        self.waiting, self._synchronizes = True, synchronize

    def start(self, run: Run) -> bool:
        """Return whether to execute ``run``, abandoning the running group.

        It is ignored if this worker has completed the group: a member was lost before others had
        completed it, and they run it again without this worker. Raises ProtocolError if the
        generator may not send this to this worker now.
        """
        now = self.running
        if self._worker not in run.members:
            raise ProtocolError(f"group {run.number} does not contain worker {self._worker}")
        if run.number <= self.last:
            return False
        if now is not None and (run.number != now.number or run.epoch <= now.epoch):
            raise ProtocolError(f"group {run.number} starts while group {now.number} runs")
        self.running = run
        return True

    def finish(self) -> Run:
        """Return the completed group, to be acknowledged, and update `waiting`."""
        run = self.running
        assert run is not None, "nothing runs"
        self.running, self.last = None, run.number
        # With a Group Buffer the worker's oldest group answers a request, otherwise the one made
        # for it. A worker that synchronizes is in one group only.
        if self._buffer or self._synchronizes or run.initiator == self._worker:
            self.waiting = self._synchronizes = False
        return run


# -- messages -----------------------------------------------------------------------------

ID_LIMIT = 1 << 32
"""Upper bound of a `Word`, exclusive."""

WorkerOrNone: TypeAlias = Annotated[int, Range(-1, "workers")]


class Request(NamedTuple):
    """Worker: a step has ended. An excluded worker becomes active again.

    Attributes:
        copies_state: an excluded worker gets `Removed`, and copies a peer's state first.
    """

    copies_state: bool = False


class Done(NamedTuple):
    """Worker: its parameters are the group's average.

    Attributes:
        number: of the group.
        epoch: of the group, see `Run`.
    """

    number: Word
    epoch: Word


class Lost(NamedTuple):
    """Worker: a member was lost while the group ran.

    Attributes:
        number: of the group.
        epoch: of the group.
        member: the lost one.
    """

    number: Word
    epoch: Word
    member: WorkerId


class Synchronize(NamedTuple):
    """Worker: it waits for a group of all workers. Counts as a request."""


class Keepalive(NamedTuple):
    """Both: is not delivered if the receiver is dead.

    Attributes:
        awaited: a live worker that the receiver waits for; -1 if there is none.
    """

    awaited: WorkerOrNone = -1


@dataclass(frozen=True, slots=True)
class RunMessage:
    """Generator: average with the members of a group.

    Attributes:
        number: of the group.
        epoch: of the group.
        initiator: the worker whose request the group was made for.
        connection: the id of the group's connections, see `ConnectionCache`.
        members: the workers of the group.
        close: ids of connections to close first.
    """

    number: Word
    epoch: Word
    initiator: WorkerId
    connection: Word
    members: Annotated[tuple[WorkerId, ...], Length(least=1)]
    close: tuple[Word, ...] = ()

    def __post_init__(self) -> None:
        """Raise MalformedMessage if a member is listed twice."""
        if len(set(self.members)) < len(self.members):
            raise MalformedMessage(f"members is {self.members!r:.60}; allowed: each once")

    @property
    def run(self) -> Run:
        """The group."""
        return Run(self.number, self.epoch, self.members, self.initiator)


class Reason(enum.IntEnum):
    """Why a worker is not active."""

    LATE = 0
    """The worker lives, but its step, or an average with it, took too long. Synchronization waits.
    """
    SILENT = 1
    """The worker sent no message for long: it was stopped, or the network failed. Its model is old,
    so it copies a peer's state before it joins a group again.
    """
    DIED = 2
    """Its connections closed without a shutdown message."""
    LEFT = 3
    """It has shut down gracefully."""
    FINISHED = 4
    """It has shut down gracefully after a synchronization that no remaining worker has completed:
    their models differ from its own.
    """


class Removed(NamedTuple):
    """Generator: a worker is no longer active.

    Attributes:
        worker: that worker.
        requests: the number of requests that it has sent, which shows whether it has sent another
            one since; modulo `ID_LIMIT`.
        reason: why.
        missed: whether others have synchronized without the receiver.
    """

    worker: WorkerId
    requests: Word
    reason: Reason
    missed: bool


class Added(NamedTuple):
    """Generator: a worker is active again.

    Attributes:
        worker: that worker.
    """

    worker: WorkerId


class Refused(NamedTuple):
    """Generator: the receiver has violated the protocol. No message follows.

    Attributes:
        reason: how, in UTF-8.
    """

    reason: Payload


class FetchState(NamedTuple):
    """Worker: requests a peer's state.

    Attributes:
        lost: the peer that was lost before it had sent its state; -1 if none was.
        join: whether the sender is active from now on.
    """

    lost: WorkerOrNone
    join: bool


class Fetched(NamedTuple):
    """Worker: has the state that it requested."""


class SendState(NamedTuple):
    """Generator, to both workers: one sends its state to the other.

    Attributes:
        sender: of the state; the receiver itself if no worker has a state to send.
        receiver: of the state.
        connection: the id of their connections.
    """

    sender: WorkerId
    receiver: WorkerId
    connection: Word


MESSAGES = Messages(
    {
        1: Request, 2: Done, 3: Lost, 4: Synchronize, 5: Keepalive, 6: RunMessage, 7: Removed,
        8: Added, 9: Refused, 10: FetchState, 11: SendState, 12: Fetched,
    }
)  # fmt: skip
