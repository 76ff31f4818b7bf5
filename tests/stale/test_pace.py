"""The thresholds of bounded staleness, and what follows from them."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.stale.pace import Pace


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


def test_what_must_be_applied_before() -> None:
    assert Pace(0, 4, 4).first_needed(5) == 5
    assert Pace(3, 4, 4).first_needed(5) == 2
    assert Pace(3, 4, 4).first_needed(1) == 0
    assert Pace(None, 4, 4).first_needed(5) == 0


@pytest.mark.parametrize(
    ("s", "p", "colayers", "named"),
    [(-1, 1, 4, "s=-1"), (0, 0, 4, "p=0"), (0, 5, 4, "p=5"), (0, 1, 0, "colayers=0")],
)
def test_what_is_not_allowed_is_named(s: int, p: int, colayers: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Pace(s, p, colayers)
