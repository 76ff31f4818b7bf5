"""From measured samples to curves, with what is known of their coefficients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wingbeat.errors import UsageError
from wingbeat.planning.costs.curve import Curve, Floats, Line, Pieces, Sorting, curve_of
from wingbeat.settings import is_number

Samples = Sequence[tuple[float, float]]
"""(amount, seconds) pairs; an amount may be there several times."""

ACCEPTED = 0.2
"""Largest relative error up to which a formula stands for the samples."""

_Z = 1.959964
_T = dict(enumerate((12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622), 1))
"""97.5% quantiles: the normal distribution's, and Student's for few degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve and how well it is known.

    Attributes:
        curve: seconds as a function of the amount.
        error: median relative error, over the amounts.
        worst: largest relative error.
        intervals: 95% interval of each coefficient, by its name in the curve. Infinite where there
            are no more amounts than coefficients; empty for `Pieces`.
        samples: (amount, seconds) as measured.
    """

    curve: Curve
    error: float
    worst: float
    intervals: dict[str, tuple[float, float]]
    samples: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Write it as a dict that `fit_of` reads; an infinite limit is written as None."""
        return {
            "curve": self.curve.to_json(),
            "median_relative_error": self.error,
            "worst_relative_error": self.worst,
            "intervals_95_percent": {
                name: [low, None if math.isinf(high) else high]
                for name, (low, high) in self.intervals.items()
            },
            "samples": [list(sample) for sample in self.samples],
        }

    def explain(self) -> str:
        """Say in one line what the curve is and how well it is known."""
        amounts = len({amount for amount, _ in self.samples})
        errors = f"error {self.error:.1%} (median), {self.worst:.1%} (worst) of {amounts} amounts"
        if not self.intervals:
            return f"pieces through the medians; {errors}"
        parts = []
        for name, (low, high) in self.intervals.items():
            limits = "too few amounts to say" if math.isinf(high) else f"{low:.3g} to {high:.3g}"
            parts.append(f"{name} {getattr(self.curve, name):.3g} s ({limits})")
        return f"{type(self.curve).__name__.lower()}: {', '.join(parts)}; {errors}"


def fit_line(samples: Samples) -> Fit:
    """Fit ``alpha + beta * amount``, both 0 or more (OMGS-SGD, Eq. 11).

    Least squares of relative errors over the medians of each amount, so that long samples do not
    drown short ones.

    Raises:
        UsageError: a sample is out of range, or there are less than two amounts.
    """
    amounts, seconds = _medians(samples, 2)
    values, limits = _solve(amounts, seconds)
    curve = Line(*values)
    return _fit(curve, dict(zip(("alpha", "beta"), limits, strict=True)), samples)


def fit_sorting(samples: Samples, density: float) -> Fit:
    """Fit ``fixed + gamma * density * d * log d``, both 0 or more (OMGS-SGD, Eq. 10).

    As `fit_line` does; the density is given.

    Raises:
        UsageError: a sample or the density is out of range, or there are less than two amounts.
    """
    amounts, seconds = _medians(samples, 2)
    unit = Sorting(1.0, density)
    values, limits = _solve(unit(amounts), seconds)
    curve = Sorting(values[1], density, values[0])
    return _fit(curve, {"gamma": limits[1], "fixed": limits[0]}, samples)


def best_fit(samples: Samples, *, density: float | None = None) -> Fit:
    """Fit a line, else `Sorting` if a density is given, else pieces through the medians.

    A formula is taken if its worst relative error is at most `ACCEPTED`. Medians that fall as the
    amount grows are averaged with their neighbours until they do not.

    Raises:
        UsageError: a sample or the density is out of range, or there is none.
    """
    amounts, seconds = _medians(samples, 1)
    if len(amounts) > 1:
        fitted = fit_line(samples)
        if fitted.worst > ACCEPTED and density is not None:
            fitted = fit_sorting(samples, density)
        if fitted.worst <= ACCEPTED:
            return fitted
    curve = Pieces(tuple(amounts.tolist()), tuple(_rising(seconds.tolist())))
    return _fit(curve, {}, samples)


