"""The group generator (Ripples, sections 4.1 and 5): a state machine without torch, clock or I/O.

It is told what workers say, and answers which groups run now. Decisions:

- *A group runs when it is the oldest of each member's groups, and all members have asked* (section
  5.1). So models are averaged at rest, between two steps, and a Group Buffer makes sense. With
  ``Rules(notified=True)`` it does not wait for requests (Fig. 8): workers then take part in the
  middle of a step.
- *The lock vector is the front of all buffers.* A group has the locks of those members whose oldest
  group it is; the pending queue is all others. Each member's lock is released by its own
  acknowledgement.
- *Members see one order:* that in which groups were made. No group overtakes another that it
  shares a worker with, even one that waits for locks. The oldest group of all is the oldest of each
  of its members, so it runs once these have asked, and there is no deadlock.
- *A worker that has asked goes on when the group that answers it is done:* its oldest group with a
  Group Buffer, otherwise the one that was made for it, and until then takes part in all older ones.
- *Who levels waits for one group of all,* and is in no other until then: the others may have more
  steps to make. Once all level, that group is made, and after it all are idle.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from wingbeat.methods.model_averaging.policies import Connection, Crowd, of_rules
from wingbeat.methods.model_averaging.rules import Layout, Rules


class Unexpected(Exception):
    """No worker that follows the rules says this now; says what is wrong with it."""


class Run(NamedTuple):
    """Average the parameters of these workers now.

    Attributes:
        number: of the group, in the order in which groups are made.
        epoch: 0; 1 more each time that a member was lost while the group ran. Whoever is still
            in an epoch before gives that up and runs this one; whoever is done with one stays out.
        members: in no order.
        initiator: the worker whose request the group was made for, who may not be a member.
    """

    number: int
    epoch: int
    members: tuple[int, ...]
    initiator: int


class _Group:
    """A group that is not done. Members leave ``members`` when they are gone, not when done."""

    __slots__ = ("epoch", "initiator", "members", "missing", "number", "running")

    def __init__(self, number: int, initiator: int, members: list[int]) -> None:
        self.number, self.initiator, self.members = number, initiator, members
        self.epoch, self.running = 0, False
        self.missing = len(members)
        """Members that have not asked, or have an older group."""


class Generator:
    """Answers with whom each worker averages its parameters.

    To begin with, all workers of the layout take part.

    Args:
        layout: which worker is on which host.
        rules: the options.
        seed: of all random choices.
    """

    def __init__(self, layout: Layout, rules: Rules | None = None, seed: int = 0) -> None:
        self.rules = rules or Rules()
        self._crowd = Crowd(layout, self.rules, Random(seed))
        self._connection = Connection(layout.workers, self.rules.connect)
        self._policy = of_rules(self.rules)
        self._of: list[deque[_Group]] = [deque() for _ in range(layout.workers)]
        self._target: list[_Group | None] = [None] * layout.workers
        self._levelling: dict[int, None] = {}  # none of them is in the crowd
        self._late: set[int] = set()  # nor of these
        self._made = 0

    def __contains__(self, worker: int) -> bool:
        """Whether ``worker`` takes part."""
        return worker in self._crowd or worker in self._levelling

    @property
    def levelling(self) -> tuple[int, ...]:
        """Workers that level, and wait for others to do so."""
        return tuple(self._levelling)

    def is_late(self, worker: int) -> bool:
        """Whether groups go on without ``worker``, and those who level wait for it."""
        return worker in self._late

    def missing(self, worker: int) -> tuple[int, ...]:
        """Return for whom ``worker`` waits, which has asked or levels."""
        if worker in self._levelling:
            return tuple(sorted([*self._crowd.here, *self._late]))
        own = self._of[worker]
        return tuple(w for w in own[0].members if not self.waits(w)) if own else ()

    def request(self, worker: int) -> list[Run]:
        """Return the groups that run now that ``worker`` has ended a step and asks.

        Raises:
            Unexpected: it takes no part, or waits already.
        """
        self._check_free(worker, "asks for a group")
        runs: list[Run] = []
        own = self._of[worker]
        crowd = self._crowd
        if not own:
            crowd.busy(worker)
        crowd.count(worker)
        apart = self._connection.asked()
        if own and self.rules.buffer:
            self._target[worker] = own[0]
        else:
            self._target[worker] = self._make(worker, apart, runs)
        if not self.rules.notified:
            self._present(own[0], runs)
        return runs

    def level(self, worker: int) -> list[Run]:
        """Return the groups that run now that ``worker`` waits for an average over all.

        It leaves its groups, which go on without it, and is in no other until all that take part
        level. Then one group of all runs; that it is done acknowledges it like any other.

        Raises:
            Unexpected: it takes no part, or waits already; or with ``Rules(notified=True)``, where
                it might be in a group that runs.
        """
        self._check_free(worker, "levels")
        if self.rules.notified:
            raise Unexpected(f"worker {worker} levels, though it may be in a group that runs")
        runs: list[Run] = []
        self._withdraw(worker, runs)
        self._crowd.leave(worker)
        self._connection.begin(len(self._crowd.here))
        self._levelling[worker] = None
        self._level_all(runs)
        return runs

    def acknowledge(self, worker: int, number: int, epoch: int = 0) -> list[Run]:
        """Return the groups that run now that ``worker`` is done with group ``number``.

        Args:
            worker: whose parameters are the group's average.
            number: of the group.
            epoch: in which the worker ran it.

        Raises:
            Unexpected: this group does not run there.
        """
        own = self._of[worker]
        if not own or own[0].number != number or not own[0].running or epoch > own[0].epoch:
            if worker not in self:
                return []  # It said so before it heard that it is gone.
            raise Unexpected(f"worker {worker} is done with group {number}, which does not run")
        runs: list[Run] = []
        group = own[0]
        self._done(worker, runs)
        if epoch < group.epoch:
            # The others run an epoch that counts on this worker, who will not come.
            self._rerun(group, runs)
        return runs

    def late(self, worker: int) -> list[Run]:
        """Return the groups that run now that they wait for ``worker`` no more, which lives.

        It takes part again when it has `joined`. Until then, or until it is `gone`, there is no
        group of all: it may have a model of its own.
        """
        if worker in self:
            self._late.add(worker)
        return self._without(worker)

    def gone(self, worker: int) -> list[Run]:
        """Return the groups that run now that ``worker`` has died, or has left.

        Its groups go on without it; those that run begin anew, in the next epoch, with the members
        that have not acknowledged them.
        """
        self._late.discard(worker)
        return self._without(worker)

    def _without(self, worker: int) -> list[Run]:
        runs: list[Run] = []
        if worker not in self:
            self._level_all(runs)
            return runs
        again = [group for group in self._of[worker] if group.running]
        self._withdraw(worker, runs)
        for group in again:
            group.members.remove(worker)
            self._rerun(group, runs)
        self._target[worker] = None
        if worker in self._crowd:
            self._crowd.leave(worker)
            self._connection.begin(len(self._crowd.here))
        self._levelling.pop(worker, None)
        self._level_all(runs)
        return runs

    def joined(self, worker: int, *, at_once: bool = False) -> None:
        """Let ``worker`` take part (again); it is idle, and counts as one of the fastest.

        Args:
            worker: which.
            at_once: whether it is in the groups of all that were made and do not run yet, and not
                from the next one on.

        Raises:
            Unexpected: it takes part.
        """
        if worker in self:
            raise Unexpected(f"worker {worker} joins and takes part already")
        waiting = {group.number: group for own in self._of for group in own if not group.running}
        self._late.discard(worker)
        self._crowd.enter(worker)
        self._connection.begin(len(self._crowd.here))
        for _, group in sorted(waiting.items() if at_once and self.rules.whole else ()):
            group.members.append(worker)
            group.missing += 1
            self._of[worker].append(group)
            self._crowd.busy(worker)

    def waits(self, worker: int) -> bool:
        """Whether ``worker`` has asked, and the group that answers it is not done there."""
        return self._target[worker] is not None or worker in self._levelling

    def runs(self, worker: int, number: int, epoch: int, other: int) -> bool:
        """Whether ``worker`` and ``other`` run this epoch of a group, and neither is done."""
        own = self._of[worker][0] if self._of[worker] else None
        return (
            own is not None
            and own.running
            and (own.number, own.epoch) == (number, epoch)
            and 0 <= other < len(self._of)
            and other != worker
            and bool(self._of[other])
            and self._of[other][0] is own
        )

    def unfinished(self, worker: int) -> tuple[int, ...]:
        """Return the members of the group that ``worker`` runs, itself too, that are not done."""
        own = self._of[worker]
        if not own or not own[0].running:
            return ()
        return tuple(w for w in own[0].members if self._of[w] and self._of[w][0] is own[0])

    def awaited(self, worker: int) -> bool:
        """Whether somebody waits for ``worker``: to ask, or to be done as others of a group are."""
        own = self._of[worker]
        if not own:
            return False
        if own[0].running:
            return len(self.unfinished(worker)) < len(own[0].members)
        if self._target[worker] is not None:
            return False
        # In any of its groups: the first may be of workers that all compute, and hold up the next.
        return any(self.waits(member) for group in own for member in group.members)

    def _check_free(self, worker: int, does: str) -> None:
        if worker not in self:
            raise Unexpected(f"worker {worker} {does} and takes no part")
        if self.waits(worker):
            raise Unexpected(f"worker {worker} {does} and waits for a group already")

    def _withdraw(self, worker: int, runs: list[Run]) -> None:
        """Take ``worker`` out of its groups that do not run; they go on without it."""
        own = self._of[worker]
        at_hand = self.rules.notified or self._target[worker] is not None
        for place, group in enumerate(own):
            if group.running:
                continue
            group.members.remove(worker)
            if place or not at_hand:
                self._present(group, runs)
        own.clear()

    def _level_all(self, runs: list[Run]) -> None:
        """Make a group of all if all level."""
        if self._crowd.here or self._late or not self._levelling:
            return
        members, crowd = list(self._levelling), self._crowd
        self._levelling.clear()
        group = _Group(self._made, members[0], members)
        self._made += 1
        for member in members:
            crowd.enter(member)
            crowd.busy(member)
            self._of[member].append(group)
            self._target[member] = group
            self._present(group, runs)
        self._connection.begin(len(members))

    def _make(self, initiator: int, apart: bool, runs: list[Run]) -> _Group:
        """Make groups, and return the first that ``initiator`` is in.

        Args:
            initiator: for whom.
            apart: whether it is to meet somebody whom it has not met for long.
        """
        of, own = self._of, None
        for members in self._policy(initiator, self._crowd):
            if apart and initiator in members:
                apart = False
                self._bridge(initiator, members)
            self._connection.join(members, len(self._crowd.here))
            group = _Group(self._made, initiator, members)
            self._made += 1
            for member in members:
                of[member].append(group)
            if own is None and initiator in members:
                own = group
            if self.rules.notified:
                for member in tuple(members):
                    if of[member][0] is group:
                        self._present(group, runs)
        assert own is not None, "a policy makes a group with the initiator"
        return own

    def _bridge(self, initiator: int, members: list[int]) -> None:
        """Add a worker of another part to a group, though it is in groups already."""
        other = self._connection.other(initiator, self._crowd)
        if other is not None and other not in members:
            self._crowd.busy(other)
            members.append(other)

    def _done(self, worker: int, runs: list[Run]) -> None:
        """Take its oldest group from a worker, whose next one may now run."""
        own = self._of[worker]
        if self._target[worker] is own.popleft():
            self._target[worker] = None
        if not own:
            self._crowd.rest(worker)
        elif self.rules.notified or self._target[worker] is not None:
            self._present(own[0], runs)

    def _present(self, group: _Group, runs: list[Run]) -> None:
        """Count one that is not missing any more in ``group``."""
        group.missing -= 1
        if not group.missing and group.members:
            group.running = True
            runs.append(Run(group.number, 0, tuple(group.members), group.initiator))

    def _rerun(self, group: _Group, runs: list[Run]) -> None:
        """Run the rest of a group that had already begun."""
        left = [w for w in group.members if self._of[w] and self._of[w][0] is group]
        if left:
            group.epoch += 1
            runs.append(Run(group.number, group.epoch, tuple(left), group.initiator))


class Member:
    """What a worker knows of its groups.

    Args:
        worker: its number.
        rules: the generator's.

    Attributes:
        waiting: whether it has asked, and the group that answers it is not done.
        running: the group that it takes part in now.
        last: the number of the last group that it was through with; -1 before the first.
    """

    def __init__(self, worker: int, rules: Rules) -> None:
        self._worker, self._buffer = worker, rules.buffer
        self._levelling = False
        self.waiting = False
        self.running: Run | None = None
        self.last = -1

    def ask(self, level: bool = False) -> None:
        """Note that it asks; with ``level`` for a group of all, before which it is in no other."""
        assert not self.waiting, "a worker asks once a step"
        self.waiting, self._levelling = True, level

    def hear(self, run: Run) -> bool:
        """Whether to run what the generator says, giving up what runs.

        It is not if this worker is done with the group already: then others were not, when one of
        them died, and they run it again among themselves.

        Raises:
            Unexpected: the generator does not say so to this worker now.
        """
        now = self.running
        if self._worker not in run.members:
            raise Unexpected(f"group {run.number} is without worker {self._worker}, who is told")
        if run.number <= self.last:
            return False
        if now is not None and (run.number != now.number or run.epoch <= now.epoch):
            raise Unexpected(f"group {run.number} is to run while group {now.number} does")
        self.running = run
        return True

    def done(self) -> Run:
        """Return what ran, to be acknowledged; `waiting` says whether the worker may go on."""
        run = self.running
        assert run is not None, "nothing runs"
        self.running, self.last = None, run.number
        # With a Group Buffer each request is answered by the worker's oldest group, otherwise by
        # the one that was made for it. Who levels is in one group only.
        if self._buffer or self._levelling or run.initiator == self._worker:
            self.waiting = self._levelling = False
        return run


WRAPS = 1 << 32
"""Numbers of messages are below this."""


class Kind(enum.IntEnum):
    """Kinds of messages: the first four and `FETCH` a worker's, `ALIVE` anybody's, the rest the
    generator's.

    ``ids`` of `RUN`, `DONE` and `LOST` begin with the group's number and epoch.
    """

    ASK = 1
    """A step is over. Whoever was left out takes part again, unless the first number is 1: then it
    is told that it is out, and takes somebody's state before."""
    DONE = 2
    """The group's average is this worker's parameters."""
    LOST = 3
    """The third number is a member that was lost while the group ran."""
    LEVEL = 4
    """An average over all that take part is waited for. It counts as asking."""
    ALIVE = 5
    """It has to arrive, so whoever is dead is found out. The generator's first number is 0, or 1
    more than a worker that lives and that the receiver waits for."""
    RUN = 6
    """Average with the payload's workers; the third number is the initiator, the fourth the
    meeting. What follows the workers are meetings to close before."""
    OUT = 7
    """The first number is a worker that takes no part any more; the second, how often it has asked.

    So it knows whether it has asked again since, which lets it take part again. The third says why,
    a `Why`. The fourth is 1 if others have made a mean of all without the receiver.
    """
    IN = 8
    """The first number is a worker that takes part again."""
    REFUSED = 9
    """What was said was nonsense; the payload says why. Nothing else follows."""
    FETCH = 10
    """Somebody's state is wanted. The first number is 0, or 1 more than a worker that was lost; the
    second is 1 if whoever wants it takes part from now on."""
    STATE = 11
    """The first number is a worker that gives its state to the second; the third is their meeting.

    If both are the same there is nobody who could.
    """


