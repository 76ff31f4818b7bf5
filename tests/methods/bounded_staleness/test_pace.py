"""The thresholds of bounded staleness, and what follows from them."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.pace import EVEN_ROUNDS, Even, Pace


@pytest.mark.parametrize(
    ("s", "p", "mode"),
    [(0, 10, "BSP"), (3, 10, "SSP"), (3, 6, "PGE"), (0, 6, "PGE"), (None, 10, "ASP"),
     (None, 1, "ASP")],
)  # fmt: skip
def test_modes(s: int | None, p: int, mode: str) -> None:
    assert Pace(s, p, 10).mode == mode


def test_dropped_beyond_s_unless_p_colayers_are_exchanged() -> None:
    pace = Pace(18, 6, 10)
    assert not pace.outdated(18, 0)  # still within the bound (line 19)
    assert pace.outdated(19, 5)
    assert not pace.outdated(19, 6)


@pytest.mark.parametrize("pace", [Pace(0, 4, 4), Pace(2, 4, 4), Pace(None, 1, 4)])
def test_nothing_is_dropped_in_other_modes(pace: Pace) -> None:
    assert not any(pace.outdated(staleness, 0) for staleness in range(100))


def test_how_far_others_may_compute() -> None:
    assert Pace(2, 1, 4).reached(5, 6) == 6
    assert Pace(2, 1, 4).reached(5, 9) == 7
    assert Pace(None, 1, 4).reached(5, 9) == 9


@pytest.mark.parametrize(
    ("pace", "even", "uneven"),
    [
        (Pace(0, 4, 4), 20, 20),
        (Pace(1, 4, 4), 19, 19),
        (Pace(18, 6, 10), 19, 18),
        (Pace(18, 6, 10, in_flight=5), 19, 15),
        (Pace(18, 6, 10, in_flight=1), 19, 19),
        (Pace(18, 6, 10, in_flight=None), 2, 2),
        (Pace(None, 4, 4), 19, 18),
        (Pace(None, 4, 4, in_flight=None), 0, 0),
    ],
)
def test_what_must_be_applied_before(pace: Pace, even: int, uneven: int) -> None:
    assert pace.first_needed(20, even=True) == even
    assert pace.first_needed(20, even=False) == uneven
    assert pace.first_needed(0, even=True) == pace.first_needed(0, even=False) == 0


def test_now_and_then_an_iteration_finds_out_who_is_slow() -> None:
    pace = Pace(18, 6, 10)
    ahead = [i - pace.first_needed(i, even=True) for i in range(2, 2 + 3 * EVEN_ROUNDS)]
    assert ahead.count(2) == 3
    assert ahead.count(1) == 3 * (EVEN_ROUNDS - 1)


def test_one_round_without_somebody_counts_for_some() -> None:
    even = Even()
    both, late = [(0, 0), (0, 1)], [(0, 0)]
    even.applied([both, late], 0, workers=(0, 1))  # one piece of one colayer is enough
    for number in range(1, 1 + EVEN_ROUNDS):
        assert not even.now
        even.applied([[(number, 0), (number, 1)]], number, workers=(0, 1))
    assert even.now


def test_late_gradients_do_not_stand_for_those_of_the_round() -> None:
    even = Even()
    even.applied([[(2, 1), (3, 0)]], 3, workers=(0, 1))
    assert not even.now


def test_rounds_that_nobody_has_anything_for_do_not_count() -> None:
    even = Even()
    even.applied([[], []], 3, workers=(0, 1))
    even.applied([[(4, 0)]], 4, workers=(0,))  # the other has ended
    assert even.now


@pytest.mark.parametrize(
    ("s", "p", "colayers", "named"),
    [(-1, 1, 4, "s=-1"), (0, 0, 4, "p=0"), (0, 5, 4, "p=5"), (0, 1, 0, "colayers=0")],
)
def test_what_is_not_allowed_is_named(s: int, p: int, colayers: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Pace(s, p, colayers)


def test_at_least_one_round_is_in_flight() -> None:
    with pytest.raises(UsageError, match="in_flight=0; allowed: 1 or more rounds, or None"):
        Pace(2, 1, 4, in_flight=0)
