"""How long something takes, as a function of how much there is: elements or bytes to seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from wingbeat.errors import UsageError
from wingbeat.settings import is_number

Floats = NDArray[np.float64]


class Curve(Protocol):
    """Seconds as a function of an amount, in elements or bytes; what, the owner says.

    Nothing takes no time: the value at 0 is 0.0, whatever each call costs. Values are finite,
    never negative, and do not fall as the amount grows.
    """

    @overload
    def __call__(self, amount: float) -> float: ...

    @overload
    def __call__(self, amount: Floats) -> Floats: ...

    def times(self, factor: float) -> Curve:
        """Return the curve of ``factor`` times the seconds.

        Raises:
            UsageError: the factor is negative or not finite.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Write it as a dict that `curve_of` reads."""
        ...


LARGEST = 1e15
"""No amount and no time that anybody measures is as large; arithmetic with larger ones may end in
infinity."""


def _check(name: str, **values: float) -> None:
    for key, value in values.items():
        if not is_number(value) or value < 0:
            raise UsageError(f"{name}({key}={value!r}): allowed are finite numbers, 0 or more")


class _Shape:
    """A curve above 0; subclasses give its ``_seconds``."""

    __slots__ = ()

    def _seconds(self, amount: Floats) -> Floats:
        raise NotImplementedError

    @overload
    def __call__(self, amount: float) -> float: ...

    @overload
    def __call__(self, amount: Floats) -> Floats: ...

    def __call__(self, amount: float | Floats) -> float | Floats:
        """Seconds for ``amount``: one number, or an array of any shape, float64."""
        # One number takes the same way as an array, so that both give the same bits.
        amounts = np.atleast_1d(np.asarray(amount, dtype=np.float64))
        seconds: Floats = np.where(amounts > 0.0, self._seconds(amounts), 0.0)
        return seconds if isinstance(amount, np.ndarray) else float(seconds[0])


@dataclass(frozen=True, slots=True)
class Line(_Shape):
    """``alpha + beta * amount`` seconds (OMGS-SGD, Eq. 11).

    Attributes:
        alpha: seconds that each call costs, 0 or more.
        beta: seconds for each element or byte, 0 or more.

    Raises:
        UsageError: a coefficient is negative or not finite.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        _check("Line", alpha=self.alpha, beta=self.beta)

    def _seconds(self, amount: Floats) -> Floats:
        seconds: Floats = self.alpha + self.beta * amount
        return seconds

    def times(self, factor: float) -> Line:
        """Return the curve of ``factor`` times the seconds."""
        return Line(factor * self.alpha, factor * self.beta)

    def to_json(self) -> dict[str, Any]:
        """Write it as a dict that `curve_of` reads."""
        return {"kind": "line", "alpha_s": self.alpha, "beta_s_per_unit": self.beta}


@dataclass(frozen=True, slots=True)
class Sorting(_Shape):
    """``fixed + gamma * density * d * log d`` seconds for d elements (OMGS-SGD, Eq. 10).

    The logarithm is the natural one, and that of less than one element counts as 0.

    Attributes:
        gamma: seconds for each element chosen and unit of log d, 0 or more.
        density: share of elements that are chosen, above 0 and at most 1.
        fixed: seconds that each call costs, 0 or more. The paper has none.

    Raises:
        UsageError: a value is out of range or not finite.
    """

    gamma: float
    density: float
    fixed: float = 0.0

    def __post_init__(self) -> None:
        _check("Sorting", gamma=self.gamma, density=self.density, fixed=self.fixed)
        if not 0.0 < self.density <= 1.0:
            raise UsageError(f"Sorting(density={self.density!r}): allowed is above 0, at most 1")

    def _seconds(self, amount: Floats) -> Floats:
        logs = np.log(np.maximum(amount, 1.0))
        seconds: Floats = self.fixed + self.gamma * self.density * (amount * logs)
        return seconds

    def times(self, factor: float) -> Sorting:
        """Return the curve of ``factor`` times the seconds."""
        return Sorting(factor * self.gamma, self.density, factor * self.fixed)

    def to_json(self) -> dict[str, Any]:
        """Write it as a dict that `curve_of` reads."""
        return {
            "kind": "sorting",
            "gamma_s": self.gamma,
            "density": self.density,
            "fixed_s": self.fixed,
        }


