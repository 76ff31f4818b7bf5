"""Classes of buckets by thresholds of urgency."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.servers.tables import Places, PriorityTable, places_of, urgency_level
from wingbeat_lab.pull_order import classes_by_urgency

LEVELS = st.builds(lambda n, d: min(n, d) / d, st.integers(0, 60), st.integers(1, 60)) | st.floats(
    0, 1
)


def each_its_own(layers: int) -> Places:
    """Every bucket is one layer."""
    return Places(tuple(range(1, layers + 1)), layers)


def falling(levels: list[float]) -> list[float]:
    return sorted(set(levels), reverse=True)


@given(st.integers(1, 60), st.lists(LEVELS, max_size=3).map(falling))
def test_classes_are_those_that_the_model_of_orders_has(layers: int, levels: list[float]) -> None:
    table = PriorityTable(each_its_own(layers), levels)
    assert [table[place] for place in range(layers)] == classes_by_urgency(layers, levels)


def test_a_level_that_is_met_exactly_is_not_exceeded() -> None:
    assert urgency_level(7, 10) == 0.3
    assert PriorityTable(each_its_own(10), [0.3])[6] == 1
    assert PriorityTable(each_its_own(10), [0.3])[5] == 0


def test_urgency_is_by_layer_whatever_buckets_there_are() -> None:
    """Section III-C: 1 - l/L for layer l of L. A bucket is needed when its first layer is."""
    buckets = [
        ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"],
        ["conv3.weight"],
        ["conv3.bias", "fc1.bias"],
        ["fc1.weight"],
        ["fc2.weight", "fc2.bias"],
    ]
    places = places_of(buckets)
    assert places == Places((1, 3, 3, 4, 5), 5)
    # The third layer's urgency is 0.4, by buckets it would be 0.6 and 0.4.
    assert [PriorityTable(places, [0.5])[bucket] for bucket in range(5)] == [0, 1, 1, 1, 1]
    assert [PriorityTable(places, [0.3])[bucket] for bucket in range(5)] == [0, 0, 0, 1, 1]


def test_entries_are_made_anew_when_thresholds_change_and_only_then() -> None:
    table = PriorityTable(each_its_own(4), [0.5])
    assert [table[place] for place in range(4)] == [0, 1, 1, 1]
    assert [table[place] for place in range(4)] == [0, 1, 1, 1]
    table.set([0.6, 0.2])
    assert table.thresholds == (0.6, 0.2)
    assert [table[place] for place in range(4)] == [0, 1, 1, 2]
    table.set([])
    assert [table[place] for place in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("levels", [[0.2, 0.5], [0.5, 0.5], [1.1], [-0.1], [math.nan]])
def test_thresholds_that_do_not_fall_from_1_to_0_are_refused(levels: list[float]) -> None:
    table = PriorityTable(each_its_own(4), [0.5])
    with pytest.raises(UsageError, match="allowed are falling numbers from 1 to 0"):
        table.set(levels)
    assert table.thresholds == (0.5,), "and nothing has changed"
    assert table[0] == 0
