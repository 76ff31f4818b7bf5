from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.planning.costs import (
    Curve,
    Line,
    Pieces,
    Sorting,
    best_fit,
    fit_line,
    fit_of,
    fit_sorting,
)
from wingbeat.planning.costs.fit import ACCEPTED, _quantile

AMOUNTS = [2.0**k for k in range(10, 25)]


def noisy(curve: Curve, seed: int, noise: float = 0.03, repeats: int = 1):
    """Samples of a curve with relative noise."""
    rng = np.random.default_rng(seed)
    return [(a, curve(a) * (1 + noise * rng.standard_normal())) for a in AMOUNTS * repeats]


@given(st.floats(1e-5, 1e-1), st.floats(1e-11, 1e-7), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_a_planted_line_is_found(alpha: float, beta: float, seed: int) -> None:
    # Both coefficients have to matter somewhere among the amounts, or noise hides them.
    beta = min(max(beta, alpha / AMOUNTS[-3]), alpha / AMOUNTS[2])
    fit = fit_line(noisy(Line(alpha, beta), seed, noise=0.01))
    assert isinstance(fit.curve, Line)
    assert fit.curve.alpha == pytest.approx(alpha, rel=0.1)
    assert fit.curve.beta == pytest.approx(beta, rel=0.1)
    assert fit.error <= fit.worst < 0.1


@given(st.floats(1e-11, 1e-8), st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_a_planted_sorting_cost_is_found(gamma: float, seed: int) -> None:
    fixed = gamma * 0.01 * AMOUNTS[5] * math.log(AMOUNTS[5])
    fit = fit_sorting(noisy(Sorting(gamma, 0.01, fixed), seed, noise=0.01), 0.01)
    assert isinstance(fit.curve, Sorting)
    assert fit.curve.density == 0.01
    assert fit.curve.gamma == pytest.approx(gamma, rel=0.1)
    assert fit.curve.fixed == pytest.approx(fixed, rel=0.1)


def test_intervals_hold_the_planted_coefficients_nineteen_times_in_twenty() -> None:
    true = Line(1e-3, 1e-9)
    fits = [fit_line(noisy(true, seed)) for seed in range(400)]
    for name in ("alpha", "beta"):
        inside = [low <= getattr(true, name) <= high for low, high in
                  (fit.intervals[name] for fit in fits)]  # fmt: skip
        assert 0.90 <= np.mean(inside) <= 0.99


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (4, 2.776), (5, 2.571), (10, 2.228), (100, 1.984)]
)
def test_quantiles_are_the_tables(freedom: int, value: float) -> None:
    assert _quantile(freedom) == pytest.approx(value, abs=2e-3)


def test_a_long_sample_does_not_drown_short_ones() -> None:
    samples = [*noisy(Line(1e-3, 1e-9), 1, noise=0.0), (2.0**34, 20.0)]
    assert fit_line(samples).curve(1024.0) == pytest.approx(1e-3, rel=0.1)


def test_medians_of_repeated_amounts_resist_a_straggler() -> None:
    samples = noisy(Line(1e-3, 1e-9), 2, repeats=5)
    samples[3] = (samples[3][0], 1.0)
    fit = fit_line(samples)
    assert isinstance(fit.curve, Line)
    assert fit.curve.alpha == pytest.approx(1e-3, rel=0.05)
    assert fit.samples == tuple(samples)


def test_coefficients_are_never_negative() -> None:
    falls = fit_line([(1.0, 3.0), (2.0, 2.0), (3.0, 1.5)])
    assert isinstance(falls.curve, Line)
    assert falls.curve.beta == 0.0
    assert falls.curve.alpha > 0.0
    below = fit_line([(1.0, 0.1), (2.0, 1.2), (3.0, 2.1)])
    assert isinstance(below.curve, Line)
    assert below.curve.alpha == 0.0
    for fit in (falls, below):
        assert all(0.0 <= low <= high for low, high in fit.intervals.values())


def test_what_the_free_fit_leaves_possible_of_a_coefficient_at_zero_stays_possible() -> None:
    xs, ys = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 1.3, 1.6, 2.6])
    fit = fit_line(list(zip(xs.tolist(), ys.tolist(), strict=True)))
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
    assert isinstance(fit.curve, Line)
    assert (fit.curve.alpha, fit.curve.beta) == (0.0, pytest.approx(alone))
    assert fit.intervals["beta"] == pytest.approx((alone - half, alone + half), rel=1e-3)


