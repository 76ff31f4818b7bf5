"""Matrices of low rank are measured by their shapes, and weigh in plans what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probe_made import SPECS, probe

from wingbeat.collectives import Collectives
from wingbeat.compression import LowRank, Sketch
from wingbeat.planning import measure as measuring
from wingbeat.planning.costs import Linear, PiecewiseLinear
from wingbeat.planning.measure import matrix_region, measure_matrices, payload_bytes, payload_of
from wingbeat.planning.probe import MatrixCost, Probe, equivalent_bytes
from wingbeat.schema import from_json, to_json
from wingbeat.transport import loopback
from wingbeat.types import TensorSpec

WIRE = LowRank(rank=2, bits=8, auto_disable=False)
LARGE, LARGER = (300, 260), (512, 300)
MODEL = [
    TensorSpec("a.weight", LARGE, "float32", 4),
    TensorSpec("a.bias", (300,), "float32", 4),
    TensorSpec("b.weight", LARGER, "float32", 4),
    TensorSpec("again.weight", LARGE, "float32", 4),
    TensorSpec("conv.weight", (64, 64, 5, 5), "float32", 4),
    TensorSpec("small.weight", (20, 30), "float32", 4),
]


def measure(wire, collective: str = "all-reduce", specs=MODEL, size: int = 2):
    def body(world):
        return measure_matrices(
            Collectives(world),
            wire,
            collective,
            specs,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )

    before = torch.random.get_rng_state()
    found = loopback.run(loopback.worlds(size), body)
    assert torch.equal(before, torch.random.get_rng_state()), "the user's random state"
    return found


@pytest.mark.parametrize("collective", ["all-reduce", "reduce-scatter"])
def test_measure_matrices_each_shape_once_on_all_workers(collective: str) -> None:
    found = measure(WIRE, collective, size=3)
    assert found[0] == found[1] == found[2]
    assert [(m.rows, m.cols) for m in found[0]] == [LARGE, LARGER]
    for each in found[0]:
        assert each.exchange_s > 0
        # Two thin factors of a byte an element, and their tables.
        assert 2 * (each.rows + each.cols) <= each.payload_bytes < 0.2 * each.rows * each.cols


def test_measure_matrices_only_low_rank_and_only_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measure(Sketch()) == measure("") == [(), ()]
    assert measure(WIRE, specs=[MODEL[1], *MODEL[4:]]) == [(), ()]
    monkeypatch.setattr(measuring, "MAX_MATRICES", 1)
    assert [(m.rows, m.cols) for m in measure(WIRE)[0]] == [LARGER]


def test_payload_bytes_are_those_of_codec() -> None:
    nbytes = payload_bytes(MODEL, WIRE)
    assert nbytes[0] < 0.2 * 300 * 260, "factors"
    assert nbytes[4] > 64 * 64 * 25, "a sketch"
    assert nbytes[5] > 20 * 30, "too small to be worth factors"
    for spec, each in zip(MODEL, nbytes, strict=True):
        assert each == payload_of(spec, WIRE) + 4
    assert [matrix_region(spec, WIRE) is not None for spec in MODEL] == [
        True, False, True, True, False, False,
    ]  # fmt: skip


@given(st.floats(1e-6, 10.0), st.floats(0, 1e-3), st.floats(1e-9, 1e-3))
def test_equivalent_bytes_take_as_long_as_matrix(seconds: float, alpha: float, beta: float) -> None:
    curve = Linear(alpha, beta)
    found = equivalent_bytes((8, 9), 100.0, [MatrixCost(8, 9, 100.0, seconds)], curve)
    if curve(100.0) >= seconds:
        assert found == 100.0
    else:
        assert curve(found) == pytest.approx(seconds, rel=1e-6)
    assert equivalent_bytes((9, 8), 100.0, [MatrixCost(8, 9, 100.0, seconds)], curve) == 100.0
    assert equivalent_bytes((8, 9, 1), 100.0, [MatrixCost(8, 9, 100.0, seconds)], curve) == 100.0


def test_equivalent_bytes_constant_cost_is_payload() -> None:
    known = [MatrixCost(8, 9, 100.0, 5.0)]
    assert equivalent_bytes((8, 9), 100.0, known, Linear(1.0, 0.0)) == 100.0
    assert equivalent_bytes((8, 9), 100.0, known, PiecewiseLinear((10.0,), (2.0,))) == 100.0


def test_workload_uses_equivalent_bytes() -> None:
    known = replace(probe(), matrices=(MatrixCost(1000, 64, 500.0, 1.0),))
    nbytes = [1.0] * len(SPECS)
    before = probe().workload(SPECS, nbytes).nbytes
    after = known.workload(SPECS, nbytes)
    place = after.tensors.index(2)
    assert after.nbytes[place] > 1000 * before[place]
    assert known.costs().exchange(after.nbytes[place]) == pytest.approx(1.0)
    assert [b for i, b in enumerate(after.nbytes) if i != place] == [1.0] * 3
    assert "a matrix of 1000 x 64 as factors: 500 bytes, 1000 ms" in known.explain()


def test_probe_with_matrices_json_round_trip_is_equal() -> None:
    known = replace(probe(), matrices=(MatrixCost(1000, 64, 500.0, 1.0),))
    assert from_json(Probe, to_json(known), "probe") == known
