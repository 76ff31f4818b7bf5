"""Colayers: the paper's VGG-19, and when layers are bundled anew."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from wingbeat.errors import UsageError
from wingbeat.paced.profile import load_profile
from wingbeat.plans.colayers import LayerProperties, bundled, colayers, fitting, rebundled
from wingbeat.types import TensorSpec

NAMES = [
    f"CONV{stage}-{number}"
    for stage, count in enumerate((2, 2, 4, 4, 4), start=1)
    for number in range(1, count + 1)
] + ["FC1", "FC2", "FC3"]


def vgg19(noise: float = 0.0, seed: int = 0) -> list[LayerProperties]:
    """Its layers in the order of backward, each time up to ``noise`` of it longer or shorter."""
    rng = random.Random(seed)
    return [
        LayerProperties(
            name,
            layer.kind,
            sum(parameter.numel for parameter in layer.parameters),
            layer.backward_ms / 1e3 * rng.uniform(1 - noise, 1 + noise),
        )
        for name, layer in reversed(list(zip(NAMES, load_profile("vgg19").layers, strict=True)))
    ]


def ends(layers: Sequence[LayerProperties], bundles: Sequence[range]) -> list[tuple[str, str]]:
    return [(layers[bundle.start].name, layers[bundle.stop - 1].name) for bundle in bundles]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_paper_s_vgg_19_in_four(noise: float) -> None:
    layers = vgg19(noise)
    assert ends(layers, colayers(layers, 4)) == [
        ("FC3", "FC1"), ("CONV5-4", "CONV5-1"), ("CONV4-4", "CONV4-1"), ("CONV3-4", "CONV1-1"),
    ]  # fmt: skip


def test_every_layer_is_in_one_colayer_and_in_order() -> None:
    layers = vgg19(0.2)
    for count in range(1, 25):
        bundles = colayers(layers, count)
        assert len(bundles) == min(count, len(layers))
        assert list(itertools.chain(*bundles)) == list(range(len(layers)))
        assert all(bundles)


def test_kinds_are_not_mixed_if_there_are_enough_colayers() -> None:
    layers = [
        LayerProperties(str(number), kind, 10, seconds)
        for number, (kind, seconds) in enumerate(
            [("a", 1.0), ("b", 1.0), ("b", 100.0), ("b", 100.0)]
        )
    ]
    assert colayers(layers, 2) == (range(1), range(1, 4))
    assert colayers(layers, 3) == (range(1), range(1, 2), range(2, 4))


def test_gradients_of_another_width_are_apart() -> None:
    layers = [
        LayerProperties(str(n), "conv", 10, 1.0, spread) for n, spread in enumerate((1, 1, 5))
    ]
    assert colayers(layers, 2) == (range(2), range(2, 3))


def test_best_of_all_cuts() -> None:
    # By trying them all, on random layers.
    for seed in range(30):
        rng = random.Random(seed)
        layers = [
            LayerProperties(
                str(n), "conv", rng.randrange(1, 100), rng.uniform(0.1, 9), rng.random()
            )
            for n in range(7)
        ]
        plans = [
            [range(a, b) for a, b in itertools.pairwise((0, *cuts, 7))]
            for cuts in itertools.combinations(range(1, 7), 2)
        ]
        costs = [sum(_variation(layers[r.start : r.stop]) for r in plan) for plan in plans]
        best = sum(_variation(layers[r.start : r.stop]) for r in colayers(layers, 3))
        assert best == pytest.approx(min(costs))


def _variation(layers: Sequence[LayerProperties]) -> float:
    total = 0.0
    weight = sum(layer.numel for layer in layers)
    for feature in (lambda x: math.log(x.backward_s / x.numel), lambda x: x.spread):
        mean = sum(layer.numel * feature(layer) for layer in layers) / weight
        total += sum(layer.numel * (feature(layer) - mean) ** 2 for layer in layers)
    return total


def test_without_measurements_the_kinds_decide() -> None:
    layers = [replace(layer, backward_s=0.0) for layer in vgg19()]
    assert ends(layers, colayers(layers, 2)) == [("FC3", "FC1"), ("CONV5-4", "CONV1-1")]


def test_as_few_as_will_do() -> None:
    layers = vgg19()
    assert len(fitting(layers, 10)) < 5
    exact = [LayerProperties(str(n), "conv", 10, 4.0 ** (n // 3)) for n in range(9)]
    assert fitting(exact, 9, tolerance=0.0) == (range(3), range(3, 6), range(6, 9))


def test_bundled_anew_when_properties_change_and_not_for_noise() -> None:
    before = vgg19()
    current = colayers(before, 4)
    for seed in range(20):
        assert rebundled(vgg19(0.05, seed), current, 4) is None
    # CONV4 now takes as long as CONV5, and CONV3-1 to CONV1-1 much longer.
    slow = [
        replace(
            layer, backward_s=layer.backward_s / 4 if "CONV4" in layer.name else layer.backward_s
        )
        for layer in before
    ]
    new = rebundled(slow, current, 4)
    assert new is not None
    assert ends(slow, new)[1] == ("CONV5-4", "CONV4-1")
    assert rebundled(slow, new, 4) is None


def test_the_number_may_change_too() -> None:
    layers = [LayerProperties(str(n), "conv", 10, 4.0 ** (n // 3)) for n in range(9)]
    new = rebundled(layers, colayers(layers, 8), 9, fixed=False)
    assert new == (range(3), range(3, 6), range(6, 9))


def test_what_is_not_allowed_is_named() -> None:
    with pytest.raises(UsageError, match="no layers"):
        colayers([], 3)
    with pytest.raises(UsageError, match="colayers=0"):
        colayers(vgg19(), 0)


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
