"""Who continues after failures, with which weights, in virtual time over random histories."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.methods.elastic.agreement import (
    Agreement,
    Condition,
    Decision,
    Fail,
    Limits,
    Progress,
    Propose,
    Report,
    Wait,
    decide,
    parse_decision,
)
from wingbeat.schema import MalformedMessage

ALIVE, SILENT, GONE = Condition.ALIVE, Condition.SILENT, Condition.GONE
LIMITS = Limits(silent_s=5.0, blocked_s=100.0, returned_s=30.0, min_replicas=2)


# -- single rules -------------------------------------------------------------------------


def polled(
    reports: dict[int, Report],
    conditions: dict[int, Condition],
    *,
    former: dict[int, str] | None = None,
    tokens: dict[int, str] | None = None,
    at: float = 0.0,
) -> object:
    machine = Agreement(former or {0: "a", 1: "b", 2: "c"}, LIMITS, 0.0)
    present = tokens or {0: "a", 1: "b", 2: "c"}
    machine.poll(0.0, reports, present, conditions)
    return machine.poll(at, reports, present, conditions)


def report(token: str, resume: int = 5, state: int = 5) -> Report:
    return Report(token, resume, state)


def test_a_live_member_without_a_report_is_waited_for() -> None:
    reports = {0: report("a"), 1: report("b")}
    assert polled(reports, dict.fromkeys(range(3), ALIVE), at=99.0) == Wait((2,))


@pytest.mark.parametrize(
    ("condition", "at"), [(GONE, 0.0), (SILENT, 5.0), (ALIVE, 100.0)], ids=lambda each: str(each)
)
def test_a_member_that_has_ended_or_is_silent_or_blocked_is_left_out(
    condition: Condition, at: float
) -> None:
    reports = {0: report("a"), 1: report("b")}
    found = polled(reports, {0: ALIVE, 1: ALIVE, 2: condition}, at=at)
    assert found == Propose(Decision(((0, "a"), (1, "b")), 5, 0))


def test_a_member_that_responds_again_is_waited_for_as_long_as_before() -> None:
    machine = Agreement({0: "a", 1: "b"}, LIMITS, 0.0)
    reports, tokens = {0: report("a")}, {0: "a", 1: "b"}
    for now, condition in ((0.0, SILENT), (4.0, ALIVE), (4.5, SILENT), (9.0, SILENT)):
        assert machine.poll(now, reports, tokens, {0: ALIVE, 1: condition}) == Wait((1,))


def test_a_member_whose_rank_has_another_process_is_left_out_until_that_one_reports() -> None:
    tokens = {0: "a", 1: "b", 2: "new"}
    reports = {0: report("a"), 1: report("b")}
    found = polled(reports, dict.fromkeys(range(3), ALIVE), tokens=tokens)
    assert found == Propose(Decision(((0, "a"), (1, "b")), 5, 0))
    reports[2] = Report("new", 0, -1)
    found = polled(reports, dict.fromkeys(range(3), ALIVE), tokens=tokens)
    assert found == Propose(Decision(((0, "a"), (1, "b"), (2, "new")), 5, 0, (2,)))


def test_the_report_of_a_process_that_has_ended_counts_for_nothing() -> None:
    reports = {0: report("a"), 1: report("b"), 2: report("c", 9, 9)}
    found = polled(reports, {0: ALIVE, 1: ALIVE, 2: GONE})
    assert found == Propose(Decision(((0, "a"), (1, "b")), 5, 0))


def test_a_process_that_was_not_probed_yet_is_neither_admitted_nor_left_out() -> None:
    reports = {0: report("a"), 1: report("b"), 2: report("c"), 3: Report("d", 0, -1)}
    tokens = {0: "a", 1: "b", 2: "c", 3: "d"}
    assert polled(reports, dict.fromkeys(range(3), ALIVE), tokens=tokens) == Wait()


def test_too_few_members_wait_for_others_and_then_fail() -> None:
    reports, conditions = {0: report("a")}, {0: ALIVE, 1: GONE, 2: GONE}
    assert polled(reports, conditions, at=29.0) == Wait()
    found = polled(reports, conditions, at=30.0)
    assert isinstance(found, Fail)
    assert found.reason == (
        "1 of 3 replicas are left, fewer than min_replicas=2, and none has returned for 30 s"
    )


def test_without_a_member_that_has_weights_nothing_can_continue() -> None:
    reports = {0: Report("n", 0, -1), 1: Report("m", 0, -1)}
    found = polled(reports, {0: ALIVE, 1: ALIVE, 2: GONE}, tokens={0: "n", 1: "m", 2: "c"})
    assert found == Fail("no replica is left that has the weights")


def test_the_member_that_is_ahead_is_the_source_and_all_drop_its_step() -> None:
    found = decide({0: report("a", 5, 4), 1: report("b", 6, 5), 2: report("c", 6, 5)})
    assert found == Decision(((0, "a"), (1, "b"), (2, "c")), 6, 1, (0,))


def test_of_members_with_an_unfinished_step_the_one_with_most_buckets_is_the_source() -> None:
    reports = {0: Report("a", 5, 4, (0,)), 1: Report("b", 5, 4, (0, 1)), 2: Report("c", 5, 4)}
    assert decide(reports) == Decision(((0, "a"), (1, "b"), (2, "c")), 5, 1, (0, 2))


def test_a_step_that_has_begun_is_dropped_and_one_that_has_not_is_made() -> None:
    one = Progress()
    one.begin()
    assert one.report("a").resume == 1
    one.step()
    one.apply()
    assert one.report("a") == Report("a", 1, 1)
    one.enter(Decision(((0, "a"),), 3, 0), member=True, in_step=False)
    assert one.dropping
    one.begin()
    assert one.report("a").resume == 3, "a dropped step does not begin"
    for _ in range(2):
        one.step()
    assert not one.dropping
    assert one.report("a").state == 1


# -- random histories ---------------------------------------------------------------------


class Doing(Enum):
    """What a simulated process does."""

    COMPUTE = "computes gradients"
    EXCHANGE = "waits for the others' gradients"
    AGREE = "agrees on an epoch"
    COPY = "waits for the source's weights"
    ENDED = "has ended"


Weights = tuple[tuple[int, tuple[int, ...]], ...]
"""The steps that are applied, each with the ranks whose gradients it contains."""


@dataclass
class Process:
    """A process of one rank."""

    rank: int
    token: str
    progress: Progress
    doing: Doing = Doing.COMPUTE
    weights: Weights = ()
    stopped: bool = False
    member: bool = True
    epoch: int = 0
    agreement: Agreement | None = None
    decision: Decision | None = None
    in_step: bool = True


@dataclass
class Store:
    """The texts of the store."""

    reports: dict[int, dict[int, Report]] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)


class Simulation:
    """Processes of several ranks, their group operations, and a store, by one clock."""

    def __init__(self, size: int, seed: int) -> None:
        self.drawn, self.now, self.size = random.Random(seed), 0.0, size
        self.store, self.started = Store(), size
        self.processes = {r: Process(r, f"token{r}", Progress()) for r in range(size)}
        first = Decision(tuple((r, f"token{r}") for r in range(size)), 0, 0)
        self.decisions = {0: first}
        for each in self.processes.values():
            each.decision = first
        self.begun: dict[tuple[int, int, str], set[int]] = {}
        self.closed: dict[int, set[int]] = {}  # ranks that have left the group of an epoch
        self.known: dict[int, Weights] = {0: ()}
        self.sent: dict[int, tuple[int, Weights]] = {}  # of the source of an epoch

    # -- faults

    def crash(self, rank: int) -> None:
        process = self.processes[rank]
        if process.doing is not Doing.ENDED:
            process.doing = Doing.ENDED

    def restart(self, rank: int) -> None:
        if self.processes[rank].doing is not Doing.ENDED:
            return
        self.started += 1
        new = Process(rank, f"token{self.started}", Progress(0, -1), Doing.AGREE, member=False)
        new.epoch = max(self.store.decisions, default=0)
        new.decision = self.store.decisions.get(new.epoch, self.decisions[0])
        self.processes[rank] = new
        new.in_step = False

    def live(self) -> list[Process]:
        return [each for each in self.processes.values() if each.doing is not Doing.ENDED]

    def with_weights(self) -> list[Process]:
        """Those of which one has to stay: the running members of the newest epoch."""
        newest = self.store.decisions.get(max(self.store.decisions, default=0), self.decisions[0])
        running = [each for each in self.live() if not each.stopped and each.progress.state >= 0]
        return [each for each in running if newest.tokens.get(each.rank) == each.token]

    # -- what a process does

    def advance(self, process: Process) -> None:
        if process.stopped or process.doing is Doing.ENDED:
            return
        match process.doing:
            case Doing.COMPUTE if process.progress.dropping:
                process.progress.step()
            case Doing.COMPUTE:
                process.progress.begin()
                self._begin(process, "sum")
                process.doing = Doing.EXCHANGE
            case Doing.EXCHANGE:
                self._exchange(process)
            case Doing.AGREE:
                self._agree(process)
            case Doing.COPY:
                self._copy(process)

    def _key(self, process: Process, what: str) -> tuple[int, int, str]:
        return process.epoch, process.progress.steps if what == "sum" else 0, what

    def _begin(self, process: Process, what: str) -> None:
        self.begun.setdefault(self._key(process, what), set()).add(process.rank)

    def _outcome(self, process: Process, what: str) -> bool | None:
        """Whether an operation of all members is complete, has failed, or neither."""
        assert process.decision is not None
        members = set(process.decision.tokens)
        whole = self.begun.get(self._key(process, what), set()) == members
        ended = bool(self.closed.get(process.epoch, set()) & members) or any(
            self.processes[rank].token != token or self.processes[rank].doing is Doing.ENDED
            for rank, token in process.decision.members
        )
        if whole and ended:  # what is on the way may arrive or not
            return self.drawn.random() < 0.5
        return True if whole else False if ended else None

    def _exchange(self, process: Process) -> None:
        outcome = self._outcome(process, "sum")
        if outcome is None:
            self._time_out(process)
        elif outcome:
            assert process.decision is not None
            ranks = tuple(sorted(process.decision.tokens))
            step = process.progress.steps
            process.weights += ((step, ranks),)
            process.progress.step()
            process.progress.apply()
            self._same(process)
            process.doing = Doing.COMPUTE
        else:
            self._fail(process)

    def _time_out(self, process: Process) -> None:
        """A wait for a stopped process ends some time."""
        assert process.decision is not None
        awaited = set(process.decision.tokens) - self.begun[self._key(process, "sum")]
        if any(self.processes[rank].stopped for rank in awaited) and self.drawn.random() < 0.2:
            self._fail(process)

    def _same(self, process: Process) -> None:
        """All processes with the same number of steps have the same weights."""
        state = process.progress.state
        assert self.known.setdefault(state, process.weights) == process.weights

    def _fail(self, process: Process) -> None:
        self.closed.setdefault(process.epoch, set()).add(process.rank)
        process.doing, process.agreement, process.in_step = Doing.AGREE, None, True

    def _agree(self, process: Process) -> None:
        epoch, store = process.epoch + 1, self.store
        assert process.decision is not None
        if process.agreement is None:
            process.agreement = Agreement(process.decision.tokens, self._limits(process), self.now)
            said = process.progress.report(process.token, member=process.member)
            store.reports.setdefault(epoch, {})[process.rank] = said
        decision = store.decisions.get(epoch)
        if decision is None:
            reports = store.reports[epoch]
            tokens = {rank: each.token for rank, each in self.processes.items()}
            conditions = {rank: self._condition(rank) for rank in tokens}
            command = process.agreement.poll(self.now, reports, tokens, conditions)
            if isinstance(command, Propose) and process.member:
                decision = store.decisions.setdefault(epoch, command.decision)
            elif isinstance(command, Fail):
                self.failed(process, command)
        if decision is not None:
            self._decided(process, epoch, decision)

    def failed(self, process: Process, command: Fail) -> None:
        raise AssertionError(command)

    def _limits(self, process: Process) -> Limits:
        ever = float("inf")
        if process.member:
            return Limits(silent_s=5.0, blocked_s=1000.0, returned_s=1000.0, min_replicas=1)
        return Limits(silent_s=ever, blocked_s=ever, returned_s=ever, min_replicas=1)

    def _condition(self, rank: int) -> Condition:
        process = self.processes[rank]
        if process.doing is Doing.ENDED:
            return GONE
        return SILENT if process.stopped else ALIVE

    def _decided(self, process: Process, epoch: int, decision: Decision) -> None:
        process.epoch, process.decision, process.agreement = epoch, decision, None
        if decision.tokens.get(process.rank) != process.token:
            process.member = False
            process.progress.state = -1
            return
        before = process.member
        process.progress.enter(decision, member=before, in_step=process.in_step)
        process.member = True
        if process.rank == decision.source:
            self.sent[epoch] = process.progress.state, process.weights
        self._begin(process, "copy")
        process.doing = Doing.COPY

    def _copy(self, process: Process) -> None:
        outcome = self._outcome(process, "copy")
        assert process.decision is not None
        if outcome:
            state, weights = self.sent[process.epoch]
            if process.rank in process.decision.copies:
                process.weights = weights
            assert process.weights == weights
            process.progress.copy(state, set())
            self._same(process)
            process.doing = Doing.COMPUTE
        elif outcome is False:
            in_step = process.progress.dropping or process.in_step
            process.member = process.progress.state >= 0
            self._fail(process)
            process.in_step = in_step

    def admit(self, process: Process) -> None:
        """A member of fewer than all ends its group at a step boundary, if one wants to join."""
        wanted = [each for each in self.live() if each.doing is Doing.AGREE and not each.member]
        assert process.decision is not None
        fewer = len(process.decision.members) < self.size
        if wanted and fewer and process.doing is Doing.COMPUTE and not process.stopped:
            self._fail(process)
            process.in_step = False


def disturb(job: Simulation) -> None:
    """A process makes a step of its program, or fails, stops, or is started again."""
    drawn = job.drawn
    live = [each for each in job.live() if not each.stopped]
    needed = job.with_weights()
    rank = drawn.randrange(job.size)
    spared = len(needed) < 2 and job.processes[rank] in needed
    event = drawn.randrange(30)
    if event < 2 and spared:
        return
    if event == 0:
        job.crash(rank)
    elif event < 3:
        job.processes[rank].stopped = event == 1
    elif event < 5:
        job.restart(rank)
    elif live:
        (job.admit if event == 5 else job.advance)(drawn.choice(live))


def run(size: int, seed: int, ticks: int) -> Simulation:
    """Run random faults, and then long enough without for all to train."""
    job = Simulation(size, seed)
    for _ in range(ticks):
        job.now += 0.2
        disturb(job)
    for rank, each in job.processes.items():
        each.stopped = False
        job.restart(rank)
    for _ in range(250):
        job.now += 0.2
        for each in job.drawn.sample(job.live(), len(job.live())):
            job.admit(each)
            job.advance(each)
    return job


@settings(max_examples=examples(600), deadline=None)
@given(st.integers(2, 5), st.integers(0, 1 << 32), st.integers(0, 300))
def test_after_random_crashes_stops_and_returns_all_have_equal_weights_and_train(
    size: int, seed: int, ticks: int
) -> None:
    job = run(size, seed, ticks)
    assert all(each.doing is not Doing.ENDED for each in job.live())
    assert {each.rank for each in job.live()} == set(range(size))
    epochs = {each.epoch for each in job.live()}
    assert len(epochs) == 1, [(each.rank, each.epoch, each.doing) for each in job.live()]
    steps = [each.progress.steps for each in job.live()]
    assert max(steps) - min(steps) <= 1
    assert min(len(each.weights) for each in job.live()) > 20, "all have trained in the end"
    newest = max(job.known)
    assert job.known[newest][-1][1] == tuple(range(size)), "and with each other"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[[0, "a"], [1, "b"]], 4, 2, []]', "rank 2 is the source or copies it"),
        ('[[[0, "a"], [1, "b"]], 4, 0, [2]]', "rank 2 is the source or copies it"),
        ('[[[1, "a"], [0, "b"]], 4, 0, []]', "allowed: increasing ones"),
        ('[[[1, "a"], [1, "b"]], 4, 1, []]', "allowed: increasing ones"),
        ('[[[3, "a"]], 4, 3, []]', "is 3; allowed: 0 to 2"),
    ],
)
def test_decision_that_names_others_than_its_members_is_malformed(text: str, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        parse_decision(text, 3)
