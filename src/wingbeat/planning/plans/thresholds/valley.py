"""A curve through noisy times: the nearest one that falls first and rises then.

The paper fits "the relationship between iteration time and priority threshold" and names no curve.
The time is no parabola: where a large layer joins the urgent class it jumps. What is known is that
too few urgent buckets leave the first layers waiting for others, and too many for each other. So
nothing else is assumed: of all curves that fall and then rise, the one with the least squares.
"""

from __future__ import annotations

from collections.abc import Sequence


def valley(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the fitted values.

    >>> valley([5.0, 3.0, 4.0, 2.0, 6.0], [1.0] * 5)
    [5.0, 3.5, 3.5, 2.0, 6.0]

    Args:
        values: times, in the order of thresholds.
        weights: how much each counts, above 0.
    """
    best: list[float] = []
    least = float("inf")
    # Wherever the lowest point is, the two sides do not depend on each other.
    for turn in range(len(values) + 1):
        left = _rising([-value for value in values[:turn]], weights[:turn])
        right = _rising(values[turn:], weights[turn:])
        fitted = [*(-value for value in left), *right]
        squares = zip(values, fitted, weights, strict=True)
        error = sum(weight * (value - fit) ** 2 for value, fit, weight in squares)
        if error < least:
            least, best = error, fitted
    return best


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest values that do not fall: neighbours that do are put together."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] >= pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = (mean * mass + pool[0] * pool[1]) / total, total, count + pool[2]
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]
