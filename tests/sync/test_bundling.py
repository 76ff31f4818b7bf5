"""What is measured of layers, and what colayers it makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import PeerError
from wingbeat.sync.bundling import Bundling, width_of
from wingbeat.transport import loopback
from wingbeat.types import Fusion


def bundling(count: int = 2) -> Bundling:
    """Return what measures four layers of equal size, the last of which is ready first."""
    (world,) = loopback.worlds(1)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    fusion = Fusion(kind="colayers", layers=count, measured=True)
    bucketing = Bucketing(model, fusion, world, lockstep=False)
    bucketing.build()
    return Bundling(bucketing, lambda: None)


def test_the_medians_of_all_workers_decide() -> None:
    one = bundling()
    early, late = [3.0, 2.0, 1.0, 0.0], [9.0, 8.0, 1.0, 0.0]
    unknown = [None] * 4
    # By times: what takes long is apart.
    assert one.choose([[late, unknown], [late, unknown], [early, unknown]]) == ((3, 2), (1, 0))
    assert one.choose([[[99.0, 2.0, 1.0, 0.0], unknown], [None, unknown]]) == ((3, 2, 1), (0,))
    # By widths.
    wide: list[Any] = [0.0, -9.0, -9.0, -9.0]
    assert one.choose([[early, wide], [early, wide], [early, unknown]]) == ((3, 2, 1), (0,))


def test_nothing_is_chosen_where_nobody_has_measured() -> None:
    one = bundling()
    assert one.choose([one.own(), one.own()]) is None


def test_what_a_worker_has_measured_is_by_tensor_and_stops_when_it_is_used() -> None:
    one = bundling()
    for index in (3, 2, 1, 0):
        if index == 3:
            one.passes.begin()
        one.passes.enter(index)
        one.passes.leave()
    one.passes.end()
    for slot in one._bucketing.slots:
        slot.used = True
        slot.view.fill_(math.exp(slot.index))
    one.look(one._bucketing.buckets[0])
    ready, widths = one.own()
    assert ready is not None
    assert ready == sorted(ready, reverse=True)
    assert widths == [None, None, pytest.approx(2.0), pytest.approx(3.0)]
    one.follow(((3,), (2, 1, 0)))
    one.look(one._bucketing.buckets[1])
    assert one.own()[1][:2] == [None, None]
    one._bucketing.rebuild()
    assert [[s.index for s in b.slots] for b in one._bucketing.buckets] == [[3], [2, 1, 0]]


@pytest.mark.parametrize(
    "told",
    [None, [], [[0.0] * 4], [[0.0] * 3, [None] * 4], [[0.0] * 4, [None] * 5],
     [["0"] * 4, [None] * 4], [[math.nan] * 4, [None] * 4], [[0.0] * 4, [True] * 4], [7, 7]],
)  # fmt: skip
def test_what_is_no_measurement_is_refused(told: Any) -> None:
    with pytest.raises(PeerError, match="is nothing measured of 4 gradients"):
        bundling().choose([told])


def test_a_width_is_that_of_nearly_all_values() -> None:
    values = torch.ones(100_000)
    values[:20] = 1e6
    assert width_of(values) == pytest.approx(0.0)
    assert width_of(values * -math.e) == pytest.approx(1.0)
    assert width_of(torch.zeros(0)) is None
    assert width_of(torch.full((3,), math.inf)) is None
