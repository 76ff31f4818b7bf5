from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.errors import UsageError
from wingbeat.planning.costs import (
    ACCEPTED_ERROR,
    Curve,
    Fit,
    Linear,
    Linearithmic,
    PiecewiseLinear,
    best_fit,
    fit_linear,
    fit_linearithmic,
)
from wingbeat.schema import MalformedMessage, from_json, to_json

AMOUNTS = [2.0**k for k in range(10, 25)]


def noisy(curve: Curve, seed: int, noise: float = 0.03, repeats: int = 1):
    """Samples of a curve with relative noise."""
    rng = np.random.default_rng(seed)
    return [(a, curve(a) * (1 + noise * rng.standard_normal())) for a in AMOUNTS * repeats]


@given(st.floats(1e-5, 1e-1), st.floats(1e-11, 1e-7), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(60))
def test_fit_linear_recovers_coefficients(alpha: float, beta: float, seed: int) -> None:
    # Both coefficients have to matter somewhere among the amounts, or noise hides them.
    beta = min(max(beta, alpha / AMOUNTS[-3]), alpha / AMOUNTS[2])
    fit = fit_linear(noisy(Linear(alpha, beta), seed, noise=0.01))
    assert isinstance(fit.curve, Linear)
    assert fit.curve.alpha == pytest.approx(alpha, rel=0.1)
    assert fit.curve.beta == pytest.approx(beta, rel=0.1)
    assert fit.error <= fit.worst < 0.1


@given(st.floats(1e-11, 1e-8), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(40))
def test_fit_linearithmic_recovers_coefficients(gamma: float, seed: int) -> None:
    fixed = gamma * 0.01 * AMOUNTS[5] * math.log(AMOUNTS[5])
    fit = fit_linearithmic(noisy(Linearithmic(gamma, 0.01, fixed), seed, noise=0.01), 0.01)
    assert isinstance(fit.curve, Linearithmic)
    assert fit.curve.density == 0.01
    assert fit.curve.gamma == pytest.approx(gamma, rel=0.1)
    assert fit.curve.fixed == pytest.approx(fixed, rel=0.1)


def test_fit_intervals_cover_coefficients_95_percent() -> None:
    true = Linear(1e-3, 1e-9)
    fits = [fit_linear(noisy(true, seed)) for seed in range(400)]
    for name in ("alpha", "beta"):
        inside = [low <= getattr(true, name) <= high for low, high in
                  (fit.intervals[name] for fit in fits)]  # fmt: skip
        assert 0.90 <= np.mean(inside) <= 0.99


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (4, 2.776), (5, 2.571), (10, 2.228), (100, 1.984)]
)
def test_fit_linear_interval_has_quantile_of_tables(freedom: int, value: float) -> None:
    """With relative errors of one size in turn, half an interval is a multiple of the quantile."""
    amounts = [1.0 + 3 * k for k in range(freedom + 2)]
    samples = [(a, (1 + a) * (1.01 if k % 2 else 0.99)) for k, a in enumerate(amounts)]
    low, high = fit_linear(samples).intervals["beta"]
    assert high is not None
    xs, ys = np.array(samples).T
    columns = np.stack((1 / ys, xs / ys), axis=1)
    estimate, *_ = np.linalg.lstsq(columns, np.ones_like(ys), rcond=None)
    variance = np.sum((columns @ estimate - 1) ** 2) / freedom
    deviation = float(np.sqrt(variance * np.linalg.inv(columns.T @ columns)[1, 1]))
    assert low > 0
    assert (high - low) / 2 / deviation == pytest.approx(value, rel=1e-3)


def test_fit_linear_long_sample_does_not_dominate() -> None:
    samples = [*noisy(Linear(1e-3, 1e-9), 1, noise=0.0), (2.0**34, 20.0)]
    assert fit_linear(samples).curve(1024.0) == pytest.approx(1e-3, rel=0.1)


def test_fit_linear_median_of_repeats_resists_outlier() -> None:
    samples = noisy(Linear(1e-3, 1e-9), 2, repeats=5)
    samples[3] = (samples[3][0], 1.0)
    fit = fit_linear(samples)
    assert isinstance(fit.curve, Linear)
    assert fit.curve.alpha == pytest.approx(1e-3, rel=0.05)
    assert fit.samples == tuple(samples)


def test_fit_linear_coefficients_are_never_negative() -> None:
    falls = fit_linear([(1.0, 3.0), (2.0, 2.0), (3.0, 1.5)])
    assert isinstance(falls.curve, Linear)
    assert falls.curve.beta == 0.0
    assert falls.curve.alpha > 0.0
    below = fit_linear([(1.0, 0.1), (2.0, 1.2), (3.0, 2.1)])
    assert isinstance(below.curve, Linear)
    assert below.curve.alpha == 0.0
    for fit in (falls, below):
        assert all(0.0 <= low <= high for low, high in fit.intervals.values())


def test_fit_linear_coefficient_at_zero_keeps_interval_of_free_fit() -> None:
    xs, ys = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 1.3, 1.6, 2.6])
    fit = fit_linear(list(zip(xs.tolist(), ys.tolist(), strict=True)))
    # Weighted least squares by the book: two free coefficients, then the slope alone.
    both = np.stack((1 / ys, xs / ys), axis=1)
    value = np.linalg.solve(both.T @ both, both.sum(axis=0))
    variance = np.sum((both @ value - 1) ** 2) / 2
    halves = 4.303 * np.sqrt(variance * np.linalg.inv(both.T @ both).diagonal())
    assert value[0] < 0.0 < value[0] + halves[0]
    assert fit.intervals["alpha"] == pytest.approx((0.0, value[0] + halves[0]), rel=1e-3)
    slope = both[:, 1]
    alone = slope.sum() / (slope @ slope)
    half = 3.182 * np.sqrt(np.sum((slope * alone - 1) ** 2) / 3 / (slope @ slope))
    assert isinstance(fit.curve, Linear)
    assert (fit.curve.alpha, fit.curve.beta) == (0.0, pytest.approx(alone))
    assert fit.intervals["beta"] == pytest.approx((alone - half, alone + half), rel=1e-3)


