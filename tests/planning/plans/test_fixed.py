from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from wingbeat.planning.plans.fixed import fixed
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
def test_every_tensor_is_in_one_bucket_of_its_kind(specs, limit, seed) -> None:
    order = list(range(len(specs)))
    seed.shuffle(order)
    plan = fixed(specs, order, limit)
    assert sorted(t for b in plan.buckets for t in b.tensors) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert len({specs[t].dtype for t in bucket.tensors}) == 1
        assert len(bucket.tensors) == 1 or sum(specs[t].nbytes for t in bucket.tensors) <= limit


@given(specs=specs_st, limit=st.integers(1, 4000), seed=st.randoms(use_true_random=False))
def test_buckets_stand_in_the_order_in_which_they_complete(specs, limit, seed) -> None:
    order = list(range(len(specs)))
    seed.shuffle(order)
    ready = {t: i for i, t in enumerate(order)}
    complete = [max(ready[t] for t in b.tensors) for b in fixed(specs, order, limit).buckets]
    assert complete == sorted(complete)


def test_neighbours_share_a_bucket_while_they_fit() -> None:
    specs = [TensorSpec("w", (n,), "float32", 4) for n in (10, 10, 10, 100, 5)]
    plan = fixed(specs, [4, 3, 2, 1, 0], bucket_bytes=80, first_bytes=20)
    assert [b.tensors for b in plan.buckets] == [(4,), (3,), (2, 1), (0,)]


def sizes(specs, plan) -> list[int]:
    return [sum(specs[t].nbytes for t in bucket.tensors) for bucket in plan.buckets]


def tensors(*nbytes: int) -> list[TensorSpec]:
    return [TensorSpec("w", (n,), "int8", 1) for n in nbytes]


def test_sizes_double_from_both_edges_up_to_the_limit() -> None:
    specs = tensors(*[10] * 64)
    plan = fixed(specs, range(64), bucket_bytes=80, first_bytes=10, last_bytes=20)
    assert sizes(specs, plan) == [10, 20, 40, *[80] * 6, 30, 40, 20]


def test_the_last_edge_is_cut_before_the_first() -> None:
    specs = tensors(10, 10, 10)
    assert sizes(specs, fixed(specs, range(3), 80, first_bytes=40, last_bytes=10)) == [20, 10]


@pytest.mark.parametrize("edge", [0, 80, 100])
def test_edges_that_are_not_below_the_limit_change_nothing(edge: int) -> None:
    specs = tensors(*[30] * 7)
    plan = fixed(specs, range(7), bucket_bytes=80, first_bytes=edge, last_bytes=edge)
    assert plan == fixed(specs, range(7), bucket_bytes=80)


def test_a_large_tensor_at_the_edge_travels_alone_and_lets_the_next_bucket_be_as_large() -> None:
    specs = tensors(500, *[10] * 60)
    plan = fixed(specs, range(61), bucket_bytes=400, first_bytes=20)
    assert sizes(specs, plan) == [500, 400, 200]


def test_a_tiny_tensor_does_not_travel_alone_at_an_edge() -> None:
    specs = tensors(2, 500, 9, 500)
    assert sizes(specs, fixed(specs, range(4), 600, first_bytes=80)) == [502, 509]
    assert sizes(specs, fixed(specs, [1, 0, 3, 2], 600, last_bytes=40)) == [502, 500, 9]


@given(
    specs=specs_st,
    limit=st.integers(1, 4000),
    first=st.integers(0, 5000),
    last=st.integers(0, 5000),
    seed=st.randoms(use_true_random=False),
)
def test_tapered_buckets_hold_every_tensor_once_and_stay_below_the_limit(
    specs, limit, first, last, seed
) -> None:
    order = list(range(len(specs)))
    seed.shuffle(order)
    plan = fixed(specs, order, limit, first, last)
    assert sorted(t for b in plan.buckets for t in b.tensors) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert len({specs[t].dtype for t in bucket.tensors}) == 1
        parts = [specs[t].nbytes for t in bucket.tensors]
        # One tensor may be larger than allowed, and at an edge what an eighth would not fill.
        assert sum(parts) - max(parts) <= limit // 8 or sum(parts) <= limit


@given(specs=specs_st, limit=st.integers(1, 4000), edge=st.integers(1, 4000))
def test_a_reversed_order_gives_the_mirrored_edges(specs, limit, edge) -> None:
    assume(edge < limit)
    one_kind = [TensorSpec("w", spec.shape, "float32", 4) for spec in specs]
    order = list(range(len(specs)))
    head = fixed(one_kind, order, limit, first_bytes=edge)
    tail = fixed(one_kind, order[::-1], limit, last_bytes=edge)
    assert set(head.buckets[0].tensors) == set(tail.buckets[-1].tensors)
