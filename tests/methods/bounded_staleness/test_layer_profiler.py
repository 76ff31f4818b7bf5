"""Measurements of layers, and the colayers that follow from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.colayers import LayerProfiler, gradient_width
from wingbeat.transport import loopback
from wingbeat.types import Fusion


def make_profiler(count: int = 2) -> LayerProfiler:
    """Return a profiler of four layers of equal size; the last one is ready first."""
    (world,) = loopback.worlds(1)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    fusion = Fusion(kind="colayers", layers=count, measured=True)
    bucketing = Bucketing(model, fusion, world, lockstep=False)
    bucketing.build()
    return LayerProfiler(bucketing, lambda: None)


def test_choose_colayers_uses_medians() -> None:
    one = make_profiler()
    early, late = [3.0, 2.0, 1.0, 0.0], [9.0, 8.0, 1.0, 0.0]
    unknown = [None] * 4
    # By times: a slow layer is a colayer of its own.
    assert one.choose_colayers([[late, unknown], [late, unknown], [early, unknown]]) == (
        (3, 2),
        (1, 0),
    )
    assert one.choose_colayers([[[99.0, 2.0, 1.0, 0.0], unknown], [None, unknown]]) == (
        (3, 2, 1),
        (0,),
    )
    # By widths.
    wide: list[Any] = [0.0, -9.0, -9.0, -9.0]
    assert one.choose_colayers([[early, wide], [early, wide], [early, unknown]]) == (
        (3, 2, 1),
        (0,),
    )


def test_choose_colayers_without_measurements_returns_none() -> None:
    one = make_profiler()
    assert one.choose_colayers([one.measurements(), one.measurements()]) is None


def test_measurements_are_by_tensor_until_colayers_are_set() -> None:
    one = make_profiler()
    for index in (3, 2, 1, 0):
        if index == 3:
            one.passes.begin()
        one.passes.enter(index)
        one.passes.leave()
    one.passes.end()
    for slot in one._bucketing.slots:
        slot.used = True
        slot.view.fill_(math.exp(slot.index))
    one.measure_widths(one._bucketing.buckets[0])
    ready, widths = one.measurements()
    assert ready is not None
    assert ready == sorted(ready, reverse=True)
    assert widths == [None, None, pytest.approx(2.0), pytest.approx(3.0)]
    one.set_colayers(((3,), (2, 1, 0)))
    one.measure_widths(one._bucketing.buckets[1])
    assert one.measurements()[1][:2] == [None, None]
    one._bucketing.rebuild()
    assert [[s.index for s in b.slots] for b in one._bucketing.buckets] == [[3], [2, 1, 0]]


@pytest.mark.parametrize(
    "told",
    [None, [], [[0.0] * 4], [[0.0] * 3, [None] * 4], [[0.0] * 4, [None] * 5],
     [["0"] * 4, [None] * 4], [[math.nan] * 4, [None] * 4], [[0.0] * 4, [True] * 4], [7, 7]],
)  # fmt: skip
def test_malformed_measurements_are_rejected(told: Any) -> None:
    with pytest.raises(PeerError, match="as the measurements of 4 gradients"):
        make_profiler().choose_colayers([told])


def test_gradient_width_is_high_quantile() -> None:
    values = torch.ones(100_000)
    values[:20] = 1e6
    assert gradient_width(values) == pytest.approx(0.0)
    assert gradient_width(values * -math.e) == pytest.approx(1.0)
    assert gradient_width(torch.zeros(0)) is None
    assert gradient_width(torch.full((3,), math.inf)) is None
