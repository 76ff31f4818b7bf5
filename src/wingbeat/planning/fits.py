"""Cost curves fitted to measured samples, with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wingbeat.errors import UsageError
from wingbeat.planning.costs import Curve, Floats, Linear, Linearithmic, PiecewiseLinear
from wingbeat.planning.files import check_range
from wingbeat.settings import is_number

Samples = Sequence[tuple[float, float]]
"""(amount, seconds) pairs; an amount may occur several times."""

Interval = tuple[float, float | None]
"""A 95% confidence interval; no upper limit with too few samples."""

ACCEPTED_ERROR = 0.2
"""Largest relative error with which a formula is accepted as a fit."""

_Z = 1.959964
_T = dict(enumerate((12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622), 1))
"""97.5% quantiles of the normal distribution, and of Student's for few degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve and its uncertainty.

    Attributes:
        curve: seconds as a function of the amount.
        error: median relative error, over the amounts.
        worst: largest relative error.
        intervals: 95% confidence interval of each coefficient, by its name in the curve; empty for
            `PiecewiseLinear`. The upper limit is None with no more amounts than coefficients.
        samples: (amount, seconds) as measured.

    Raises:
        UsageError: a value is out of range, or an interval is of no coefficient of the curve.
    """

    curve: Linear | Linearithmic | PiecewiseLinear
    error: float
    worst: float
    intervals: dict[str, Interval]
    samples: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        check_range("error", (self.error,), 0)
        check_range("worst", (self.worst,), 0)
        if not self.samples:
            raise UsageError("samples is empty; allowed: the samples that the curve was fitted to")
        for sample in self.samples:
            _check_sample(*sample)
        for name, (low, high) in self.intervals.items():
            if not hasattr(self.curve, name):
                raise UsageError(f"intervals: the curve has no coefficient {name!r}")
            check_range(f"intervals.{name}", (low,), 0, math.inf if high is None else high)

    def explain(self) -> str:
        """Return the curve and its uncertainty in one line."""
        amounts = len({amount for amount, _ in self.samples})
        errors = f"error {self.error:.1%} (median), {self.worst:.1%} (worst) over {amounts} amounts"
        if not self.intervals:
            return f"{self.curve.kind} through the medians; {errors}"
        parts = []
        for name, (low, high) in self.intervals.items():
            limits = (
                "too few amounts for an interval" if high is None else f"{low:.3g} to {high:.3g}"
            )
            parts.append(f"{name} {getattr(self.curve, name):.3g} s ({limits})")
        return f"{self.curve.kind}: {', '.join(parts)}; {errors}"


def fit_linear(samples: Samples) -> Fit:
    """Fit ``alpha + beta * amount``, both 0 or more (OMGS-SGD, Eq. 11).

    Least squares of relative errors over the median of each amount, so that long samples do not
    dominate short ones.
    """
    amounts, seconds = _medians(samples, 2)
    values, limits = _solve(amounts, seconds)
    return _fit(Linear(*values), dict(zip(("alpha", "beta"), limits, strict=True)), samples)


def fit_linearithmic(samples: Samples, density: float) -> Fit:
    """Fit ``fixed + gamma * density * d * log d``, both 0 or more (OMGS-SGD, Eq. 10)."""
    amounts, seconds = _medians(samples, 2)
    values, limits = _solve(Linearithmic(1.0, density)(amounts), seconds)
    curve = Linearithmic(values[1], density, values[0])
    return _fit(curve, {"gamma": limits[1], "fixed": limits[0]}, samples)


def best_fit(samples: Samples, *, density: float | None = None) -> Fit:
    """Fit `Linear`, else `Linearithmic` if a density is given, else `PiecewiseLinear`.

    A formula is accepted if its worst relative error is at most `ACCEPTED_ERROR`. The pieces
    connect the medians; medians that fall as the amount grows are averaged with their neighbours
    until they do not (isotonic regression).
    """
    amounts, seconds = _medians(samples, 1)
    if len(amounts) > 1:
        fitted = fit_linear(samples)
        if fitted.worst > ACCEPTED_ERROR and density is not None:
            fitted = fit_linearithmic(samples, density)
        if fitted.worst <= ACCEPTED_ERROR:
            return fitted
    rising = isotonic(seconds.tolist(), [1.0] * len(seconds))
    return _fit(PiecewiseLinear(tuple(amounts.tolist()), tuple(rising)), {}, samples)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest values that do not fall, in least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = (mean * mass + pool[0] * pool[1]) / total, total, count + pool[2]
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


def _check_sample(amount: float, seconds: float) -> None:
    if not (is_number(amount) and amount > 0 and is_number(seconds) and seconds >= 0):
        raise UsageError(
            f"sample ({amount!r}, {seconds!r}): allowed: amounts above 0 and seconds, 0 or more, "
            "all finite"
        )


def _medians(samples: Samples, least: int) -> tuple[Floats, Floats]:
    """Return the amounts, rising, and the median seconds of each."""
    by_amount: dict[float, list[float]] = {}
    for amount, seconds in samples:
        _check_sample(amount, seconds)
        by_amount.setdefault(float(amount), []).append(float(seconds))
    if len(by_amount) < least:
        raise UsageError(f"samples of {len(by_amount)} amounts: allowed: {least} amounts or more")
    amounts = sorted(by_amount)
    return np.array(amounts), np.array([statistics.median(by_amount[a]) for a in amounts])


def _weights(seconds: Floats) -> Floats:
    """Return one over the seconds; 0 seconds count as a millionth of the longest."""
    floor = max(float(seconds.max()) * 1e-6, 1e-12)
    weights: Floats = 1.0 / np.maximum(seconds, floor)
    return weights


def _solve(xs: Floats, ys: Floats) -> tuple[tuple[float, float], list[Interval]]:
    """Fit ``a + b * x``, both 0 or more; return (a, b) and their confidence intervals."""
    weights = _weights(ys)
    columns = np.stack((np.ones_like(xs), xs), axis=1) * weights[:, None]
    target = ys * weights
    both = _least_squares(columns, target)
    if min(value for value, _ in both) >= 0.0:
        found = both
    else:
        choices = [_one_coefficient(columns, target, kept, both) for kept in (0, 1)]
        found = min(choices, key=lambda choice: choice[0])[1]
    limits: list[Interval] = [
        (max(0.0, value - half), None if math.isinf(half) else value + half)
        for value, half in found
    ]
    return (found[0][0], found[1][0]), limits


def _one_coefficient(
    columns: Floats, target: Floats, kept: int, both: list[tuple[float, float]]
) -> tuple[float, list[tuple[float, float]]]:
    """Fit one coefficient with the other at 0; return the loss, and both with half intervals."""
    value, half = _least_squares(columns[:, [kept]], target)[0]
    loss = float(np.sum((columns[:, kept] * value - target) ** 2))
    # The interval of the unconstrained fit above 0 remains possible.
    zero = (0.0, max(0.0, sum(both[1 - kept])))
    return loss, [(value, half), zero] if kept == 0 else [zero, (value, half)]


def _least_squares(columns: Floats, target: Floats) -> list[tuple[float, float]]:
    """Return each coefficient and half of its 95% confidence interval."""
    scale = np.sqrt((columns**2).sum(axis=0))
    scaled = columns / scale
    inverse = np.linalg.pinv(scaled.T @ scaled)
    values = inverse @ (scaled.T @ target)
    freedom = len(target) - columns.shape[1]
    if freedom < 1:
        return [(float(value), math.inf) for value in values / scale]
    variance = float(np.sum((scaled @ values - target) ** 2)) / freedom
    halves = _quantile(freedom) * np.sqrt(np.maximum(variance * np.diag(inverse), 0.0))
    pairs = zip(values / scale, halves / scale, strict=True)
    return [(float(value), float(half)) for value, half in pairs]


def _quantile(freedom: int) -> float:
    """97.5% quantile of Student's distribution, to three digits (Cornish-Fisher expansion)."""
    if freedom in _T:
        return _T[freedom]
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _fit(
    curve: Linear | Linearithmic | PiecewiseLinear, intervals: dict[str, Interval], samples: Samples
) -> Fit:
    amounts, seconds = _medians(samples, 1)
    evaluated: Curve = curve
    errors = np.abs(evaluated(amounts) - seconds) * _weights(seconds)
    given = tuple((float(amount), float(taken)) for amount, taken in samples)
    return Fit(curve, float(np.median(errors)), float(errors.max()), intervals, given)
