"""Plans of n layers or of single tensors, and `make`, which turns a rule into a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.merges import groups
from wingbeat.planning import plans
from wingbeat.planning.plans import by_layers
from wingbeat.types import Fusion, TensorSpec


def spec(name: str, n: int = 10, dtype: str = "float32", device: str = "cpu") -> TensorSpec:
    return TensorSpec(name, (n,), dtype, 2 if dtype == "float16" else 4, device)


NET = [spec(f"net.{i}.{kind}") for i in range(3) for kind in ("weight", "bias")]
BACKWARD = [5, 4, 3, 2, 1, 0]


def test_by_layers_keeps_tensors_of_layer_together() -> None:
    assert groups(by_layers(NET, BACKWARD, 1)) == [(5, 4), (3, 2), (1, 0)]


def test_by_layers_puts_consecutive_layers_into_bucket() -> None:
    assert groups(by_layers(NET, BACKWARD, 2)) == [(5, 4, 3, 2), (1, 0)]
    assert groups(by_layers(NET, BACKWARD, 99)) == [(5, 4, 3, 2, 1, 0)]


def test_by_layers_counts_in_ready_order() -> None:
    assert groups(by_layers(NET, [1, 5, 0, 4, 3, 2], 2)) == [(1, 5, 0, 4), (3, 2)]


def test_by_layers_parameters_of_model_are_one_layer() -> None:
    assert groups(by_layers([spec("a"), spec("b"), spec("m.c")], [0, 1, 2], 1)) == [(0, 1), (2,)]


def test_by_layers_separates_kinds() -> None:
    specs = [spec("m.a"), spec("m.b", dtype="float16"), spec("m.c", device="cuda:0")]
    assert groups(by_layers(specs, [0, 1, 2], 4)) == [(0,), (1,), (2,)]


@given(
    owners=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    count=st.integers(1, 5),
    seed=st.randoms(use_true_random=False),
)
def test_by_layers_holds_every_tensor_once(owners, count, seed) -> None:
    specs = [spec(f"m{owner}.w{i}", dtype=("float16", "float32")[i % 2]) for i, owner in
             enumerate(owners)]  # fmt: skip
    order = list(range(len(specs)))
    seed.shuffle(order)
    plan = by_layers(specs, order, count)
    assert sorted(t for g in groups(plan) for t in g) == list(range(len(specs)))
    complete = [max(order.index(t) for t in g) for g in groups(plan)]
    assert complete == sorted(complete)
    for group in groups(plan):
        assert len({specs[t].dtype for t in group}) == 1
        assert len({owners[t] for t in group}) <= count


def test_make_plan_without_fusion_sends_tensors_alone() -> None:
    assert groups(plans.make_plan(Fusion(kind="none"), NET, BACKWARD)) == [
        (5,),
        (4,),
        (3,),
        (2,),
        (1,),
        (0,),
    ]


@pytest.mark.parametrize(
    ("fusion", "expected"),
    [
        (Fusion(kind="none"), [(5,), (4,), (3,), (2,), (1,), (0,)]),
        (Fusion(kind="layers", layers=2), [(5, 4, 3, 2), (1, 0)]),
        (Fusion(bucket_bytes=120), [(5, 4, 3), (2, 1, 0)]),
        (Fusion(bucket_bytes=120, first_bytes=40), [(5,), (4, 3), (2, 1, 0)]),
        (Fusion(bucket_bytes=120, last_bytes=40), [(5, 4, 3), (2, 1), (0,)]),
    ],
)
def test_make_plan_follows_rule(fusion: Fusion, expected: list[tuple[int, ...]]) -> None:
    assert groups(plans.make_plan(fusion, NET, BACKWARD)) == expected
