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
from wingbeat.costs import Line, Pieces
from wingbeat.probe import matrices, saved
from wingbeat.probe.matrices import Matrix, measure_matrices, payload_of, region_of, weight
from wingbeat.probe.model import payload_bytes
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


def measure(wire, way: str = "reduce", specs=MODEL, size: int = 2):
    def body(world):
        return measure_matrices(
            Collectives(world), wire, way, specs, device=torch.device("cpu"), dtype=torch.float32
        )

    before = torch.random.get_rng_state()
    found = loopback.run(loopback.worlds(size), body)
    assert torch.equal(before, torch.random.get_rng_state()), "the user's random state"
    return found


@pytest.mark.parametrize("way", ["reduce", "scatter"])
def test_each_shape_is_measured_once_on_all_workers(way: str) -> None:
    found = measure(WIRE, way, size=3)
    assert found[0] == found[1] == found[2]
    assert [(m.rows, m.cols) for m in found[0]] == [LARGE, LARGER]
    for each in found[0]:
        assert each.exchange_s > 0
        # Two thin factors of a byte an element, and their tables.
        assert 2 * (each.rows + each.cols) <= each.nbytes < 0.2 * each.rows * each.cols


def test_only_low_rank_has_matrices_and_only_the_largest_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measure(Sketch()) == measure("") == [(), ()]
    assert measure(WIRE, specs=[MODEL[1], *MODEL[4:]]) == [(), ()]
    monkeypatch.setattr(matrices, "MOST", 1)
    assert [(m.rows, m.cols) for m in measure(WIRE)[0]] == [LARGER]


def test_bytes_are_those_that_travel() -> None:
    nbytes = payload_bytes(MODEL, WIRE)
    assert nbytes[0] < 0.2 * 300 * 260, "factors"
    assert nbytes[4] > 64 * 64 * 25, "a sketch"
    assert nbytes[5] > 20 * 30, "too small to be worth factors"
    for spec, each in zip(MODEL, nbytes, strict=True):
        assert each == payload_of(spec, WIRE) + 4
    assert [region_of(spec, WIRE) is not None for spec in MODEL] == [
        True, False, True, True, False, False,
    ]  # fmt: skip


@given(st.floats(1e-6, 10.0), st.floats(0, 1e-3), st.floats(1e-9, 1e-3))
def test_a_matrix_weighs_what_takes_as_long(seconds: float, alpha: float, beta: float) -> None:
    curve = Line(alpha, beta)
    found = weight((8, 9), 100.0, [Matrix(8, 9, 100.0, seconds)], curve)
    if curve(100.0) >= seconds:
        assert found == 100.0
    else:
        assert curve(found) == pytest.approx(seconds, rel=1e-6)
    assert weight((9, 8), 100.0, [Matrix(8, 9, 100.0, seconds)], curve) == 100.0
    assert weight((8, 9, 1), 100.0, [Matrix(8, 9, 100.0, seconds)], curve) == 100.0


def test_where_bytes_cost_nothing_a_matrix_weighs_its_own() -> None:
    known = [Matrix(8, 9, 100.0, 5.0)]
    assert weight((8, 9), 100.0, known, Line(1.0, 0.0)) == 100.0
    assert weight((8, 9), 100.0, known, Pieces((10.0,), (2.0,))) == 100.0


def test_plans_see_the_weight() -> None:
    known = replace(probe(), matrices=(Matrix(1000, 64, 500.0, 1.0),))
    nbytes = [1.0] * len(SPECS)
    before = probe().workload(SPECS, nbytes).nbytes
    after = known.workload(SPECS, nbytes)
    place = after.tensors.index(2)
    assert after.nbytes[place] > 1000 * before[place]
    assert known.costs().exchange(after.nbytes[place]) == pytest.approx(1.0)
    assert [b for i, b in enumerate(after.nbytes) if i != place] == [1.0] * 3
    assert "a matrix of 1000 x 64 as factors: 500 bytes, 1000 ms" in known.explain()


def test_what_was_measured_is_saved() -> None:
    known = replace(probe(), matrices=(Matrix(1000, 64, 500.0, 1.0),))
    assert saved.from_json(saved.to_json(known)) == known
