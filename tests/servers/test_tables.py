"""Classes of buckets by thresholds of urgency."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.plans.order import classes_by_urgency
from wingbeat.servers.tables import PriorityTable, urgency_level

LEVELS = st.builds(lambda n, d: min(n, d) / d, st.integers(0, 60), st.integers(1, 60)) | st.floats(
    0, 1
)


def falling(levels: list[float]) -> list[float]:
    return sorted(set(levels), reverse=True)


@given(st.integers(1, 60), st.lists(LEVELS, max_size=3).map(falling))
def test_classes_are_those_that_the_model_of_orders_has(layers: int, levels: list[float]) -> None:
    table = PriorityTable(layers, levels)
    assert [table[place] for place in range(layers)] == classes_by_urgency(layers, levels)


def test_a_level_that_is_met_exactly_is_not_exceeded() -> None:
    assert urgency_level(7, 10) == 0.3
    assert PriorityTable(10, [0.3])[6] == 1
    assert PriorityTable(10, [0.3])[5] == 0


def test_entries_are_made_anew_when_thresholds_change_and_only_then() -> None:
    table = PriorityTable(4, [0.5])
    assert [table[place] for place in range(4)] == [0, 1, 1, 1]
    assert [table[place] for place in range(4)] == [0, 1, 1, 1]
    table.set([0.6, 0.2])
    assert table.thresholds == (0.6, 0.2)
    assert [table[place] for place in range(4)] == [0, 1, 1, 2]
    table.set([])
    assert [table[place] for place in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("levels", [[0.2, 0.5], [0.5, 0.5], [1.1], [-0.1], [math.nan]])
def test_thresholds_that_do_not_fall_from_1_to_0_are_refused(levels: list[float]) -> None:
    table = PriorityTable(4, [0.5])
    with pytest.raises(UsageError, match="allowed are falling numbers from 1 to 0"):
        table.set(levels)
    assert table.thresholds == (0.5,), "and nothing has changed"
    assert table[0] == 0
