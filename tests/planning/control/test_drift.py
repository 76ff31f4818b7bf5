"""When to measure and when to plan anew: driven by iteration times that the test makes up."""

from __future__ import annotations

import pytest

from wingbeat.errors import PeerError
from wingbeat.planning.control.drift import SETTLING, WINDOW, Drift


def _planned(factor: float = 1.5) -> Drift:
    drift = Drift(2, factor)
    _plan_twice(drift, 0.1)
    return drift


def _plan_twice(drift: Drift, seconds: float) -> None:
    for first in (True, False):
        assert drift.watching
        assert drift.first is first
        while not drift.due():
            drift.lap(seconds)
        drift.planned()


def _window(drift: Drift, seconds: float, others: list[float] | None = None) -> object:
    """Live through one window; what all workers' medians lead to."""
    for _ in range(SETTLING + WINDOW):
        assert not drift.reports()
        drift.lap(seconds)
    assert drift.reports()
    return drift.take([drift.median(), *(others or [])])


@pytest.mark.parametrize("steps", [1, 10])
def test_planning_is_due_after_the_measured_iterations(steps: int) -> None:
    drift = Drift(steps, 1.5)
    boundaries = 0
    while not drift.due():
        drift.lap(0.1)
        boundaries += 1
    # The first boundary has no iteration before it.
    assert boundaries == 1 + SETTLING + steps
    drift.planned()
    assert drift.watching, "measured again under the plan"
    while not drift.due():
        drift.lap(0.1)
    drift.planned()
    assert not drift.watching
    assert not drift.due()


def test_a_known_plan_is_not_measured_again() -> None:
    drift = Drift(2, 1.5)
    drift.planned(known=True)
    assert not drift.watching


def test_the_first_iterations_do_not_count() -> None:
    drift = Drift(3, 1.5)
    for seconds in (0.0, 9.0, 9.0, 0.1, 0.2, 0.3):
        drift.lap(seconds)
    assert drift.median() == 0.2


def test_times_that_stay_change_nothing() -> None:
    drift = _planned()
    for seconds in (0.1, 0.14, 0.07, 0.1):
        assert _window(drift, seconds) is None
        assert not drift.watching


@pytest.mark.parametrize("seconds", [0.16, 0.06])
def test_times_that_drift_begin_it_anew(seconds: float) -> None:
    drift = _planned()
    assert _window(drift, 0.1) is None
    assert _window(drift, seconds) == (0.1, seconds)
    _plan_twice(drift, seconds)
    assert _window(drift, seconds) is None
    assert _window(drift, seconds) is None


def test_only_windows_in_a_row_count_where_several_are_asked_for() -> None:
    drift = Drift(0, 1.5, windows=2)
    drift.planned(known=True)
    for seconds in (0.1, 0.2, 0.1, 0.2, 0.14):
        assert _window(drift, seconds) is None
    assert _window(drift, 0.2) is None
    assert not drift.watching
    assert _window(drift, 0.3) == (0.1, 0.3)
    drift.planned(known=True)
    assert _window(drift, 0.3) is None
    assert _window(drift, 0.9) is None, "nothing is left of the windows before"


def test_the_slowest_worker_counts() -> None:
    drift = _planned()
    assert _window(drift, 0.1, [0.2]) is None
    assert _window(drift, 0.1, [0.31]) == (0.2, 0.31)


def test_a_few_slow_iterations_are_no_drift() -> None:
    drift = _planned()
    assert _window(drift, 0.1) is None
    for number in range(SETTLING + WINDOW):
        drift.lap(5.0 if number % 3 == 0 else 0.1)
    assert drift.take([drift.median()]) is None


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), 1e10])
def test_a_worker_that_sends_no_time_is_named(value: float) -> None:
    drift = _planned()
    with pytest.raises(PeerError, match="rank 1 sent"):
        drift.take([0.1, value])
