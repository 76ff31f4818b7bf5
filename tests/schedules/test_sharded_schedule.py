"""Sharded DeAR on several workers that do as they like: thousands of histories, no torch."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.schedules import ShardedDear
from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Command,
    Defer,
    Event,
    Forget,
    GradientsDropped,
    GradientsNeeded,
    Hear,
    Operation,
    OthersStep,
    ParametersNeeded,
    PartsNeeded,
    Phase,
    Place,
    Planned,
    Say,
    Share,
    Start,
    StepCalled,
    Update,
    UpdateOwn,
    Wait,
)
from wingbeat.schedules.intents import Answer, Intent

RS, AG, AP = Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_GATHER_PARAMETERS
Said = tuple[Intent, frozenset[int]]


class Worker:
    """Performs commands, checks that each makes sense, and pauses where it hears the others."""

    def __init__(self, planned: Planned) -> None:
        self.schedule = ShardedDear()
        self.members = planned.members
        self.started: list[tuple[Operation, int]] = []
        self.told: list[Command] = []
        self.updated: list[tuple[int, frozenset[int]]] = []
        self.due: dict[int, frozenset[int]] = {}
        self._last: dict[int, Operation] = {}
        self._waited: set[int] = set()
        self._placed: set[int] = set()
        assert not list(self.schedule.react(planned))

    def run(self, events: Iterable[Event]) -> Generator[Said, Answer, None]:
        for event in events:
            dialogue, answer = self.schedule.react(event), None
            while True:
                try:
                    command = dialogue.send(answer)
                except StopIteration:
                    break
                self.told.append(command)
                answer = (yield self._said) if isinstance(command, Hear) else None
                self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Say(intent, used):
                self._said = intent, used
            case Start(operation, bucket):
                self._check_start(operation, bucket)
                self._last[bucket] = operation
                self._waited.discard(bucket)
                self.started.append((operation, bucket))
            case Wait(bucket, whole):
                assert not whole or self._last[bucket] is AG
                self._waited.add(bucket)
            case UpdateOwn(bucket, used):
                assert bucket in self._waited, "the own block's gradient is not there yet"
                assert bucket not in self._placed
                self.updated.append((bucket, used & self.members[bucket]))
            case Place(bucket):
                assert any(number == bucket for number, _ in self.updated), "not updated yet"
                self._placed.add(bucket)
            case Defer(bucket, used):
                assert self._last[bucket] is AP
                assert bucket not in self.due
                self.due[bucket] = used or frozenset()
            case Update(bucket):
                assert bucket in self._waited
                assert self._last[bucket] is AP
                del self.due[bucket]
            case Forget():
                assert self.schedule.phase is not Phase.IDLE

    def _check_start(self, operation: Operation, bucket: int) -> None:
        assert bucket not in self.due, "its buffer holds parameters that are due"
        if operation is RS:
            self._placed.discard(bucket)
            self.updated.clear()
        elif operation is AG:
            assert self._last[bucket] is RS, "there is nothing to gather"
            assert bucket not in self._placed, "parameters would be gathered as gradients"
        else:
            assert bucket in self._placed, "gradients would be gathered as parameters"


def together(workers: Sequence[Worker], histories: Sequence[Iterable[Event]]) -> list[Answer]:
    """Run all; whoever hears waits until all have said something. Return what they heard."""
    runs = [worker.run(events) for worker, events in zip(workers, histories, strict=True)]
    said = [next(run, None) for run in runs]
    heard = []
    while any(said):
        assert all(said), f"one waits for ever: {said}"
        used = frozenset[int]().union(*(each[1] for each in said if each))
        heard.append(Answer(tuple(each[0] for each in said if each), used))
        said = [_send(run, heard[-1]) for run in runs]
    return heard


def _send(run: Generator[Said, Answer, None], answer: Answer) -> Said | None:
    try:
        return run.send(answer)
    except StopIteration:
        return None


def planned(chooser: random.Random) -> Planned:
    """Up to four buckets of up to three parameters; some may belong to another optimizer."""
    buckets = chooser.randint(1, 4)
    numbers = iter(range(100))
    members = tuple(
        frozenset(next(numbers) for _ in range(chooser.randint(0, 3))) for _ in range(buckets)
    )
    return Planned(tuple(chooser.sample(range(buckets), buckets)), members)


def backward(buckets: int) -> Iterator[Event]:
    yield BackwardBegins()
    yield from (BucketReady(bucket) for bucket in range(buckets))
    yield BackwardEnds()


def iteration(
    plan: Planned, common: random.Random, own: random.Random, follower: bool
) -> Iterator[Event]:
    """What all do alike; in between everyone looks at gradients and parameters as he likes."""

    def looks() -> Iterator[Event]:
        if not follower and own.random() < 0.3:
            yield GradientsNeeded()

    buckets = len(plan.members)
    every = frozenset[int]().union(*plan.members)
    accumulates = common.random() < 0.2
    for _ in range(1 if follower or not accumulates else 2):
        for bucket in own.sample(range(buckets), own.randint(0, buckets)):
            yield ParametersNeeded((bucket,))
        yield from backward(buckets)
        yield from looks()
    if common.random() < 0.3 and not follower:
        yield PartsNeeded(Intent.CLIP)
    elif common.random() < 0.3 and not follower:
        yield PartsNeeded(Intent.SCALE)
    yield from looks()
    if follower:
        yield OthersStep()
    elif common.random() < 0.8:
        yield StepCalled(used=frozenset(i for i in every if own.random() < 0.7))
    else:
        yield GradientsDropped()


@settings(max_examples=6000)
@given(st.integers(0, 10**9))
def test_workers_that_look_as_they_like_stay_in_step(seed: int) -> None:
    chooser = random.Random(seed)
    plan, size = planned(chooser), chooser.randint(1, 4)
    workers = [Worker(plan) for _ in range(size)]
    followers = chooser.randint(0, size - 1) if chooser.random() < 0.3 else 0
    for number in range(chooser.randint(1, 4)):
        histories = []
        for rank in range(size):
            common, own = random.Random(seed + number), random.Random(seed + 31 * number + rank)
            if followers:
                common.random = lambda: 0.5  # type: ignore[method-assign]  # join accumulates not
            histories.append(iteration(plan, common, own, rank < followers))
        heard = together(workers, histories)
        assert all(worker.started == workers[0].started for worker in workers)
        assert all(worker.due == workers[0].due for worker in workers)
        if heard and Intent.STEP in heard[-1].doing:
            _check_step(workers, plan, heard[-1].used)
        for worker in workers:
            assert worker.schedule.phase is Phase.IDLE


def _check_step(workers: Sequence[Worker], plan: Planned, used: frozenset[int]) -> None:
    """Every worker updates its part of what anybody has used, once, and has it all taken over."""
    for worker in workers:
        assert sorted(worker.updated) == [(b, used & m) for b, m in enumerate(plan.members)]
        assert worker.due == {b: used & m for b, m in enumerate(plan.members) if used & m}


PLAN = Planned((1, 0), (frozenset({0, 1}), frozenset({2})))


def after(*events: Event) -> Worker:
    worker = Worker(PLAN)
    together([worker], [[*backward(2), *events]])
    worker.told.clear()
    return worker


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (StepCalled(), GradientsDropped()),
        (StepCalled(), PartsNeeded(Intent.CLIP)),
        (PartsNeeded(Intent.SCALE), PartsNeeded(Intent.CLIP)),
        (BackwardBegins(), StepCalled()),
    ],
)
def test_workers_that_do_something_else_hear_of_it(one: Event, other: Event) -> None:
    with pytest.raises(UsageError, match=r"rank 0 .* while rank 1 .* all ranks must do the same"):
        together([after(), after()], [[one], [other]])


def test_what_is_certain_is_updated_before_the_others_are_heard() -> None:
    worker = after()
    together([worker], [[StepCalled(used=frozenset({0, 1}))]])
    assert worker.told == [
        Say(Intent.STEP, frozenset({0, 1})),
        Wait(0, whole=False),
        UpdateOwn(0, frozenset({0, 1})),
        Hear(),
        Wait(1, whole=False),
        UpdateOwn(1, frozenset({0, 1})),
        Place(0),
        Start(AP, 0),
        Defer(0, frozenset({0, 1})),
        Forget(frozenset({0, 1})),
    ]


def test_gradients_that_somebody_has_seen_are_stepped_on_when_all_are_heard() -> None:
    """He may have changed them, and those of workers without batches come with the answer."""
    worker = after(GradientsNeeded())
    together([worker], [[StepCalled(used=frozenset({0, 1, 2}))]])
    assert worker.told[:2] == [Say(Intent.STEP, frozenset({0, 1, 2})), Hear()]


def test_what_is_due_is_taken_over_once() -> None:
    worker = after(StepCalled(used=frozenset({2})))
    together([worker], [[ParametersNeeded((0, 1)), ParametersNeeded((1,))]])
    assert worker.told == [Wait(1, whole=False), Update(1)]


def test_a_worker_without_batches_takes_part_and_is_given_what_it_lacks() -> None:
    leader, follower = after(), after()
    together([leader, follower], [[StepCalled(used=frozenset({2}))], [OthersStep()]])
    assert follower.started == leader.started
    shared = [command for command in follower.told if isinstance(command, Share)]
    assert [command.answer.intents for command in shared] == [(Intent.STEP, Intent.FOLLOW)]
    assert not [command for command in follower.told[:2] if isinstance(command, UpdateOwn)]


def test_gradients_added_to_ones_that_are_used_up_are_lost() -> None:
    worker = after(StepCalled(used=frozenset({2})))
    together([worker], [[*list(backward(2))[:-1], BackwardEnds(looked_at=True, lost=True)]])
    assert worker.schedule.phase is Phase.LOST
    together([worker], [[GradientsNeeded(), GradientsDropped()]])
    assert worker.schedule.phase is Phase.IDLE
    assert AG not in [operation for operation, _ in worker.started]


def test_dropped_gradients_are_forgotten_but_not_as_used_up() -> None:
    worker = after()
    together([worker], [[GradientsDropped()]])
    assert worker.told == [
        Say(Intent.DROP),
        Hear(),
        Wait(1, whole=False),
        Wait(0, whole=False),
        Forget(None),
    ]
    together([worker], [[GradientsDropped()]])
    assert len(worker.told) == 5, "there is nothing left to drop"


def test_gradients_that_are_whole_stay_what_they_are_when_they_are_dropped() -> None:
    worker = after(GradientsNeeded())
    together([worker], [[GradientsDropped()]])
    assert not [command for command in worker.told if isinstance(command, Forget)]
