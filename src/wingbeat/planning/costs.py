"""Cost curves in seconds by elements or bytes, their fits to samples, and the backward pass."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from wingbeat.errors import UsageError
from wingbeat.planning.files import check_range
from wingbeat.settings import is_number

Floats = NDArray[np.float64]
C = TypeVar("C", bound="Curve")

# -- curves --------------------------------------------------------------------------------------


class Curve:
    """Seconds as a function of an amount, in elements or bytes.

    The value at 0 is 0.0, without the startup time. Values are finite, never negative, and do not
    fall as the amount grows.
    """

    __slots__ = ()

    @overload
    def __call__(self, amount: float) -> float: ...

    @overload
    def __call__(self, amount: Floats) -> Floats: ...

    def __call__(self, amount: float | Floats) -> float | Floats:
        """Return the seconds for ``amount``: one number, or a float64 array of any shape."""
        # A single number is computed as an array for bit-identical results.
        amounts = np.atleast_1d(np.asarray(amount, dtype=np.float64))
        seconds: Floats = np.where(amounts > 0.0, self._seconds(amounts), 0.0)
        return seconds if isinstance(amount, np.ndarray) else float(seconds[0])

    def _seconds(self, amount: Floats) -> Floats:
        raise NotImplementedError

    def scaled(self: C, factor: float) -> C:
        """Return the curve of ``factor`` times the seconds."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Linear(Curve):
    """``alpha + beta * amount`` seconds, both 0 or more (OMGS-SGD, Eq. 11).

    ``alpha`` is the startup time of each call, ``beta`` the seconds per element or byte.
    """

    kind: ClassVar[str] = "linear"
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_range("Linear.alpha", (self.alpha,), 0)
        check_range("Linear.beta", (self.beta,), 0)

    def _seconds(self, amount: Floats) -> Floats:
        seconds: Floats = self.alpha + self.beta * amount
        return seconds

    def scaled(self, factor: float) -> Linear:
        """Return the curve of ``factor`` times the seconds."""
        return Linear(factor * self.alpha, factor * self.beta)


@dataclass(frozen=True, slots=True)
class Linearithmic(Curve):
    """``fixed + gamma * density * d * log d`` seconds for d elements (OMGS-SGD, Eq. 10).

    ``density`` is the share of elements that are selected, above 0 and at most 1. The paper has no
    startup time ``fixed``. The logarithm is the natural one; below one element it counts as 0.
    Values out of range are a `UsageError`.
    """

    kind: ClassVar[str] = "linearithmic"
    gamma: float
    density: float
    fixed: float = 0.0

    def __post_init__(self) -> None:
        check_range("Linearithmic.gamma", (self.gamma,), 0)
        check_range("Linearithmic.fixed", (self.fixed,), 0)
        if not 0.0 < self.density <= 1.0:
            raise UsageError(
                f"Linearithmic.density is {self.density!r}; allowed: above 0, at most 1"
            )

    def _seconds(self, amount: Floats) -> Floats:
        logs = np.log(np.maximum(amount, 1.0))
        seconds: Floats = self.fixed + self.gamma * self.density * (amount * logs)
        return seconds

    def scaled(self, factor: float) -> Linearithmic:
        """Return the curve of ``factor`` times the seconds."""
        return Linearithmic(factor * self.gamma, self.density, factor * self.fixed)


@dataclass(frozen=True, slots=True)
class PiecewiseLinear(Curve):
    """Line segments through points; the outer ones are extrapolated, but never below 0.

    There is at least one point, which makes a constant. ``amounts`` rise from above 0; ``seconds``
    are 0 or more and do not fall; other points are a `UsageError`.
    """

    kind: ClassVar[str] = "piecewise linear"
    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_range("PiecewiseLinear.amounts", self.amounts, 0)
        check_range("PiecewiseLinear.seconds", self.seconds, 0)
        rising = all(a < b for a, b in pairwise((0.0, *self.amounts)))
        monotone = all(a <= b for a, b in pairwise(self.seconds))
        same_length = 0 < len(self.amounts) == len(self.seconds)
        if not (same_length and rising and monotone):
            raise UsageError(
                f"PiecewiseLinear has {len(self.amounts)} amounts and {len(self.seconds)} seconds; "
                "allowed: equally many, at least one, amounts above 0 and rising, seconds not "
                "falling"
            )

    def _seconds(self, amount: Floats) -> Floats:
        xs, ys = np.array(self.amounts), np.array(self.seconds)
        if len(xs) == 1:
            return np.full(amount.shape, ys[0])
        place = np.clip(np.searchsorted(xs, amount, side="right") - 1, 0, len(xs) - 2)
        slopes = np.diff(ys) / np.diff(xs)
        lines = ys[place] + slopes[place] * (amount - xs[place])
        # Rounding must not make a value exceed that of the next point.
        highest = np.append(ys[1:-1], np.inf)[place]
        seconds: Floats = np.clip(lines, 0.0, highest)
        return seconds

    def scaled(self, factor: float) -> PiecewiseLinear:
        """Return the curve of ``factor`` times the seconds."""
        return PiecewiseLinear(self.amounts, tuple(factor * each for each in self.seconds))


ZERO = Linear(0.0, 0.0)
"""The curve of an operation that takes no time."""


# -- fits ----------------------------------------------------------------------------------------

Samples = Sequence[tuple[float, float]]
"""(amount, seconds) pairs; an amount may occur several times."""

Interval = tuple[float, float | None]
"""A confidence interval; no upper limit with no more amounts than coefficients."""

