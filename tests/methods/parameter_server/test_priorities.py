"""Traffic classes of buckets by thresholds of urgency."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.slicing import (
    BucketPriorities,
    layer_positions,
    priority_classes,
    urgency_level,
)
from wingbeat.types import LayerPositions
from wingbeat_lab.pull_order import classes_by_urgency

LEVELS = st.builds(lambda n, d: min(n, d) / d, st.integers(0, 60), st.integers(1, 60)) | st.floats(
    0, 1
)


def each_its_own(layers: int) -> LayerPositions:
    """Every bucket is one layer."""
    return LayerPositions(tuple(range(1, layers + 1)), layers)


def falling(levels: list[float]) -> list[float]:
    return sorted(set(levels), reverse=True)


@given(st.integers(1, 60), st.lists(LEVELS, max_size=3).map(falling))
def test_priority_classes_equal_plan_model(layers: int, levels: list[float]) -> None:
    classes = priority_classes(each_its_own(layers), levels)
    assert list(classes) == classes_by_urgency(layers, levels)


def test_priority_classes_at_threshold_are_not_urgent() -> None:
    assert urgency_level(7, 10) == 0.3
    assert priority_classes(each_its_own(10), [0.3])[6] == 1
    assert priority_classes(each_its_own(10), [0.3])[5] == 0


def test_priority_classes_depend_on_layers() -> None:
    """Section III-C: 1 - l/L for layer l of L. A bucket is needed when its first layer is."""
    buckets = [
        ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"],
        ["conv3.weight"],
        ["conv3.bias", "fc1.bias"],
        ["fc1.weight"],
        ["fc2.weight", "fc2.bias"],
    ]
    places = layer_positions(buckets)
    assert places == LayerPositions((1, 3, 3, 4, 5), 5)
    # The third layer's urgency is 0.4, by buckets it would be 0.6 and 0.4.
    assert priority_classes(places, [0.5]) == (0, 1, 1, 1, 1)
    assert priority_classes(places, [0.3]) == (0, 0, 0, 1, 1)


def test_set_thresholds_changes_classes() -> None:
    priorities = BucketPriorities(Servers(threshold=0.5))
    priorities.set_buckets((False,) * 4, each_its_own(4))
    assert priorities.classes == (0, 1, 1, 1)
    priorities.set_thresholds([0.2])
    assert priorities.thresholds == (0.2,)
    assert priorities.classes == (0, 0, 0, 1)
    assert priority_classes(each_its_own(4), [0.6, 0.2]) == (0, 1, 1, 2)
    assert priority_classes(each_its_own(4), []) == (0, 0, 0, 0)


@pytest.mark.parametrize("levels", [[0.2, 0.5], [0.5, 0.5], [1.1], [-0.1], [math.nan]])
def test_set_thresholds_with_invalid_levels_raises(levels: list[float]) -> None:
    count = len(levels)
    start = (0.5, 0.2)[:count]
    priorities = BucketPriorities(Servers(classes=count + 1, threshold=start))
    priorities.set_buckets((False,) * 4, each_its_own(4))
    before = priorities.classes
    with pytest.raises(UsageError, match="allowed are falling numbers from 1 to 0"):
        priorities.set_thresholds(levels)
    assert priorities.thresholds == start
    assert priorities.classes == before
