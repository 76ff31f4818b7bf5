"""When to measure and when to plan again: driven by iteration times that the test makes up."""

from __future__ import annotations

import pytest

from wingbeat.errors import PeerError
from wingbeat.planning.trials import DRIFT_WARMUP, DRIFT_WINDOW, DriftDetector


def _planned(factor: float = 1.5) -> DriftDetector:
    drift = DriftDetector(2, factor)
    _plan_twice(drift, 0.1)
    return drift


def _plan_twice(drift: DriftDetector, seconds: float) -> None:
    for first in (True, False):
        assert drift.measuring
        assert drift.first is first
        while not drift.due():
            drift.count(seconds)
        drift.planned()


def _window(drift: DriftDetector, seconds: float, others: list[float] | None = None) -> object:
    """Live through one window; what all workers' medians lead to."""
    for _ in range(DRIFT_WARMUP + DRIFT_WINDOW):
        assert not drift.window_ended()
        drift.count(seconds)
    assert drift.window_ended()
    medians = [drift.median(), *(others or [])]
    return drift.compare(medians, range(len(medians)))


@pytest.mark.parametrize("steps", [1, 10])
def test_drift_planning_is_due_after_measured_iterations(steps: int) -> None:
    drift = DriftDetector(steps, 1.5)
    boundaries = 0
    while not drift.due():
        drift.count(0.1)
        boundaries += 1
    # The first boundary has no iteration before it.
    assert boundaries == 1 + DRIFT_WARMUP + steps
    drift.planned()
    assert drift.measuring, "measured again under the plan"
    while not drift.due():
        drift.count(0.1)
    drift.planned()
    assert not drift.measuring
    assert not drift.due()


def test_drift_known_plan_is_not_measured_again() -> None:
    drift = DriftDetector(2, 1.5)
    drift.planned(known=True)
    assert not drift.measuring


def test_drift_warmup_does_not_count() -> None:
    drift = DriftDetector(3, 1.5)
    for seconds in (0.0, 9.0, 9.0, 0.1, 0.2, 0.3):
        drift.count(seconds)
    assert drift.median() == 0.2


def test_drift_stable_times_change_nothing() -> None:
    drift = _planned()
    for seconds in (0.1, 0.14, 0.07, 0.1):
        assert _window(drift, seconds) is None
        assert not drift.measuring


@pytest.mark.parametrize("seconds", [0.16, 0.06])
def test_drift_changed_times_restart_measuring(seconds: float) -> None:
    drift = _planned()
    assert _window(drift, 0.1) is None
    assert _window(drift, seconds) == (0.1, seconds)
    _plan_twice(drift, seconds)
    assert _window(drift, seconds) is None
    assert _window(drift, seconds) is None


def test_drift_several_windows_have_to_be_consecutive() -> None:
    drift = DriftDetector(0, 1.5, windows=2)
    drift.planned(known=True)
    for seconds in (0.1, 0.2, 0.1, 0.2, 0.14):
        assert _window(drift, seconds) is None
    assert _window(drift, 0.2) is None
    assert not drift.measuring
    assert _window(drift, 0.3) == (0.1, 0.3)
    drift.planned(known=True)
    assert _window(drift, 0.3) is None
    assert _window(drift, 0.9) is None, "nothing is left of the windows before"


def test_drift_slowest_worker_counts() -> None:
    drift = _planned()
    assert _window(drift, 0.1, [0.2]) is None
    assert _window(drift, 0.1, [0.31]) == (0.2, 0.31)


def test_drift_few_slow_iterations_do_not_count() -> None:
    drift = _planned()
    assert _window(drift, 0.1) is None
    for number in range(DRIFT_WARMUP + DRIFT_WINDOW):
        drift.count(5.0 if number % 3 == 0 else 0.1)
    assert drift.compare([drift.median()], [0]) is None


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), 1e10])
def test_drift_invalid_median_names_sender(value: float) -> None:
    drift = _planned()
    with pytest.raises(PeerError, match="rank 3 sent"):
        drift.compare([0.1, value], [1, 3])
