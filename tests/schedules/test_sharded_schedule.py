"""Sharded DeAR in words: what is said, and in which order."""

from __future__ import annotations

import pytest

from contracts.schedules.play import AG, AP, Worker, backward, together
from wingbeat.errors import UsageError
from wingbeat.schedules import ShardedDear
from wingbeat.schedules.events import (
    Announce,
    Await,
    BackwardBegins,
    BackwardEnds,
    Defer,
    Event,
    Forget,
    GradientsDropped,
    GradientsNeeded,
    OthersStep,
    ParametersNeeded,
    PartsNeeded,
    Phase,
    Place,
    Planned,
    Share,
    Start,
    StepCalled,
    Update,
    UpdateOwn,
    Wait,
)
from wingbeat.schedules.intents import Intent

PLAN = Planned((1, 0), (frozenset({0, 1}), frozenset({2})))


def after(*events: Event) -> Worker:
    worker = Worker(ShardedDear(), PLAN)
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
        Announce(Intent.STEP, frozenset({0, 1})),
        Wait(0, whole=False, read_only=True),
        UpdateOwn(0, frozenset({0, 1})),
        Await(),
        Wait(1, whole=False, read_only=True),
        UpdateOwn(1, frozenset({0, 1})),
        Forget(frozenset({0, 1})),
        Place(0),
        Start(AP, 0),
        Defer(0, frozenset({0, 1})),
    ]


def test_gradients_that_somebody_has_seen_are_stepped_on_when_all_are_heard() -> None:
    """He may have changed them, and those of workers without batches come with the answer."""
    worker = after(GradientsNeeded())
    together([worker], [[StepCalled(used=frozenset({0, 1, 2}))]])
    assert worker.told[:2] == [Announce(Intent.STEP, frozenset({0, 1, 2})), Await()]


def test_what_is_due_is_taken_over_once() -> None:
    worker = after(StepCalled(used=frozenset({2})))
    together([worker], [[ParametersNeeded((0, 1)), ParametersNeeded((1,))]])
    assert worker.told == [Wait(1, whole=False, read_only=True), Update(1)]


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
        Announce(Intent.DROP),
        Await(),
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
