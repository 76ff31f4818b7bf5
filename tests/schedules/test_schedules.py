"""What each schedule says, in words."""

from __future__ import annotations

import pytest

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
    ParametersNeeded,
    PartsNeeded,
    Planned,
    Start,
    StepCalled,
    Update,
    Wait,
)


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


PULLS = ["pull 1", "pull 0"]
WAITS = ["wait 1", "wait 0"]


def test_sums_that_others_look_at_are_asked_for_at_once_and_once() -> None:
    """Another optimizer's gradients are shown as soon as backward ends."""
    looked_at = (*BACKWARD[:-1], BackwardEnds(looked_at=True))
    assert lines("served", *looked_at) == []
    assert lines("served_at_start", *looked_at) == PULLS
    assert lines("served_at_start", *looked_at, StepCalled()) == ["defer 1", "defer 0"]
    assert lines("served_at_start", *looked_at, GradientsNeeded()) == [*WAITS, "show"]
    assert lines("served_at_start", *looked_at, GradientsDropped()) == []
    again = (*looked_at, StepCalled(), *BACKWARD)
    assert lines("served_at_start", *again, StepCalled())[:2] == PULLS


def test_served_in_words() -> None:
    assert lines("served", BackwardBegins()) == ["show"]
    assert lines("served", *BACKWARD[:2]) == ["all_reduce 0"]
    assert lines("served", *BACKWARD) == []
    assert lines("served", *BACKWARD, StepCalled()) == ["defer 1", "defer 0"]
    assert lines("served", *BACKWARD, GradientsNeeded()) == [*WAITS, "show"]
    assert lines("served", *BACKWARD, PartsNeeded(), GradientsNeeded()) == [], "they are there"
    assert lines("served", *BACKWARD, GradientsDropped()) == []
    stepped = (*BACKWARD, StepCalled())
    assert lines("served", *stepped, ParametersNeeded((0,))) == ["wait 0", "update 0"]
    assert lines("served", *stepped, ParametersNeeded((0,)), ParametersNeeded((0,))) == []
    assert lines("served", *stepped, BackwardBegins()) == [
        *("wait 1", "update 1", "wait 0", "update 0", "show")
    ]


def test_served_at_start_asks_once_for_each_sum_first_needed_first() -> None:
    name = "served_at_start"
    assert lines(name, *BACKWARD[:2]) == ["push 0"]
    assert lines(name, *BACKWARD) == []
    assert lines(name, *BACKWARD, StepCalled()) == [*PULLS, "defer 1", "defer 0"]
    assert lines(name, *BACKWARD, StepCalled(), ParametersNeeded((1,))) == ["wait 1", "update 1"]
    assert lines(name, *BACKWARD, GradientsNeeded()) == [*PULLS, *WAITS, "show"]
    assert lines(name, *BACKWARD, GradientsNeeded(), GradientsDropped()) == []
    assert lines(name, *BACKWARD, StepCalled(in_parts=False)) == [
        *(*PULLS, *WAITS, "show", "show", "step")
    ]
    assert lines(name, *BACKWARD, BackwardBegins()) == [*PULLS, *WAITS, "show"], "it adds to them"


def test_sums_that_nobody_wants_are_asked_for_so_that_the_next_are_not_pushed_too_early() -> None:
    assert lines("served_at_start", *BACKWARD, GradientsDropped()) == PULLS
    again = (*BACKWARD, GradientsDropped(), BackwardBegins())
    assert lines("served_at_start", *again) == [*WAITS, "show"], "once"


@pytest.mark.parametrize("name", ["served", "served_at_start", "dear"])
def test_who_drops_gradients_waits_for_them_before_the_next_backward(name: str) -> None:
    """They carry every worker's number of steps, and nobody has looked at these."""
    dropped = (*BACKWARD, GradientsDropped(), BackwardBegins())
    assert lines(name, *dropped) == [*WAITS, "show"]
    assert lines(name, *dropped, *BACKWARD[1:], StepCalled())[-2:] == ["defer 1", "defer 0"]


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


def test_stale_in_words() -> None:
    """Nobody waits: gradients leave as they come, and a step is made on what has come."""
    assert lines("stale", *BACKWARD[:2]) == ["contribute 0"]
    assert lines("stale", *BACKWARD) == []
    assert lines("stale", *BACKWARD, StepCalled()) == ["step"]
    for event in (GradientsNeeded(), PartsNeeded(), GradientsDropped(), ParametersNeeded((0,))):
        assert lines("stale", *BACKWARD, event) == []
