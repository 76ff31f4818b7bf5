"""Timeouts that follow the step times of each worker."""

from __future__ import annotations

from wingbeat.methods.model_averaging.service import AdaptiveTimeout


def steps(timeouts: AdaptiveTimeout, worker: int, *seconds: float) -> float:
    """Let a worker make steps of such lengths; return the time at which it begins the next one."""
    now = 0.0
    for each in seconds:
        timeouts.start_step(worker, now)
        now += each
        timeouts.end_step(worker, now)
    timeouts.start_step(worker, now)
    return now


def test_first_step_has_the_timeout_of_connection_setup() -> None:
    timeouts = AdaptiveTimeout(2, first_s=300.0)
    steps(timeouts, 1)
    assert not timeouts.is_overdue(1, 299.0)
    assert timeouts.is_overdue(1, 301.0)
    assert not timeouts.is_overdue(0, 999.0), "it computes nothing"


def test_timeout_follows_the_usual_step_of_its_worker() -> None:
    timeouts = AdaptiveTimeout(2, first_s=300.0, factor=8.0, min_s=2.0)
    quick, slow = steps(timeouts, 0, 1.0), steps(timeouts, 1, 10.0)
    assert not timeouts.is_overdue(0, quick + 7.9)
    assert timeouts.is_overdue(0, quick + 8.1)
    assert not timeouts.is_overdue(1, slow + 79.0)
    assert timeouts.is_overdue(1, slow + 81.0)


def test_long_step_raises_the_timeout_for_a_while() -> None:
    timeouts = AdaptiveTimeout(1, first_s=300.0, factor=8.0, min_s=2.0)
    steps(timeouts, 0, 1.0, 10.0, 1.0)
    assert timeouts.timeout_s(0) == 8 * 9.0
    steps(timeouts, 0, *[1.0] * 30)
    assert timeouts.timeout_s(0) == 8 * 1.0


def test_first_step_counts_until_there_is_another() -> None:
    timeouts = AdaptiveTimeout(1, first_s=300.0, factor=8.0, min_s=2.0)
    steps(timeouts, 0, 10.0)
    assert timeouts.timeout_s(0) == 8 * 10.0
    steps(timeouts, 0, 1.0)
    assert timeouts.timeout_s(0) == 8 * 1.0


def test_timeout_has_a_lower_bound() -> None:
    timeouts = AdaptiveTimeout(1, first_s=300.0, factor=8.0, min_s=2.0)
    now = steps(timeouts, 0, 0.001)
    assert not timeouts.is_overdue(0, now + 1.9)
    assert timeouts.is_overdue(0, now + 2.1)
    assert timeouts.is_unusual(0, now + 0.01)
    assert not timeouts.is_unusual(0, now + 0.0015)


def test_waiting_worker_is_never_overdue_and_reset_forgets_its_steps() -> None:
    timeouts = AdaptiveTimeout(1, first_s=300.0)
    now = steps(timeouts, 0, 1.0)
    timeouts.end_step(0, now + 1.0)
    assert not timeouts.is_overdue(0, now + 1e6)
    timeouts.start_step(0, now)
    timeouts.reset(0)
    assert timeouts.timeout_s(0) == 300.0
    assert not timeouts.is_overdue(0, now + 1e6)
