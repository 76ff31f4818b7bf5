"""How the members of an exact strategy agree on who continues, and with which weights. No torch.

All members exchange gradients in a group. When one fails, its group ends, and each of the others
publishes a `Report`. Any of them that knows the reports of all that live proposes a `Decision`. The
first proposal is binding, because the store accepts one for each epoch. The members of the decision
are the group of the next epoch. A process that it leaves out has to join again.

Step ``t+1`` ends on no member before all members have begun it, so members differ by one step at
most. Nothing is sent for this while no member fails.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from wingbeat.schema import Length, MalformedMessage, Range, Text, parse_json

MAX_STEPS = 1 << 48

Steps = Annotated[int, Range(0, MAX_STEPS)]
Rank = Annotated[int, Range(0, "workers")]
Token = Annotated[str, Text(64)]


class Report(NamedTuple):
    """What a process publishes after the end of an epoch.

    Attributes:
        token: text that no other process has.
        resume: the first step whose gradients it can exchange.
        state: number of the steps up to the last one that its weights contain; -1 if it has to copy
            them.
        updated: the buckets that contain an update of one further step, which has failed.
    """

    token: Token
    resume: Steps
    state: Annotated[int, Range(-1, MAX_STEPS)]
    updated: Annotated[tuple[Annotated[int, Range()], ...], Length(most=1 << 16)] = ()

    @property
    def progress(self) -> tuple[int, int]:
        """How far its weights are: of two that differ, the larger is the source."""
        return self.state, len(self.updated)


class Decision(NamedTuple):
    """The members of an epoch.

    Attributes:
        members: rank and token of each, by rank.
        resume: the first step that they exchange; all drop the steps before that they have not
            made.
        source: rank of the member whose weights and optimizer state count.
        copies: ranks of the members that copy them.
    """

    members: Annotated[tuple[tuple[Rank, Token], ...], Length(most=1 << 16, least=1)]
    resume: Steps
    source: Rank
    copies: Annotated[tuple[Rank, ...], Length(most=1 << 16)] = ()

    @property
    def tokens(self) -> dict[int, str]:
        """The token of each member by rank."""
        return dict(self.members)


def parse_decision(text: str, workers: int) -> Decision:
    """Parse a decision; a `MalformedMessage` if it is none, or names others than its members."""
    found: Decision = parse_json(Decision, text, workers=workers)
    ranks = [rank for rank, _ in found.members]
    if ranks != sorted(set(ranks)):
        raise MalformedMessage(f"members are the ranks {ranks!s:.60}; allowed: increasing ones")
    if wrong := {found.source, *found.copies} - set(ranks):
        raise MalformedMessage(f"rank {min(wrong)} is the source or copies it, and is no member")
    return found


class Condition(enum.Enum):
    """What a probe of a process has found."""

    UNKNOWN = "not probed yet"
    ALIVE = "alive"
    SILENT = "does not respond"
    GONE = "has ended"


@dataclass(frozen=True)
class Wait:
    """Look again later; ``for_ranks`` are the live members without a report."""

    for_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Propose:
    """Propose this decision; the one that the store accepts is binding."""

    decision: Decision


@dataclass(frozen=True)
class Fail:
    """Training cannot continue, for this reason."""

    reason: str


Command = Wait | Propose | Fail


@dataclass(frozen=True)
class Limits:
    """Times in seconds.

    Attributes:
        silent_s: after which a process that does not respond counts as failed.
        blocked_s: after which a process that responds, and does not report, counts as failed.
        returned_s: for which fewer than ``min_replicas`` wait for others.
        min_replicas: least number of members.
    """

    silent_s: float
    blocked_s: float
    returned_s: float
    min_replicas: int


class Agreement:
    """Decides when this process proposes which members of the next epoch.

    Args:
        former: rank and token of the members of the last epoch.
        limits: of time and members.
        now: a time in seconds.
    """

    def __init__(self, former: Mapping[int, str], limits: Limits, now: float) -> None:
        self._former, self._limits, self._begun = dict(former), limits, now
        self._silent_since: dict[int, float] = {}
        self._complete_since: float | None = None

    def poll(
        self,
        now: float,
        reports: Mapping[int, Report],
        tokens: Mapping[int, str],
        conditions: Mapping[int, Condition],
    ) -> Command:
        """Return what to do, given the reports so far.

        ``tokens`` and ``conditions`` have those of the present process of each rank that is a
        former member or has reported.
        """
        for rank, condition in conditions.items():
            if condition is Condition.SILENT:
                self._silent_since.setdefault(rank, now)
            else:
                self._silent_since.pop(rank, None)
        present = {r: each for r, each in sorted(reports.items()) if each.token == tokens.get(r)}
        missing = [
            rank
            for rank, token in sorted(self._former.items())
            if rank not in present
            and tokens.get(rank) == token
            and not self._lost(rank, conditions.get(rank, Condition.UNKNOWN), now)
        ]
        if missing:
            self._complete_since = None
            return Wait(tuple(missing))
        found = [conditions.get(rank, Condition.UNKNOWN) for rank in present]
        if Condition.UNKNOWN in found:
            return Wait()  # a probe ends within seconds
        candidates = {
            rank: report
            for rank, report in present.items()
            if self._may_join(rank, report, conditions[rank])
        }
        return self._propose(now, candidates)

    def _lost(self, rank: int, condition: Condition, now: float) -> bool:
        """Whether a former member without a report is not waited for any more."""
        silent = now - self._silent_since.get(rank, now) >= self._limits.silent_s
        blocked = now - self._begun >= self._limits.blocked_s
        return condition is Condition.GONE or silent or blocked

    def _may_join(self, rank: int, report: Report, condition: Condition) -> bool:
        # A member has reported in this epoch; the report of another process may be old.
        member = self._former.get(rank) == report.token
        return condition is Condition.ALIVE or (member and condition is not Condition.GONE)

    def _propose(self, now: float, candidates: Mapping[int, Report]) -> Command:
        with_state = {rank: each for rank, each in candidates.items() if each.state >= 0}
        if self._complete_since is None:
            self._complete_since = now
        if not with_state:
            return Fail("no replica is left that has the weights")
        if len(candidates) < self._limits.min_replicas:
            if now - self._complete_since >= self._limits.returned_s:
                return Fail(
                    f"{len(candidates)} of {len(self._former)} replicas are left, fewer than "
                    f"min_replicas={self._limits.min_replicas}, and none has returned for "
                    f"{self._limits.returned_s:g} s"
                )
            return Wait()
        return Propose(decide(candidates))


def decide(reports: Mapping[int, Report]) -> Decision:
    """Return the decision of an epoch whose members have these reports.

    >>> reports = {0: Report("a", 4, 3), 2: Report("c", 5, 4), 3: Report("d", 0, -1)}
    >>> decide(reports)
    Decision(members=((0, 'a'), (2, 'c'), (3, 'd')), resume=5, source=2, copies=(0, 3))
    """
    source = max(sorted(reports), key=lambda rank: reports[rank].progress)
    best = reports[source]
    return Decision(
        members=tuple((rank, reports[rank].token) for rank in sorted(reports)),
        resume=max(report.resume for report in reports.values()),
        source=source,
        copies=tuple(
            rank
            for rank, each in sorted(reports.items())
            if (each.state, each.updated) != (best.state, best.updated)
        ),
    )


class Progress:
    """How far this process has come, and which steps it drops.

    Attributes:
        steps: number of calls of ``optimizer.step()``.
        state: as in `Report`.
        updated: as in `Report`.
        begun: whether gradients of the present step have been exchanged.
    """

    def __init__(self, steps: int = 0, state: int = 0) -> None:
        self.steps, self.state, self.begun = steps, state, False
        self.updated: set[int] = set()
        self._resume = 0

    @property
    def dropping(self) -> bool:
        """Whether the present step exchanges and applies nothing."""
        return self.steps < self._resume

    def begin(self) -> None:
        """Record that an exchange of the present step begins."""
        self.begun = not self.dropping

    def update(self, buckets: set[int], whole: int) -> None:
        """Record that some of ``whole`` buckets contain the last step."""
        self.updated |= buckets
        if len(self.updated) == whole:
            self.apply()

    def apply(self) -> None:
        """Record that the weights contain all steps so far."""
        self.state = self.steps
        self.updated.clear()

    def step(self) -> None:
        """Record a call of ``optimizer.step()``, whose update is not made yet."""
        self.steps += 1
        self.begun = False
        self.updated.clear()

    def report(self, token: str, *, member: bool = True) -> Report:
        """Return what to publish; a process that is no ``member`` has to copy all."""
        if not member:
            return Report(token, 0, -1)
        resume = max(self._resume, self.steps + self.begun)
        return Report(token, resume, self.state, tuple(sorted(self.updated)))

    def enter(self, decision: Decision, *, member: bool, in_step: bool) -> None:
        """Enter the epoch of a decision; ``member``: whether it was one of the epoch before.

        Another process continues with the step of the members. If it is inside of one
        (``in_step``), it drops the rest of that.
        """
        self._resume = decision.resume
        if not member:
            self.steps = decision.resume - in_step
        self.begun = False

    def copy(self, state: int, updated: set[int]) -> None:
        """Record that the weights are those of the source."""
        self.state, self.updated = state, set(updated)
