"""Sizes that can make no difference are not tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.planning import plans
from wingbeat.planning.bucket_size import clip_range, largest_bucket, single_plan
from wingbeat.planning.plans import by_size
from wingbeat.types import Fusion, TensorSpec, Tuning

MB = 2**20


def tensor(nbytes: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec("w", (nbytes,), dtype, 1)


def tuning(low: float = 1, high: float = 100) -> Tuning:
    return Tuning(search="bo", low_bytes=int(low * MB), high_bytes=int(high * MB))


def test_clip_range_ends_at_largest_dtype() -> None:
    specs = [tensor(MB), tensor(2 * MB), tensor(MB, "float16")]
    assert largest_bucket(specs) == 3 * MB
    assert clip_range(tuning(), specs) == tuning(high=3)
    assert clip_range(tuning(high=2), specs) == tuning(high=2)
    assert clip_range(tuning(low=5), specs) == tuning(low=5, high=5)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=30),
    edges=st.tuples(st.integers(0, 400), st.integers(0, 400)),
    more=st.integers(0, 10_000),
)
def test_by_size_all_sizes_above_model_make_same_plan(sizes, edges, more) -> None:
    specs = [tensor(nbytes, "float16" if half else "float32") for nbytes, half in sizes]
    order = list(reversed(range(len(specs))))
    whole = largest_bucket(specs)
    assert by_size(specs, order, whole + more, *edges) == by_size(specs, order, whole, *edges)


@pytest.mark.parametrize(
    ("sizes_mb", "low", "high", "buckets"),
    [
        ([0.2, 0.05], 1, 100, 1),  # smaller than the smallest size
        ([120, 120], 1, 100, 2),  # every tensor larger than the largest
        ([0.5, 1, 1], 1, 100, 0),
        ([30, 30, 30], 1, 100, 0),  # only sizes above 60 MB differ
        ([30, 30, 30], 1, 59, 3),
        ([20, 30], 1, 40, 2),
    ],
)
def test_single_plan_is_found_if_all_sizes_agree(sizes_mb, low, high, buckets) -> None:
    specs = [tensor(int(mb * MB)) for mb in sizes_mb]
    order = list(range(len(specs)))
    found = single_plan(Fusion(), tuning(low, high), specs, order)
    assert (0 if found is None else len(found.buckets)) == buckets


def test_single_plan_includes_start_outside_range() -> None:
    specs, order = [tensor(2 * MB), tensor(3 * MB)], [0, 1]
    assert single_plan(Fusion(bucket_bytes=MB), tuning(6, 100), specs, order) is None
    alone = plans.make_plan(Fusion(bucket_bytes=MB), specs, order)
    assert single_plan(Fusion(bucket_bytes=MB), tuning(1, 2), specs, order) == alone