def test_two_amounts_leave_the_coefficients_open() -> None:
    fit = fit_line([(1.0, 2.0), (2.0, 3.0)])
    assert isinstance(fit.curve, Line)
    assert (fit.curve.alpha, fit.curve.beta) == pytest.approx((1.0, 1.0))
    assert fit.intervals["beta"] == (0.0, math.inf)
    assert "too few" in fit.explain()
    assert fit_of(json.loads(json.dumps(fit.to_json())), "x") == fit


def test_the_best_fit_is_the_simplest_that_fits() -> None:
    assert isinstance(best_fit(noisy(Line(1e-3, 1e-9), 3)).curve, Line)
    # Sorting without a fixed part curves too much for a line over four decades.
    curved = noisy(Sorting(1e-9, 0.01), 4)
    assert fit_line(curved).worst > ACCEPTED
    assert isinstance(best_fit(curved, density=0.01).curve, Sorting)
    assert isinstance(best_fit(curved).curve, Pieces)
    steps = [(a, 1e-3 if a < 1e5 else 1e-1) for a in AMOUNTS]
    stepped = best_fit(steps, density=0.01)
    assert isinstance(stepped.curve, Pieces)
    assert stepped.worst == pytest.approx(0.0, abs=1e-12)
    assert stepped.intervals == {}


def test_pieces_do_not_fall_where_medians_do() -> None:
    fit = best_fit([(1.0, 5.0), (2.0, 9.0), (3.0, 1.0), (4.0, 100.0)])
    assert fit.curve == Pieces((1.0, 2.0, 3.0, 4.0), (5.0, 5.0, 5.0, 100.0))
    assert best_fit([(7.0, 0.5)]).curve == Pieces((7.0,), (0.5,))


def test_times_of_zero_are_no_trouble() -> None:
    fit = fit_line([(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)])
    assert fit.curve == Line(0.0, 0.0)
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
def test_samples_that_are_not_right_are_one_line(samples: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fit_line(samples)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_says_what_it_found_in_one_line() -> None:
    line = fit_line(noisy(Line(1e-3, 1e-9), 5)).explain()
    assert "alpha" in line
    assert "beta" in line
    assert "15 amounts" in line
    assert "\n" not in line
    assert "pieces" in best_fit([(7.0, 0.5)]).explain()


@pytest.mark.parametrize(
    "fit",
    [
        fit_line(noisy(Line(1e-3, 1e-9), 6)),
        fit_sorting(noisy(Sorting(1e-9, 0.01), 7), 0.01),
        best_fit([(1.0, 5.0), (2.0, 9.0), (3.0, 1.0)]),
    ],
    ids=["line", "sorting", "pieces"],
)
def test_a_fit_survives_json(fit: Any) -> None:
    assert fit_of(json.loads(json.dumps(fit.to_json())), "x") == fit


DAMAGE: list[tuple[list[Any], Any, str]] = [
    (["curve"], None, "None"),
    (["curve", "alpha_s"], -1, "alpha"),
    (["samples"], None, "samples"),
    (["samples", 0], [1], "[1]"),
    (["samples", 0], [0, 1], "[0, 1]"),
    (["samples", 0], [1, math.nan], "nan"),
    (["intervals_95_percent"], [], "intervals_95_percent"),
    (["intervals_95_percent", "alpha"], [2, 1], "alpha is [2, 1]"),
    (["intervals_95_percent", "alpha"], [None, 1], "alpha"),
    (["intervals_95_percent", "gamma"], [0, 1], "gamma"),
    (["worst_relative_error"], "small", "'small'"),
    (["median_relative_error"], -0.5, "-0.5"),
]


@pytest.mark.parametrize(("path", "value", "words"), DAMAGE)
def test_a_damaged_fit_is_one_line(path: list[Any], value: Any, words: str) -> None:
    data = copy.deepcopy(fit_line(noisy(Line(1e-3, 1e-9), 8)).to_json())
    where: Any = data
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    with pytest.raises(UsageError) as caught:
        fit_of(data, "probe.encode")
    assert words in str(caught.value)
    assert "probe.encode" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_dict_is_no_fit() -> None:
    with pytest.raises(UsageError, match=r"probe\.encode is 3"):
        fit_of(3, "probe.encode")


def test_each_median_counts_as_much_where_several_are_averaged() -> None:
    """30, 20 and 10 fall one after the other; their mean is 20, whatever is averaged first."""
    falling = best_fit([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0), (4.0, 500.0)])
    assert falling.curve == Pieces((1.0, 2.0, 3.0, 4.0), (20.0, 20.0, 20.0, 500.0))