def test_fit_linear_two_amounts_have_open_intervals() -> None:
    fit = fit_linear([(1.0, 2.0), (2.0, 3.0)])
    assert isinstance(fit.curve, Linear)
    assert (fit.curve.alpha, fit.curve.beta) == pytest.approx((1.0, 1.0))
    assert fit.intervals["beta"] == (0.0, None)
    assert "too few" in fit.explain()
    assert from_json(Fit, json.loads(json.dumps(to_json(fit))), "x") == fit


def test_best_fit_is_simplest_accepted() -> None:
    assert isinstance(best_fit(noisy(Linear(1e-3, 1e-9), 3)).curve, Linear)
    # Linearithmic without a fixed part curves too much for a line over four decades.
    curved = noisy(Linearithmic(1e-9, 0.01), 4)
    assert fit_linear(curved).worst > ACCEPTED_ERROR
    assert isinstance(best_fit(curved, density=0.01).curve, Linearithmic)
    assert isinstance(best_fit(curved).curve, PiecewiseLinear)
    steps = [(a, 1e-3 if a < 1e5 else 1e-1) for a in AMOUNTS]
    stepped = best_fit(steps, density=0.01)
    assert isinstance(stepped.curve, PiecewiseLinear)
    assert stepped.worst == pytest.approx(0.0, abs=1e-12)
    assert stepped.intervals == {}


def test_best_fit_pieces_never_fall() -> None:
    fit = best_fit([(1.0, 5.0), (2.0, 9.0), (3.0, 1.0), (4.0, 100.0)])
    assert fit.curve == PiecewiseLinear((1.0, 2.0, 3.0, 4.0), (5.0, 5.0, 5.0, 100.0))
    assert best_fit([(7.0, 0.5)]).curve == PiecewiseLinear((7.0,), (0.5,))


def test_fit_linear_zero_times_are_accepted() -> None:
    fit = fit_linear([(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)])
    assert fit.curve == Linear(0.0, 0.0)
    assert fit.worst == 0.0


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "0 amounts"),
        ([(1.0, 1.0), (1.0, 2.0)], "1 amounts"),
        ([(0.0, 1.0), (1.0, 1.0)], "(0.0, 1.0)"),
        ([(1.0, -1.0), (2.0, 1.0)], "(1.0, -1.0)"),
        ([(1.0, math.nan), (2.0, 1.0)], "nan"),
        ([(math.inf, 1.0), (2.0, 1.0)], "inf"),
    ],
)
def test_fit_linear_invalid_samples_are_one_line(samples: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fit_linear(samples)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fit_explains_in_one_line() -> None:
    line = fit_linear(noisy(Linear(1e-3, 1e-9), 5)).explain()
    assert "alpha" in line
    assert "beta" in line
    assert "15 amounts" in line
    assert "\n" not in line
    assert "piecewise linear" in best_fit([(7.0, 0.5)]).explain()


@pytest.mark.parametrize(
    "fit",
    [
        fit_linear(noisy(Linear(1e-3, 1e-9), 6)),
        fit_linearithmic(noisy(Linearithmic(1e-9, 0.01), 7), 0.01),
        best_fit([(1.0, 5.0), (2.0, 9.0), (3.0, 1.0)]),
    ],
    ids=["line", "sorting", "pieces"],
)
def test_fit_json_round_trip_is_equal(fit: Any) -> None:
    assert from_json(Fit, json.loads(json.dumps(to_json(fit))), "x") == fit


DAMAGE: list[tuple[list[Any], Any, str]] = [
    (["curve"], None, "None"),
    (["curve", "alpha"], -1, "alpha"),
    (["samples"], None, "samples"),
    (["samples", 0], [1], "[1]"),
    (["samples", 0], [0, 1], "(0.0, 1.0)"),
    (["samples", 0], [1, math.nan], "nan"),
    (["intervals"], [], "intervals"),
    (["intervals", "alpha"], [2, 1], "alpha is 2"),
    (["intervals", "alpha"], [None, 1], "alpha"),
    (["intervals", "gamma"], [0, 1], "gamma"),
    (["worst"], "small", "'small'"),
    (["error"], -0.5, "-0.5"),
]


@pytest.mark.parametrize(("path", "value", "words"), DAMAGE)
def test_fit_damaged_json_is_one_line(path: list[Any], value: Any, words: str) -> None:
    data = copy.deepcopy(to_json(fit_linear(noisy(Linear(1e-3, 1e-9), 8))))
    where: Any = data
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    with pytest.raises(MalformedMessage) as caught:
        from_json(Fit, data, "probe.encode")
    assert words in str(caught.value)
    assert "probe.encode" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fit_json_other_type_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"probe\.encode is 3"):
        from_json(Fit, 3, "probe.encode")


def test_best_fit_pooled_medians_have_equal_weight() -> None:
    """30, 20 and 10 fall one after the other; their mean is 20, whatever is averaged first."""
    falling = best_fit([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0), (4.0, 500.0)])
    assert falling.curve == PiecewiseLinear((1.0, 2.0, 3.0, 4.0), (20.0, 20.0, 20.0, 500.0))