ACCEPTED_ERROR = 0.2
"""Largest relative error with which a formula is accepted as a fit."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve and its uncertainty.

    ``error`` and ``worst`` are the median and the largest relative error over the amounts.
    ``intervals`` are those of 95% confidence of each coefficient, by its name in the curve; empty
    for `PiecewiseLinear`. ``samples`` are (amount, seconds) as measured. Values out of range are a
    `UsageError`.
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
    weights: Floats = 1.0 / np.maximum(seconds, max(float(seconds.max()) * 1e-6, 1e-12))
    return weights


def _solve(xs: Floats, ys: Floats) -> tuple[tuple[float, float], list[Interval]]:
    """Fit ``a + b * x``, both 0 or more; return (a, b) and their confidence intervals."""
    weights = _weights(ys)
    columns = np.stack((np.ones_like(xs), xs), axis=1) * weights[:, None]
    target = ys * weights
    found = _least_squares(columns, target)
    if min(value for value, _ in found) < 0.0:
        losses, choices = [], []
        for kept in (0, 1):
            value, half = _least_squares(columns[:, [kept]], target)[0]
            losses.append(float(np.sum((columns[:, kept] * value - target) ** 2)))
            # The interval of the unconstrained fit above 0 remains possible for the other.
            choice = [(0.0, max(0.0, sum(each))) for each in found]
            choice[kept] = value, half
            choices.append(choice)
        found = choices[losses.index(min(losses))]
    limits: list[Interval] = [
        (max(0.0, value - half), None if math.isinf(half) else value + half)
        for value, half in found
    ]
    return (found[0][0], found[1][0]), limits


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
    halves = student_half_width(freedom) * np.sqrt(np.maximum(variance * np.diag(inverse), 0.0))
    pairs = zip(values / scale, halves / scale, strict=True)
    return [(float(value), float(half)) for value, half in pairs]


@cache
def student_half_width(freedom: int) -> float:
    """Return the t for which a variable of Student's distribution is in -t to t in 95% of cases.

    ``freedom`` is 1 or more. The relative error is below 1e-12 up to 10,000. The probability is a
    finite sum in the angle ``atan(t / sqrt(freedom))`` (Abramowitz and Stegun, Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4), which is bisected.
    """
    odd = freedom % 2
    ks = np.arange(1, (freedom - odd) // 2)
    factors = np.cumprod(np.concatenate(([1.0], (2 * ks - 1 + odd) / (2 * ks + odd))))

    def probability(angle: float) -> float:
        powers = math.cos(angle) ** (2 * np.arange(len(factors)))
        series = math.sin(angle) * float(factors @ powers)
        if not odd:
            return series
        return 2.0 / math.pi * (angle + (math.cos(angle) * series if freedom > 1 else 0.0))

    low, high = 0.0, math.pi / 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if probability(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _fit(
    curve: Linear | Linearithmic | PiecewiseLinear, intervals: dict[str, Interval], samples: Samples
) -> Fit:
    amounts, seconds = _medians(samples, 1)
    evaluated: Curve = curve
    errors = np.abs(evaluated(amounts) - seconds) * _weights(seconds)
    given = tuple((float(amount), float(taken)) for amount, taken in samples)
    return Fit(curve, float(np.median(errors)), float(errors.max()), intervals, given)


# -- models --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of a bucket.

    Attributes:
        encode: seconds by elements to encode, ``t_s`` (OMGS-SGD, Eq. 10).
        exchange: seconds by bytes to exchange, ``t_c`` (OMGS-SGD, Eq. 11).
        delay: seconds, by bytes, by which a concurrent exchange delays backward, as both need the
            same processors. The paper has no such term.
        gather: seconds by bytes to all-gather during the next forward, where an all-reduce is split
            into a reduce-scatter (``exchange``) and an all-gather (DeAR); None otherwise.
    """

    encode: Curve
    exchange: Curve
    delay: Curve = ZERO
    gather: Curve | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """The backward pass of a model: its tensors in the order in which gradients become ready.

    The paper counts in reverse: its layer L is the first here, its layer 1 the last.

    Attributes:
        tensors: index of each tensor in the model's list, each once.
        ready_s: seconds from the start of backward until the gradient is ready, backward alone:
            ``tau_b + t_b`` without sparsification (OMGS-SGD, Eqs. 2, 7).
        numels: elements of each tensor, 0 or more.
        nbytes: bytes that each tensor adds to a payload, 0 or more.
        kinds: dtype and device of each; tensors of different kinds never share a bucket.

    Lengths that differ, times that fall and values out of range are a `UsageError`.
    """

    tensors: tuple[int, ...]
    ready_s: tuple[float, ...]
    numels: tuple[int, ...]
    nbytes: tuple[float, ...]
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        columns: tuple[tuple[Any, ...], ...] = (
            self.tensors, self.ready_s, self.numels, self.nbytes, self.kinds,
        )  # fmt: skip
        if len({len(column) for column in columns}) != 1:
            raise UsageError(
                "Workload: tensors, ready_s, numels, nbytes and kinds have lengths "
                f"{', '.join(str(len(column)) for column in columns)}; allowed: equal lengths"
            )
        if len(set(self.tensors)) != len(self.tensors):
            raise UsageError("Workload: a tensor is listed twice; allowed: each once")
        check_range("Workload.ready_s", self.ready_s, 0)
        check_range("Workload.numels", self.numels, 0)
        check_range("Workload.nbytes", self.nbytes, 0)
        for earlier, later in pairwise(self.ready_s):
            if later < earlier:
                raise UsageError(
                    f"Workload: ready_s falls from {earlier!r} to {later!r}; allowed: the order in "
                    "which gradients become ready"
                )

    def __len__(self) -> int:
        return len(self.tensors)