class Why(enum.IntEnum):
    """Why a worker takes no part."""

    LATE = 0
    """Its step, or an average with it, took too long. It lives: a mean over all waits for it."""
    SILENT = 1
    """Nothing came from it for long: its process was stopped, or the network was cut. Its model is
    old, so it takes another's state before it is in a group again."""
    ENDED = 2
    """Its connections have ended without a word: its process has died."""
    LEFT = 3
    """It has left in an orderly way."""


class Malformed(Exception):
    """A message that nobody of this job has sent; says what is wrong with it."""


def why_of(number: int) -> Why:
    """Return the third number of a `Kind.OUT`; `Why.LATE` if it means nothing."""
    return Why(number) if number in Why._value2member_map_ else Why.LATE


class Told(NamedTuple):
    """What a `Kind.RUN` says.

    Attributes:
        run: the group.
        meeting: its number, see `wingbeat.methods.model_averaging.service`.
        close: meetings whose connections are not kept any longer.
    """

    run: Run
    meeting: int
    close: tuple[int, ...] = ()


def payload_of(members: Sequence[int], close: Sequence[int] = ()) -> bytes:
    """Return a `Kind.RUN`'s payload: how many members, these, and the meetings to close."""
    return struct.pack(f"<{1 + len(members) + len(close)}I", len(members), *members, *close)


def ids_of(run: Run, meeting: int) -> tuple[int, int, int, int]:
    """Return the numbers of a `Kind.RUN`."""
    return run.number, run.epoch, run.initiator, meeting


def told_of(ids: Sequence[int], payload: bytes | memoryview, workers: int) -> Told:
    """Return what a `Kind.RUN` says.

    Raises:
        Malformed: it is none of so many workers.
    """
    if ids[2] >= workers:
        raise Malformed(f"initiator {ids[2]} is none of {workers} workers")
    if len(payload) % 4 or not 8 <= len(payload) <= _MOST:
        raise Malformed(f"{len(payload)} bytes are no group")
    size, *numbers = struct.unpack(f"<{len(payload) // 4}I", payload)
    members = tuple(numbers[:size])
    if not members or max(members) >= workers or len(set(members)) < size:
        raise Malformed(f"{members[:8]} is no group of {workers} workers")
    return Told(Run(ids[0], ids[1], members, ids[2]), ids[3], tuple(numbers[size:]))


_MOST = 1 << 20
"""Bytes of the largest payload."""
