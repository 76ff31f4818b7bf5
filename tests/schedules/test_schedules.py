"""Schedules, driven by thousands of histories: no torch, no threads, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.schedules import BY_NAME
from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Command,
    Defer,
    Event,
    GradientsDropped,
    GradientsNeeded,
    Operation,
    ParametersNeeded,
    PartsNeeded,
    Planned,
    Schedule,
    Start,
    Step,
    StepCalled,
    Update,
    Wait,
)

RS, AG, AR = Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_REDUCE


def planned(buckets: int, chooser: random.Random) -> Planned:
    return Planned(tuple(chooser.sample(range(buckets), buckets)))


def iteration(buckets: int, chooser: random.Random, uses: bool = True) -> Iterator[Event]:
    """One iteration of a user who looks, clips, drops, accumulates and skips as he likes."""
    for _ in range(chooser.choice([1, 1, 2])):
        if chooser.random() < 0.9:
            for bucket in chooser.sample(range(buckets), buckets):
                yield ParametersNeeded((bucket,))
        yield BackwardBegins()
        for bucket in range(buckets):
            yield BucketReady(bucket)
        yield BackwardEnds(looked_at=uses and chooser.random() < 0.1)
        if uses:
            for _ in range(chooser.randint(0, 2)):
                yield chooser.choice([GradientsNeeded(), PartsNeeded()])
    yield chooser.choice([StepCalled(), StepCalled(), StepCalled(False), GradientsDropped()])
    if uses and chooser.random() < 0.2:
        yield GradientsNeeded()


class Driven:
    """Performs commands as a worker would, and checks that each makes sense."""

    def __init__(self, schedule: Schedule, buckets: int) -> None:
        self.schedule = schedule
        self.started: list[tuple[Operation, int]] = []
        self.updated: list[int] = []
        self._last: dict[int, Operation | None] = dict.fromkeys(range(buckets))
        self._waited: set[int] = set()
        self.due: set[int] = set()

    def tell(self, event: Event) -> list[Command]:
        told = []
        for command in self.schedule.react(event):
            told.append(command)
            self._perform(command)
        return told

    def _perform(self, command: Command) -> None:
        match command:
            case Start(operation, bucket, chained):
                assert chained == (operation is AG)
                assert bucket not in self.due, "its buffer holds an update that is due"
                if operation is AG:
                    assert self._last[bucket] is RS, "nothing to gather"
                self._last[bucket] = operation
                self._waited.discard(bucket)
                self.started.append((operation, bucket))
            case Wait(bucket, whole):
                assert not whole or self._last[bucket] in (None, AG, AR), "others lack parts of it"
                self._waited.add(bucket)
            case Defer(bucket):
                assert self._last[bucket] is AG
                assert bucket not in self.due
                self.due.add(bucket)
            case Update(bucket):
                assert bucket in self._waited, "gradients of other workers are missing"
                self.due.remove(bucket)
                self.updated.append(bucket)
            case Step():
                assert not self.due, "an older update would come after this one"
                assert all(last in (None, AG, AR) for last in self._last.values())


seeds = st.integers(0, 10**9)


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=5000)
@given(seed=seeds)
def test_no_history_makes_a_command_that_makes_no_sense(name: str, seed: int) -> None:
    chooser = random.Random(seed)
    buckets = chooser.randint(1, 4)
    driven = Driven(BY_NAME[name](), buckets)
    driven.tell(planned(buckets, chooser))
    for _ in range(chooser.randint(1, 4)):
        for event in iteration(buckets, chooser):
            driven.tell(event)
            if isinstance(event, ParametersNeeded):
                assert driven.due.isdisjoint(event.buckets), "read before its update"
            if isinstance(event, BackwardBegins):
                assert not driven.due


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=5000)
@given(seed=seeds)
def test_what_one_worker_does_with_gradients_changes_no_collective(name: str, seed: int) -> None:
    """Ranks start the same operations in the same order, whoever looks, clips or drops."""
    buckets = 3
    ranks = [Driven(BY_NAME[name](), buckets) for _ in range(2)]
    order = planned(buckets, random.Random(seed))
    for number in range(3):
        for rank, driven in enumerate(ranks):
            if number == 0:
                driven.tell(order)
            for event in iteration_of_all(buckets, random.Random(seed + number), rank + seed):
                driven.tell(event)
    for driven in ranks:
        driven.tell(GradientsDropped())
    assert ranks[0].started == ranks[1].started


def iteration_of_all(buckets: int, common: random.Random, rank: int) -> Iterator[Event]:
    """As `iteration`: backwards and the step are common to all ranks, uses are each one's own."""
    own = random.Random(rank)
    for _ in range(common.choice([1, 2])):
        yield BackwardBegins()
        for bucket in range(buckets):
            yield BucketReady(bucket)
        yield BackwardEnds()
        for _ in range(own.randint(0, 2)):
            yield own.choice([GradientsNeeded(), PartsNeeded()])
    yield own.choice([StepCalled(), StepCalled(False), GradientsDropped()])


