"""Cost models, in seconds as a function of elements or bytes, and the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from wingbeat.errors import UsageError
from wingbeat.planning.files import check_range

Floats = NDArray[np.float64]
C = TypeVar("C", bound="Curve")


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
    """``alpha + beta * amount`` seconds (OMGS-SGD, Eq. 11).

    Attributes:
        alpha: startup time of each call in seconds, 0 or more.
        beta: seconds per element or byte, 0 or more.

    Raises:
        UsageError: a coefficient is negative or not finite.
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

    The logarithm is the natural one; below one element it counts as 0.

    Attributes:
        gamma: seconds per selected element and unit of log d, 0 or more.
        density: share of elements that are selected, above 0 and at most 1.
        fixed: startup time of each call in seconds, 0 or more. The paper has none.

    Raises:
        UsageError: a value is out of range or not finite.
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

    A single point makes a constant.

    Attributes:
        amounts: elements or bytes, rising, each above 0; at least one.
        seconds: as many values, 0 or more, not falling.

    Raises:
        UsageError: the points do not meet these conditions.
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

    Raises:
        UsageError: lengths differ, times fall, or a value is out of range.
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
