"""The staleness bound, and the straggler detector."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.bound import (
    STRAGGLER_WINDOW,
    StalenessBound,
    StragglerDetector,
)


@pytest.mark.parametrize(
    ("s", "p", "mode"),
    [(0, 10, "BSP"), (3, 10, "SSP"), (3, 6, "PGE"), (0, 6, "PGE"), (None, 10, "ASP"),
     (None, 1, "ASP")],
)  # fmt: skip
def test_mode_follows_from_thresholds(s: int | None, p: int, mode: str) -> None:
    assert StalenessBound(s, p, 10).mode == mode


def test_outdated_beyond_s_unless_p_colayers_exchanged() -> None:
    bound = StalenessBound(18, 6, 10)
    assert not bound.is_outdated(18, 0)  # still within the bound (line 19)
    assert bound.is_outdated(19, 5)
    assert not bound.is_outdated(19, 6)


@pytest.mark.parametrize(
    "bound", [StalenessBound(0, 4, 4), StalenessBound(2, 4, 4), StalenessBound(None, 1, 4)]
)
def test_other_modes_drop_nothing(bound: StalenessBound) -> None:
    assert not any(bound.is_outdated(staleness, 0) for staleness in range(100))


def test_last_computed_is_limited_by_s() -> None:
    assert StalenessBound(2, 1, 4).last_computed(5, 6) == 6
    assert StalenessBound(2, 1, 4).last_computed(5, 9) == 7
    assert StalenessBound(None, 1, 4).last_computed(5, 9) == 9


@pytest.mark.parametrize(
    ("bound", "even", "uneven"),
    [
        (StalenessBound(0, 4, 4), 20, 20),
        (StalenessBound(1, 4, 4), 19, 19),
        (StalenessBound(18, 6, 10), 19, 18),
        (StalenessBound(18, 6, 10, in_flight=5), 19, 15),
        (StalenessBound(18, 6, 10, in_flight=1), 19, 19),
        (StalenessBound(18, 6, 10, in_flight=None), 2, 2),
        (StalenessBound(None, 4, 4), 19, 18),
        (StalenessBound(None, 4, 4, in_flight=None), 0, 0),
    ],
)
def test_rounds_required_by_bound_and_stragglers(
    bound: StalenessBound, even: int, uneven: int
) -> None:
    assert bound.rounds_required(20, stragglers=False) == even
    assert bound.rounds_required(20, stragglers=True) == uneven
    assert (
        bound.rounds_required(0, stragglers=False) == bound.rounds_required(0, stragglers=True) == 0
    )


def test_probing_iteration_goes_ahead_once_a_window() -> None:
    bound = StalenessBound(18, 6, 10)
    ahead = [
        i - bound.rounds_required(i, stragglers=False) for i in range(2, 2 + 3 * STRAGGLER_WINDOW)
    ]
    assert ahead.count(2) == 3
    assert ahead.count(1) == 3 * (STRAGGLER_WINDOW - 1)


def test_missing_worker_counts_as_straggler_for_window() -> None:
    detector = StragglerDetector()
    both, late = [(0, 0), (0, 1)], [(0, 0)]
    detector.observe_round(
        [both, late], 0, workers=(0, 1)
    )  # one piece of one colayer is sufficient
    for number in range(1, 1 + STRAGGLER_WINDOW):
        assert detector.found
        detector.observe_round([[(number, 0), (number, 1)]], number, workers=(0, 1))
    assert not detector.found


def test_late_contribution_does_not_hide_straggler() -> None:
    detector = StragglerDetector()
    detector.observe_round([[(2, 1), (3, 0)]], 3, workers=(0, 1))
    assert detector.found


def test_empty_rounds_are_even() -> None:
    detector = StragglerDetector()
    detector.observe_round([[], []], 3, workers=(0, 1))
    detector.observe_round([[(4, 0)]], 4, workers=(0,))  # the other has finished
    assert not detector.found


@pytest.mark.parametrize(
    ("s", "p", "colayers", "named"),
    [(-1, 1, 4, "s=-1"), (0, 0, 4, "p=0"), (0, 5, 4, "p=5"), (0, 1, 0, "colayers=0")],
)
def test_invalid_threshold_is_named(s: int, p: int, colayers: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        StalenessBound(s, p, colayers)


def test_in_flight_below_one_is_rejected() -> None:
    with pytest.raises(UsageError, match="in_flight=0; allowed: 1 or more rounds, or None"):
        StalenessBound(2, 1, 4, in_flight=0)