def lines(name: str, *events: Event) -> list[str]:
    """The schedule's answers to the last event, as text."""
    schedule = BY_NAME[name]()
    told: list[Command] = []
    for event in (Planned((1, 0)), *events):
        told = list(schedule.react(event))
    return [_line(command) for command in told]


def _line(command: Command) -> str:
    match command:
        case Start(operation, bucket):
            return f"{operation.value} {bucket}"
        case Wait(bucket, whole):
            return f"wait {bucket}" + ("" if whole else " for own parts")
        case Defer(bucket) | Update(bucket):
            return f"{type(command).__name__.lower()} {bucket}"
    return type(command).__name__.lower()


BACKWARD = (BackwardBegins(), BucketReady(0), BucketReady(1), BackwardEnds())


def test_wfbp_in_words() -> None:
    assert lines("wfbp", *BACKWARD[:2]) == ["all_reduce 0"]
    assert lines("wfbp", *BACKWARD) == ["wait 0", "wait 1", "show"]
    assert lines("wfbp", *BACKWARD, StepCalled()) == ["step"]
    for event in (GradientsNeeded(), PartsNeeded(), GradientsDropped(), ParametersNeeded((0,))):
        assert lines("wfbp", *BACKWARD, event) == []


GATHERS = ["all_gather 1", "all_gather 0"]


def test_dear_in_words() -> None:
    assert lines("dear", BackwardBegins()) == ["show"]
    assert lines("dear", *BACKWARD[:2]) == ["reduce_scatter 0"]
    assert lines("dear", *BACKWARD) == GATHERS
    assert lines("dear", *BACKWARD, StepCalled()) == ["defer 1", "defer 0"]
    stepped = (*BACKWARD, StepCalled())
    assert lines("dear", *stepped, ParametersNeeded((0,))) == ["wait 0", "update 0"]
    assert lines("dear", *stepped, ParametersNeeded((0,)), ParametersNeeded((0,))) == []
    assert lines("dear", *stepped, BackwardBegins()) == [
        *("wait 1", "update 1", "wait 0", "update 0", "show")
    ]


def test_dear_gathers_for_whoever_looks_once() -> None:
    whole = ["wait 1", "wait 0", "show"]
    assert lines("dear", *BACKWARD, GradientsNeeded()) == whole
    assert lines("dear", *BACKWARD, GradientsNeeded(), GradientsNeeded()) == []
    assert lines("dear", *BACKWARD, GradientsNeeded(), StepCalled()) == ["show", "step"]
    assert lines("dear", *BACKWARD, StepCalled(in_parts=False)) == [*whole, "show", "step"]
    assert lines("dear", *BACKWARD, BackwardBegins()) == whole, "it adds to them"


def test_dear_waits_with_its_gathers_once_parts_were_wanted() -> None:
    whole = ["wait 1", "wait 0", "show"]
    parts = ["wait 1 for own parts", "wait 0 for own parts"]
    first = (*BACKWARD, PartsNeeded())
    assert lines("dear", *first) == whole, "this time they are under way"
    second = (*first, StepCalled(), *BACKWARD)
    assert lines("dear", *second) == []
    assert lines("dear", *second, PartsNeeded()) == parts
    assert lines("dear", *second, PartsNeeded(), StepCalled()) == [*GATHERS, "defer 1", "defer 0"]
    assert lines("dear", *second, GradientsDropped()) == GATHERS
    assert lines("dear", *first, StepCalled(), *BACKWARD[:3], BackwardEnds(looked_at=True)) == (
        GATHERS
    )
