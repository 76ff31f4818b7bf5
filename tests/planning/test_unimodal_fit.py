"""The curve that falls and then rises nearest to what was measured."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.planning.thresholds import unimodal_fit

POINTS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3)), min_size=1, max_size=5)


def is_valley(values: tuple[float, ...] | list[float]) -> bool:
    steps = [b - a for a, b in itertools.pairwise(values)]
    rises = [i for i, step in enumerate(steps) if step > 1e-12]
    return not rises or all(step >= -1e-12 for step in steps[rises[0] :])


def squares(values, weights, fitted) -> float:
    return sum(w * (v - f) ** 2 for v, w, f in zip(values, weights, fitted, strict=True))


@settings(max_examples=examples(60))
@given(POINTS)
def test_unimodal_fit_is_nearest(points) -> None:
    values, weights = [float(v) for v, _ in points], [float(w) for _, w in points]
    fitted = unimodal_fit(values, weights)
    assert is_valley(fitted)
    least = squares(values, weights, fitted)
    grid = [h / 2 for h in range(0, 25, 3)]
    others = (c for c in itertools.product(sorted({*grid, *values}), repeat=len(values)))
    some = itertools.islice((curve for curve in others if is_valley(curve)), 400)
    assert all(squares(values, weights, curve) >= least - 1e-9 for curve in some)


@given(st.lists(st.floats(0.1, 9), max_size=6), st.lists(st.floats(0.1, 9), max_size=6))
def test_unimodal_fit_of_unimodal_values_is_identity(down: list[float], up: list[float]) -> None:
    values = [*sorted(down, reverse=True), *sorted(up)]
    if not values:
        values = [1.0]
    low = min(values)
    if down and up and not (sorted(down)[0] == low or sorted(up)[0] == low):
        return
    assert unimodal_fit(values, [1.0] * len(values)) == pytest.approx(values)


def test_unimodal_fit_weights_count() -> None:
    light = unimodal_fit([1.0, 3.0, 2.0], [1, 1, 1])
    heavy = unimodal_fit([1.0, 3.0, 2.0], [1, 1, 3])
    assert light == [1.0, 2.5, 2.5]
    assert heavy == [1.0, 2.25, 2.25]


def test_unimodal_fit_keeps_jumps() -> None:
    assert unimodal_fit([3.0, 2.0, 1.9, 7.0, 7.1], [1.0] * 5) == [3.0, 2.0, 1.9, 7.0, 7.1]