def fit_of(data: Any, where: str) -> Fit:
    """Read a fit from what its ``to_json`` wrote; ``where`` names it in messages.

    Raises:
        UsageError: the data is damaged; one line that names ``where``.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{where} is {data!r}; allowed is a dict with 'curve'")
    curve = curve_of(data.get("curve"), f"{where}.curve")
    intervals, samples = data.get("intervals_95_percent"), data.get("samples")
    if not isinstance(intervals, dict) or not isinstance(samples, list):
        raise UsageError(f"{where}: intervals_95_percent or samples is missing")
    names = set(intervals) - {field for field in ("alpha", "beta", "gamma", "fixed")
                              if hasattr(curve, field)}  # fmt: skip
    if names:
        raise UsageError(f"{where}: the curve has no coefficient {min(map(str, names))!r}")
    pairs = [_pair(sample, f"{where}.samples") for sample in samples]
    if not pairs:
        raise UsageError(f"{where}: samples is empty; allowed is what the curve was fitted to")
    limits = {name: _limits(pair, f"{where}.{name}") for name, pair in intervals.items()}
    errors = []
    for key in ("median_relative_error", "worst_relative_error"):
        value = data.get(key)
        if not is_number(value) or value < 0:
            raise UsageError(f"{where}.{key} is {value!r}; allowed are finite numbers, 0 or more")
        errors.append(float(value))
    return Fit(curve, errors[0], errors[1], limits, tuple(pairs))


# -- arithmetic ------------------------------------------------------------------------------


def _medians(samples: Samples, least: int) -> tuple[Floats, Floats]:
    """Return the amounts, rising, and the median seconds of each."""
    by_amount: dict[float, list[float]] = {}
    for amount, seconds in samples:
        if not (is_number(amount) and amount > 0 and is_number(seconds) and seconds >= 0):
            raise UsageError(
                f"sample ({amount!r}, {seconds!r}): allowed are amounts above 0 and seconds, 0 or "
                "more, all finite"
            )
        by_amount.setdefault(float(amount), []).append(float(seconds))
    if len(by_amount) < least:
        raise UsageError(
            f"samples of {len(by_amount)} amounts: allowed are at least {least} different amounts"
        )
    amounts = sorted(by_amount)
    return np.array(amounts), np.array([statistics.median(by_amount[a]) for a in amounts])


def _weights(seconds: Floats) -> Floats:
    """One over the seconds; what took no time at all counts as a millionth of the longest."""
    floor = max(float(seconds.max()) * 1e-6, 1e-12)
    weights: Floats = 1.0 / np.maximum(seconds, floor)
    return weights


def _solve(xs: Floats, ys: Floats) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """Fit ``a + b * x``, both 0 or more; return (a, b) and the 95% interval of each."""
    weights = _weights(ys)
    columns = np.stack((np.ones_like(xs), xs), axis=1) * weights[:, None]
    target = ys * weights
    both = _least_squares(columns, target)
    if min(value for value, _ in both) >= 0.0:
        found = both
    else:
        choices = [_without(columns, target, kept, both) for kept in (0, 1)]
        found = min(choices, key=lambda choice: choice[0])[1]
    limits = [(max(0.0, value - half), value + half) for value, half in found]
    return (found[0][0], found[1][0]), limits


def _without(
    columns: Floats, target: Floats, kept: int, both: list[tuple[float, float]]
) -> tuple[float, list[tuple[float, float]]]:
    """Fit one coefficient with the other at 0; return the loss, and both with their halves."""
    value, half = _least_squares(columns[:, [kept]], target)[0]
    loss = float(np.sum((columns[:, kept] * value - target) ** 2))
    # What the free fit leaves possible above 0 stays possible.
    zero = (0.0, max(0.0, sum(both[1 - kept])))
    return loss, [(value, half), zero] if kept == 0 else [zero, (value, half)]


def _least_squares(columns: Floats, target: Floats) -> list[tuple[float, float]]:
    """Return each coefficient and half of its 95% interval."""
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
    """97.5% quantile of Student's distribution, to three digits (Cornish and Fisher's series)."""
    if freedom in _T:
        return _T[freedom]
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _rising(values: list[float]) -> list[float]:
    """Average neighbours until no value is below the one before (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [value for value, count in pools for _ in range(count)]


def _fit(curve: Curve, intervals: dict[str, tuple[float, float]], samples: Samples) -> Fit:
    amounts, seconds = _medians(samples, 1)
    errors = np.abs(curve(amounts) - seconds) * _weights(seconds)
    given = tuple((float(amount), float(taken)) for amount, taken in samples)
    return Fit(curve, float(np.median(errors)), float(errors.max()), intervals, given)


# -- from JSON -------------------------------------------------------------------------------


def _pair(data: Any, where: str) -> tuple[float, float]:
    if isinstance(data, list) and len(data) == 2:
        amount, seconds = data
        if is_number(amount) and is_number(seconds) and amount > 0 and seconds >= 0:
            return float(amount), float(seconds)
    raise UsageError(f"{where} holds {data!r}; allowed is [amount above 0, seconds, 0 or more]")


def _limits(data: Any, where: str) -> tuple[float, float]:
    if isinstance(data, list) and len(data) == 2:
        low, high = data
        if is_number(low) and high is None:
            return float(low), math.inf
        if is_number(low) and is_number(high) and 0 <= low <= high:
            return float(low), float(high)
    raise UsageError(f"{where} is {data!r}; allowed is [low, high], 0 or more, high may be null")