@dataclass(frozen=True, slots=True)
class Pieces(_Shape):
    """Straight pieces through points; the first and the last go on, but never below 0.

    A single point makes a constant.

    Attributes:
        amounts: elements or bytes, rising, each above 0; at least one.
        seconds: as many, 0 or more, not falling.

    Raises:
        UsageError: the points are not such.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in (("amounts", self.amounts), ("seconds", self.seconds)):
            for value in values:
                _check("Pieces", **{name: value})
        rising = all(a < b for a, b in zip((0.0, *self.amounts), self.amounts, strict=False))
        holding = all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if not self.amounts or len(self.amounts) != len(self.seconds) or not rising or not holding:
            raise UsageError(
                f"Pieces of {len(self.amounts)} amounts and {len(self.seconds)} seconds: allowed "
                "are equally many, at least one, amounts above 0 and rising, seconds not falling"
            )

    def _seconds(self, amount: Floats) -> Floats:
        xs, ys = np.array(self.amounts), np.array(self.seconds)
        if len(xs) == 1:
            return np.full(amount.shape, ys[0])
        place = np.clip(np.searchsorted(xs, amount, side="right") - 1, 0, len(xs) - 2)
        slopes = np.diff(ys) / np.diff(xs)
        lines = ys[place] + slopes[place] * (amount - xs[place])
        # Rounding must not make a value pass the next point's.
        highest = np.append(ys[1:-1], np.inf)[place]
        seconds: Floats = np.clip(lines, 0.0, highest)
        return seconds

    def times(self, factor: float) -> Pieces:
        """Return the curve of ``factor`` times the seconds."""
        return Pieces(self.amounts, tuple(factor * each for each in self.seconds))

    def to_json(self) -> dict[str, Any]:
        """Write it as a dict that `curve_of` reads."""
        return {"kind": "pieces", "amounts": list(self.amounts), "seconds": list(self.seconds)}


NOTHING = Line(0.0, 0.0)
"""Takes no time."""


def curve_of(data: Any, where: str) -> Curve:
    """Read a curve from what its ``to_json`` wrote; ``where`` names it in messages.

    Raises:
        UsageError: the data is damaged; one line that names ``where``.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{where} is {data!r}; allowed is a dict with 'kind'")
    kind = data.get("kind")
    readers: dict[str, tuple[tuple[str, ...], Callable[..., Curve]]] = {
        "line": (("alpha_s", "beta_s_per_unit"), Line),
        "sorting": (("gamma_s", "density", "fixed_s"), Sorting),
    }
    try:
        if kind == "pieces":
            return Pieces(*(_numbers(data, key) for key in ("amounts", "seconds")))
        if not isinstance(kind, str) or kind not in readers:
            raise UsageError(f"kind {kind!r}; allowed are line, pieces, sorting")
        keys, make = readers[kind]
        return make(*(_number(data.get(key), key) for key in keys))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _number(value: Any, key: str) -> float:
    # Whole numbers of JSON have no limit, floats have.
    if not is_number(value) or abs(value) > LARGEST:
        raise UsageError(f"{key} is {value!r}; allowed are finite numbers up to {LARGEST:g}")
    return float(value)


def _numbers(data: dict[str, Any], key: str) -> tuple[float, ...]:
    values = data.get(key)
    if not isinstance(values, list):
        raise UsageError(f"{key} is {values!r}; allowed is a list of numbers")
    return tuple(_number(value, key) for value in values)
