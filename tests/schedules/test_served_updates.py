"""Servers that update, in words: what is said and started, and in which order."""

from __future__ import annotations

import pytest

from contracts.schedules.play import PULL, PUSH, Worker, backward, together
from wingbeat.schedules import ServedUpdates, ServedUpdatesAtStart
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
    Hand,
    Operation,
    OthersStep,
    PartsNeeded,
    Phase,
    Planned,
    Start,
    StepCalled,
    UpdateServers,
    Wait,
)
from wingbeat.schedules.intents import Answer, Intent

PLAN = Planned((1, 0), (frozenset({0, 1}), frozenset({2})))


def after(*events: Event, kind: type[ServedUpdates] = ServedUpdates) -> Worker:
    worker = Worker(kind(), PLAN)
    together([worker], [[*backward(2), *events]])
    worker.told.clear()
    return worker


@pytest.mark.parametrize(
    ("kind", "operation"),
    [(ServedUpdates, Operation.EXPECT), (ServedUpdatesAtStart, Operation.FETCH)],
)
def test_a_step_asks_for_parameters_before_the_servers_are_told(
    kind: type[ServedUpdates], operation: Operation
) -> None:
    """What comes unasked must be expected when it comes."""
    worker = after(kind=kind)
    used = frozenset({0, 2})
    together([worker], [[StepCalled(used=used)]])
    answer = Answer((Intent.STEP,), used)
    assert worker.told == [
        Announce(Intent.STEP, used),
        Await(),
        Hand(answer),
        Forget(used),
        Start(operation, 1),
        Defer(1, frozenset({2})),
        Start(operation, 0),
        Defer(0, frozenset({0})),
        UpdateServers(answer, operation is Operation.EXPECT),
    ]


@pytest.mark.parametrize("event", [GradientsNeeded(), PartsNeeded(Intent.CLIP)])
def test_to_look_or_to_clip_brings_the_sums_once(event: Event) -> None:
    worker = after(event, event)
    assert [each for each in worker.started if each[0] is PUSH] == [(PUSH, 0), (PUSH, 1)]
    assert worker._last == {0: PULL, 1: PULL}
    assert worker.schedule.phase is Phase.WHOLE


def test_whoever_drops_gradients_or_follows_one_who_does_waits_for_all_pushes() -> None:
    one, other = after(), after()
    together([one, other], [[GradientsDropped()], [OthersStep()]])
    for worker in (one, other):
        assert worker._last == {0: PULL, 1: PULL}
        assert worker.schedule.phase is Phase.IDLE


def test_so_does_whoever_has_lost_some() -> None:
    worker = after(StepCalled(used=frozenset({2})))
    lost = [*list(backward(2))[:-1], BackwardEnds(lost=True)]
    together([worker], [lost])
    worker.told.clear()
    together([worker], [[BackwardBegins()]])
    assert worker.told[:4] == [Start(Operation.PULL, 1), Start(Operation.PULL, 0), Wait(1), Wait(0)]
    worker = after(StepCalled(used=frozenset({2})))
    together([worker], [[*lost, GradientsDropped()]])
    assert worker._last == {0: PULL, 1: PULL}
