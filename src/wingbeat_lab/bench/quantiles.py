"""Median and spread of repeated measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The median and the range of the middle 80% of the values, in their unit."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Quantiles of ``values``, with linear interpolation."""
        ordered = sorted(values)
        return cls(*(_quantile(ordered, share) for share in (0.5, 0.1, 0.9)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
