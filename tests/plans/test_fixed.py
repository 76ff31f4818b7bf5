from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.plans.fixed import fixed
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
