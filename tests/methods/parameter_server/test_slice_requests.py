"""`RequestPlanner`: classes of requests, when thresholds change and by kind of layer."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import position_of, urgency_of
from wingbeat.methods.parameter_server.slicing import RequestPlanner
from wingbeat.schedules.events import Operation
from wingbeat.types import LayerPositions

FORWARD = [3, 2, 1, 0]
SIZES = [40, 30, 20, 10]
PLACES = LayerPositions((1, 2, 3, 4), 4)


def requests(fully_connected: tuple[bool, ...] = (False,) * 4, **options: object) -> RequestPlanner:
    made = RequestPlanner(Servers(**options), 2, seed=0)  # type: ignore[arg-type]
    made.set_buckets(SIZES, FORWARD, fully_connected, PLACES, 100)
    return made


def classes(made: RequestPlanner) -> list[int]:
    """The classes in which the sums of buckets 0 to 3 are to come."""
    asked = [made.requests(bucket) for bucket in range(4)]
    assert [position_of(each.ids.route) for own in asked for each in own[:1]] == [3, 2, 1, 0]
    found = [{urgency_of(each.ids.route) for each in own} for own in asked]
    return [own.pop() for own in found]


def test_pull_after_threshold_change_uses_new_class() -> None:
    made = requests(threshold=0.5)
    for bucket in range(4):
        made.begin(Operation.PUSH, bucket)
    pushed = [made.requests(bucket) for bucket in range(4)]
    assert classes(made) == [1, 1, 1, 0]
    made.priorities.set_thresholds((0.1,))
    assert [made.begin(Operation.PULL, bucket) for bucket in range(4)] == [[0], [1], [2], [3]]
    assert classes(made) == [1, 0, 0, 0]
    for bucket in range(4):
        for was, now in zip(pushed[bucket], made.requests(bucket), strict=True):
            assert was.ids[:3] == now.ids[:3], "the same slice of the same round"
            assert was.slice == now.slice


def test_set_buckets_keeps_thresholds() -> None:
    made = requests(threshold=0.5)
    made.priorities.set_thresholds((0.1,))
    made.set_buckets(SIZES, FORWARD, (False,) * 4, PLACES, 100)
    assert classes(made) == [1, 0, 0, 0]


@pytest.mark.parametrize("levels", [(), (0.5, 0.2), (1.2,), (0.2, 0.5, 0.1)])
def test_set_thresholds_of_wrong_count_raises(levels: tuple[float, ...]) -> None:
    made = requests(threshold=0.5)
    with pytest.raises(UsageError, match="thresholds="):
        made.priorities.set_thresholds(levels)
    made.set_buckets(SIZES, FORWARD, (False,) * 4, PLACES, 100)
    assert classes(made) == [1, 1, 1, 0]


def test_coarse_classes_put_fully_connected_buckets_last() -> None:
    made = requests((True, False, True, False), threshold="coarse")
    assert classes(made) == [1, 0, 1, 0]
    with pytest.raises(UsageError, match="by kind of layer"):
        made.priorities.set_thresholds(())
    made.set_buckets(SIZES, FORWARD, (True, True, False, False), PLACES, 100)
    assert classes(made) == [1, 1, 0, 0]


@pytest.mark.parametrize("coarse", [False, True])
def test_push_class_is_own_or_last(coarse: bool) -> None:
    options = {"threshold": "coarse" if coarse else 0.5}
    kinds = (True, True, True, False)
    both = requests(kinds, **options)
    assert [both.requests(bucket)[0].urgency for bucket in range(4)] == [1, 1, 1, 0]
    sums = requests(kinds, pushes=False, **options)
    assert [sums.requests(bucket)[0].urgency for bucket in range(4)] == [1] * 4
    assert classes(sums) == [1, 1, 1, 0]
