from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from wingbeat.planning.plans import by_size
from wingbeat.types import TensorSpec

specs_st = st.lists(
    st.builds(
        lambda n, half: TensorSpec("w", (n,), "float16" if half else "float32", 2 if half else 4),
        st.integers(1, 500),
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@given(specs=specs_st, limit=st.integers(1, 4000), seed=st.randoms(use_true_random=False))
def test_by_size_holds_every_tensor_once_by_kind(specs, limit, seed) -> None:
    order = list(range(len(specs)))
    seed.shuffle(order)
    plan = by_size(specs, order, limit)
    assert sorted(t for b in plan.buckets for t in b.tensors) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert len({specs[t].dtype for t in bucket.tensors}) == 1
        assert len(bucket.tensors) == 1 or sum(specs[t].nbytes for t in bucket.tensors) <= limit


@given(specs=specs_st, limit=st.integers(1, 4000), seed=st.randoms(use_true_random=False))
def test_by_size_orders_buckets_by_completion(specs, limit, seed) -> None:
    order = list(range(len(specs)))
    seed.shuffle(order)
    ready = {t: i for i, t in enumerate(order)}
    complete = [max(ready[t] for t in b.tensors) for b in by_size(specs, order, limit).buckets]
    assert complete == sorted(complete)


def test_by_size_fills_buckets_with_neighbours() -> None:
    specs = [TensorSpec("w", (n,), "float32", 4) for n in (10, 10, 10, 100, 5)]
    plan = by_size(specs, [4, 3, 2, 1, 0], bucket_bytes=80, first_bytes=20)
    assert [b.tensors for b in plan.buckets] == [(4,), (3,), (2, 1), (0,)]


def sizes(specs, plan) -> list[int]:
    return [sum(specs[t].nbytes for t in bucket.tensors) for bucket in plan.buckets]


def tensors(*nbytes: int) -> list[TensorSpec]:
    return [TensorSpec("w", (n,), "int8", 1) for n in nbytes]


def test_by_size_doubles_from_both_edges() -> None:
    specs = tensors(*[10] * 64)
    plan = by_size(specs, range(64), bucket_bytes=80, first_bytes=10, last_bytes=20)
    assert sizes(specs, plan) == [10, 20, 40, *[80] * 6, 30, 40, 20]


def test_by_size_tapers_last_edge_first() -> None:
    specs = tensors(10, 10, 10)
    assert sizes(specs, by_size(specs, range(3), 80, first_bytes=40, last_bytes=10)) == [20, 10]


@pytest.mark.parametrize("edge", [0, 80, 100])
def test_by_size_edges_above_limit_change_nothing(edge: int) -> None:
    specs = tensors(*[30] * 7)
    plan = by_size(specs, range(7), bucket_bytes=80, first_bytes=edge, last_bytes=edge)
    assert plan == by_size(specs, range(7), bucket_bytes=80)


def test_by_size_large_tensor_at_edge_travels_alone() -> None:
    specs = tensors(500, *[10] * 60)
    plan = by_size(specs, range(61), bucket_bytes=400, first_bytes=20)
    assert sizes(specs, plan) == [500, 400, 200]


def test_by_size_tiny_tensor_at_edge_does_not_travel_alone() -> None:
    specs = tensors(2, 500, 9, 500)
    assert sizes(specs, by_size(specs, range(4), 600, first_bytes=80)) == [502, 509]
    assert sizes(specs, by_size(specs, [1, 0, 3, 2], 600, last_bytes=40)) == [502, 500, 9]


@given(
    specs=specs_st,
    limit=st.integers(1, 4000),
    first=st.integers(0, 5000),
    last=st.integers(0, 5000),
    seed=st.randoms(use_true_random=False),
)
def test_by_size_tapered_buckets_stay_below_limit(specs, limit, first, last, seed) -> None:
    order = list(range(len(specs)))
    seed.shuffle(order)
    plan = by_size(specs, order, limit, first, last)
    assert sorted(t for b in plan.buckets for t in b.tensors) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert len({specs[t].dtype for t in bucket.tensors}) == 1
        parts = [specs[t].nbytes for t in bucket.tensors]
        # One tensor may be larger than allowed, and at an edge what an eighth would not fill.
        assert sum(parts) - max(parts) <= limit // 8 or sum(parts) <= limit


@given(specs=specs_st, limit=st.integers(1, 4000), edge=st.integers(1, 4000))
def test_by_size_reversed_order_mirrors_edges(specs, limit, edge) -> None:
    assume(edge < limit)
    one_kind = [TensorSpec("w", spec.shape, "float32", 4) for spec in specs]
    order = list(range(len(specs)))
    head = by_size(one_kind, order, limit, first_bytes=edge)
    tail = by_size(one_kind, order[::-1], limit, last_bytes=edge)
    assert set(head.buckets[0].tensors) == set(tail.buckets[-1].tensors)
