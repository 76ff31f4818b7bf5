"""Deadlines that follow the steps of each worker."""

from __future__ import annotations

from wingbeat.methods.model_averaging.service import Patience


def steps(patience: Patience, worker: int, *seconds: float) -> float:
    """Let a worker make steps of such lengths; return the time at which it begins the next one."""
    now = 0.0
    for each in seconds:
        patience.freed(worker, now)
        now += each
        patience.asked(worker, now)
    patience.freed(worker, now)
    return now


def test_a_first_step_may_take_as_long_as_meeting() -> None:
    patience = Patience(2, first_s=300.0)
    steps(patience, 1)
    assert not patience.overdue(1, 299.0)
    assert patience.overdue(1, 301.0)
    assert not patience.overdue(0, 999.0), "it computes nothing"


def test_later_ones_follow_the_usual_step_of_their_own_worker() -> None:
    patience = Patience(2, first_s=300.0, factor=8.0, least_s=2.0)
    quick, slow = steps(patience, 0, 1.0), steps(patience, 1, 10.0)
    assert not patience.overdue(0, quick + 7.9)
    assert patience.overdue(0, quick + 8.1)
    assert not patience.overdue(1, slow + 79.0)
    assert patience.overdue(1, slow + 81.0)


def test_a_long_step_counts_for_a_while() -> None:
    patience = Patience(1, first_s=300.0, factor=8.0, least_s=2.0)
    steps(patience, 0, 1.0, 10.0, 1.0)
    assert patience.deadline_s(0) == 8 * 9.0
    steps(patience, 0, *[1.0] * 30)
    assert patience.deadline_s(0) == 8 * 1.0


def test_first_step_counts_until_there_is_another() -> None:
    patience = Patience(1, first_s=300.0, factor=8.0, least_s=2.0)
    steps(patience, 0, 10.0)
    assert patience.deadline_s(0) == 8 * 10.0
    steps(patience, 0, 1.0)
    assert patience.deadline_s(0) == 8 * 1.0


def test_short_steps_have_a_least_deadline() -> None:
    patience = Patience(1, first_s=300.0, factor=8.0, least_s=2.0)
    now = steps(patience, 0, 0.001)
    assert not patience.overdue(0, now + 1.9)
    assert patience.overdue(0, now + 2.1)
    assert patience.unusual(0, now + 0.01)
    assert not patience.unusual(0, now + 0.0015)


def test_who_waits_is_never_late_and_who_is_gone_begins_anew() -> None:
    patience = Patience(1, first_s=300.0)
    now = steps(patience, 0, 1.0)
    patience.asked(0, now + 1.0)
    assert not patience.overdue(0, now + 1e6)
    patience.freed(0, now)
    patience.gone(0)
    assert patience.deadline_s(0) == 300.0
    assert not patience.overdue(0, now + 1e6)
