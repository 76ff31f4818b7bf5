"""Colayers: bundled by kind and size, alike everywhere."""

from __future__ import annotations

import itertools
import random

import pytest

from wingbeat.errors import UsageError
from wingbeat.plans.colayers import LayerProperties, bundled, colayers
from wingbeat.types import TensorSpec


def layers_of(*rows: tuple[str, int]) -> list[LayerProperties]:
    return [LayerProperties(kind, numel) for kind, numel in rows]


def test_every_layer_is_in_one_colayer_and_in_order() -> None:
    rng = random.Random(0)
    layers = layers_of(*((rng.choice(("fc", "conv")), rng.randrange(1, 99)) for _ in range(19)))
    for count in range(1, 25):
        bundles = colayers(layers, count)
        assert len(bundles) == min(count, len(layers))
        assert list(itertools.chain(*bundles)) == list(range(len(layers)))
        assert all(bundles)


def test_kinds_are_not_mixed_if_there_are_enough_colayers() -> None:
    layers = layers_of(("fc", 10), ("conv", 10), ("conv", 100), ("conv", 100))
    assert colayers(layers, 2) == (range(1), range(1, 4))
    assert colayers(layers, 3) == (range(1), range(1, 3), range(3, 4))


def test_best_of_all_cuts() -> None:
    # By trying them all, on random layers.
    for seed in range(30):
        rng = random.Random(seed)
        layers = layers_of(*(("conv", rng.randrange(1, 100)) for _ in range(7)))
        plans = [
            [range(a, b) for a, b in itertools.pairwise((0, *cuts, 7))]
            for cuts in itertools.combinations(range(1, 7), 2)
        ]
        sizes = [[sum(layers[n].numel for n in bundle) for bundle in plan] for plan in plans]
        found = [sum(layers[n].numel for n in bundle) for bundle in colayers(layers, 3)]
        assert sum(s * s for s in found) == min(sum(s * s for s in each) for each in sizes)


def test_what_is_not_allowed_is_named() -> None:
    with pytest.raises(UsageError, match="no layers"):
        colayers([], 3)
    with pytest.raises(UsageError, match="colayers=0"):
        colayers(layers_of(("fc", 1)), 0)


def specs(*rows: tuple[str, int, str], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name, (numel,), dtype, 4, layer=layer) for name, numel, layer in rows]


MODEL = specs(
    ("a.weight", 60, "conv"), ("a.bias", 4, "conv"), ("b.weight", 60, "conv"),
    ("c.weight", 100, "fc"), ("c.bias", 20, "fc"), ("d.weight", 130, "fc"),
)  # fmt: skip


def test_tensors_of_a_layer_stay_together_and_kinds_apart() -> None:
    order = list(reversed(range(len(MODEL))))
    assert [b.tensors for b in bundled(MODEL, order, 2).buckets] == [(5, 4, 3), (2, 1, 0)]
    assert [b.tensors for b in bundled(MODEL, order, 10).buckets] == [(5,), (4, 3), (2,), (1, 0)]


def test_unmeasured_colayers_are_about_as_large_as_each_other() -> None:
    alike = specs(*((f"{n}.weight", size, "fc") for n, size in enumerate((9, 1, 1, 1, 6, 3, 3))))
    buckets = bundled(alike, range(7), 3).buckets
    assert [b.tensors for b in buckets] == [(0,), (1, 2, 3, 4), (5, 6)]


def test_dtypes_are_kept_apart_or_the_number_is_refused() -> None:
    mixed = [*specs(("a.weight", 5, "fc")), *specs(("b.weight", 5, "fc"), dtype="float64")]
    assert [b.tensors for b in bundled(mixed, (0, 1), 2).buckets] == [(0,), (1,)]
    with pytest.raises(UsageError, match=r"colayers=1: 'a.weight' \(float32 on cpu\) and 'b.wei"):
        bundled(mixed, (0, 1), 1)
