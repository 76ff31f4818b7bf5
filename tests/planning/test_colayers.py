"""Colayers: colayer_plan by kind and size, or by what was measured; the best bundles, exactly."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from wingbeat.errors import UsageError
from wingbeat.parts.plan import MIN_COLAYERS
from wingbeat.planning.plans import (
    NOISE,
    LayerProperties,
    colayer_plan,
    colayers,
    fewest_colayers,
    make_plan,
)
from wingbeat.types import Fusion, TensorSpec
from wingbeat_lab.paced import simulator_model
from wingbeat_lab.paced.profile import load_profile


def layers_of(*rows: tuple[str, int]) -> list[LayerProperties]:
    return [LayerProperties(kind, numel) for kind, numel in rows]


def test_colayers_hold_every_layer_once_in_order() -> None:
    rng = random.Random(0)
    layers = layers_of(*((rng.choice(("fc", "conv")), rng.randrange(1, 99)) for _ in range(19)))
    for count in range(1, 25):
        bundles = colayers(layers, count)
        assert len(bundles) == min(count, len(layers))
        assert list(itertools.chain(*bundles)) == list(range(len(layers)))
        assert all(bundles)


def test_colayers_do_not_mix_kinds_if_there_are_enough() -> None:
    layers = layers_of(("fc", 10), ("conv", 10), ("conv", 100), ("conv", 100))
    assert colayers(layers, 2) == (range(1), range(1, 4))
    assert colayers(layers, 3) == (range(1), range(1, 3), range(3, 4))


def test_colayers_equal_best_of_all_cuts() -> None:
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


def test_colayers_invalid_arguments_are_named() -> None:
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


def test_colayer_plan_keeps_layers_together_and_kinds_apart() -> None:
    order = list(reversed(range(len(MODEL))))
    assert [b.tensors for b in colayer_plan(MODEL, order, 2).buckets] == [(5, 4, 3), (2, 1, 0)]
    assert [b.tensors for b in colayer_plan(MODEL, order, 10).buckets] == [
        (5,),
        (4, 3),
        (2,),
        (1, 0),
    ]


def test_colayers_unmeasured_have_similar_sizes() -> None:
    alike = specs(*((f"{n}.weight", size, "fc") for n, size in enumerate((9, 1, 1, 1, 6, 3, 3))))
    buckets = colayer_plan(alike, range(7), 3).buckets
    assert [b.tensors for b in buckets] == [(0,), (1, 2, 3, 4), (5, 6)]


def test_colayer_plan_keeps_dtypes_apart_or_refuses_count() -> None:
    mixed = [*specs(("a.weight", 5, "fc")), *specs(("b.weight", 5, "fc"), dtype="float64")]
    assert [b.tensors for b in colayer_plan(mixed, (0, 1), 2).buckets] == [(0,), (1,)]
    with pytest.raises(UsageError, match=r"colayers=1: 'a.weight' \(float32 on cpu\) and 'b.wei"):
        colayer_plan(mixed, (0, 1), 1)


def measured(*rows: tuple[str, int, float, float | None]) -> list[LayerProperties]:
    """Return layers by kind, parameters, seconds for each, and width."""
    return [LayerProperties(kind, n, n * each_s, width) for kind, n, each_s, width in rows]


def test_colayers_measured_group_by_time_per_parameter() -> None:
    layers = measured(*(("conv", n, s, None) for n, s in ((1, 1), (9, 1), (1, 4), (1, 4), (9, 16))))
    assert colayers(layers, 3) == (range(2), range(2, 4), range(4, 5))


def test_colayers_measured_group_by_gradient_width() -> None:
    layers = measured(*(("fc", 5, 1.0, width) for width in (-9.0, -9.0, -9.0, -2.0)))
    assert colayers(layers, 2) == (range(3), range(3, 4))


def test_colayers_differences_below_noise_group_by_size() -> None:
    layers = measured(*(("fc", 5, s, None) for s in (1.0, 1.05, 1.0, 1.01, 0.98, 1.0)))
    assert colayers(layers, 3) == (range(2), range(2, 4), range(4, 6))


def test_colayers_unmeasured_layers_join_either_neighbour() -> None:
    """Of the first gradient nothing is known."""
    layers = measured(*(("fc", 5, s, None) for s in (0.0, 1.0, 1.0, 9.0)))
    assert colayers(layers, 2) == (range(3), range(3, 4))


def test_colayers_measured_equal_best_of_all_cuts() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        layers = measured(
            *(
                ("conv", rng.randrange(1, 100), rng.uniform(1, 50), rng.uniform(-5, 0))
                for _ in range(7)
            )
        )
        whole = sum(layer.numel for layer in layers)
        found = min(
            (
                [range(a, b) for a, b in itertools.pairwise((0, *cuts, 7))]
                for cuts in itertools.combinations(range(1, 7), 2)
            ),
            key=lambda plan: sum(cost([layers[n] for n in bundle], whole) for bundle in plan),
        )
        assert list(colayers(layers, 3)) == found


def cost(layers: Sequence[LayerProperties], whole: int) -> float:
    """Return a bundle's cost as the rule states it, computed another way."""
    numel = sum(layer.numel for layer in layers)
    total = NOISE**2 * numel**2 / whole
    for feature in ("computation", "width"):
        values = [
            (x.numel, math.log(x.backward_s / x.numel) if feature == "computation" else x.width)
            for x in layers
        ]
        mean = sum(n * (v or 0.0) for n, v in values) / numel
        total += sum(n * ((v or 0.0) - mean) ** 2 for n, v in values)
    return total


@pytest.mark.parametrize("name", ["vgg19", "vgg19_k40", "vgg19_v100"])
def test_colayers_vgg19_equals_paper_by_backward_times(name: str) -> None:
    """FC3 to FC1, CONV5-4 to CONV5-1, CONV4-4 to CONV4-1, CONV3-4 to CONV1-1 (section 4.3.2)."""
    model = simulator_model(load_profile(name))
    chosen = Fusion(kind="colayers", layers=10, measured=True, least=MIN_COLAYERS)
    for fusion in (Fusion(kind="colayers", layers=4), chosen):
        plan = make_plan(fusion, model.tensors, model.ready_order, model.measured)
        assert [
            [model.tensors[t].name.rpartition(".")[0] for t in bucket.tensors[::2]]
            for bucket in plan.buckets
        ] == PAPERS


PAPERS = [
    ["classifier.6", "classifier.3", "classifier.0"],
    ["features.34", "features.32", "features.30", "features.28"],
    ["features.25", "features.23", "features.21", "features.19"],
    [f"features.{n}" for n in (16, 14, 12, 10, 7, 5, 2, 0)],
]


def test_fewest_colayers_is_first_count_with_little_variation() -> None:
    layers = measured(*(("fc", 5, float(4**n), None) for n in (0, 0, 1, 1, 2, 2)))
    assert len(fewest_colayers(layers, 1, 10)) == 3
    assert fewest_colayers(layers, 1, 2) == colayers(layers, 2)
    assert len(fewest_colayers(layers, 4, 10)) == 4
    assert len(fewest_colayers(layers[:2], 4, 10)) == 2


def test_fewest_colayers_never_mixes_kinds() -> None:
    layers = measured(*((kind, 5, 1.0, None) for kind in ("fc", "conv", "fc", "conv", "fc")))
    assert len(fewest_colayers(layers, 1, 10)) == 5
