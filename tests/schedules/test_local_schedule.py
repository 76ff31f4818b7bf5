"""When models are averaged, and when the average is taken over."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.schedules import Local
from wingbeat.schedules.events import (
    Adopt,
    Average,
    BackwardBegins,
    BackwardEnds,
    Command,
    GradientsDropped,
    Phase,
    Step,
    StepCalled,
)


def steps(schedule: Local, count: int) -> list[list[Command]]:
    return [list(schedule.react(StepCalled(in_parts=False))) for _ in range(count)]


def test_each_step_is_averaged_and_waits_for_that() -> None:
    assert steps(Local(), 2) == [[Step(), Average(0, 1), Adopt()]] * 2


def test_what_is_averaged_under_training_is_taken_over_before_the_next_step() -> None:
    assert steps(Local(delay=1), 3) == [
        [Step(), Average(0, 1)],
        [Adopt(), Step(), Average(0, 1)],
        [Adopt(), Step(), Average(0, 1)],
    ]


def test_now_and_then() -> None:
    assert steps(Local(every=3, delay=2), 7) == [
        [Step()],
        [Step()],
        [Step(), Average(0, 1)],
        [Step()],
        [Adopt(), Step()],
        [Step(), Average(0, 1)],
        [Step()],
    ]


def test_fragments_take_turns() -> None:
    told = itertools.chain(*steps(Local(every=6, fragments=3), 12))
    assert [command for command in told if isinstance(command, Average)] == [
        Average(1, 2),
        Average(2, 3),
        Average(0, 1),
    ] * 2


@given(
    every=st.integers(1, 40), delay=st.integers(0, 40), fragments=st.integers(1, 60), data=st.data()
)
def test_every_fragment_has_one_turn_and_one_average_is_under_way(
    every: int, delay: int, fragments: int, data: st.DataObject
) -> None:
    schedule = Local(every, min(delay, every), fragments)
    for _ in range(data.draw(st.integers(0, 3)) * every):
        list(schedule.react(StepCalled(in_parts=False)))
    under_way, turns = False, []
    begun = 0
    for number, told in enumerate(steps(schedule, 2 * every)):
        assert told.count(Step()) == 1
        for command in told:
            if isinstance(command, Adopt):
                under_way = False
            elif isinstance(command, Average):
                assert not under_way
                under_way, begun = True, number
                turns += range(command.first, command.last)
        assert not under_way or number - begun < schedule._delay
    assert sorted(turns) == sorted([*range(fragments)] * 2)


@pytest.mark.parametrize("event", [BackwardBegins(), BackwardEnds(), GradientsDropped()])
def test_gradients_are_nobody_elses(event: object) -> None:
    schedule = Local()
    assert not list(schedule.react(event))  # type: ignore[arg-type]
    assert schedule.phase is Phase.IDLE
