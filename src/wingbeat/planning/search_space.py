"""The search space of bucket sizes: samples, the logarithmic scale, and the useful range."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from wingbeat.planning.files import check_range
from wingbeat.planning.plans import make_plan
from wingbeat.types import Fusion, Plan, TensorSpec, Tuning

_COMPARED_SIZES = 64
"""Number of compared sizes, evenly spaced on a logarithmic scale."""

LEAST_THROUGHPUT = 1e-12
"""Iterations per second that a valid measurement exceeds."""

Setting = tuple[int, str]
"""A bucket size in bytes, and a topology; empty where topologies are not tuned."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One block of iterations: mean throughput of all workers, median over the iterations."""

    bucket_bytes: int
    iterations_per_s: float
    topology: str = ""

    def __post_init__(self) -> None:
        check_range("bucket_bytes", (self.bucket_bytes,), 1)
        check_range("iterations_per_s", (self.iterations_per_s,), LEAST_THROUGHPUT, 1e12)


def size_at(tuning: Tuning, share: float) -> int:
    """Return the size at ``share`` (0 to 1) of the range, on a logarithmic scale.

    >>> [size_at(Tuning(search="grid", low_bytes=1, high_bytes=100), s) for s in (0, 0.5, 1)]
    [1, 10, 100]
    """
    low, high = tuning.low_bytes, tuning.high_bytes
    return min(max(round(low * math.pow(high / low, share)), low), high)


def largest_bucket(specs: Sequence[TensorSpec]) -> int:
    """Return the largest total bytes of a dtype and device; larger sizes make the same plan."""
    totals: Counter[str] = Counter()
    for spec in specs:
        totals[spec.kind] += spec.nbytes
    return max([1, *totals.values()])


def clip_range(tuning: Tuning, specs: Sequence[TensorSpec]) -> Tuning:
    """Return the tuning with a range that ends at `largest_bucket`."""
    high = max(tuning.low_bytes, min(tuning.high_bytes, largest_bucket(specs)))
    return replace(tuning, high_bytes=high)


def single_plan(
    fusion: Fusion, tuning: Tuning, specs: Sequence[TensorSpec], order: Sequence[int]
) -> Plan | None:
    """Return the plan that the start and all sizes of the range make; None if there are several."""
    first = make_plan(fusion, specs, order)
    last = _COMPARED_SIZES - 1
    # The ends first: where sizes matter, the smallest and the largest differ.
    for i in sorted(range(_COMPARED_SIZES), key=lambda i: min(i, last - i)):
        size = size_at(tuning, i / last)
        if make_plan(replace(fusion, bucket_bytes=size), specs, order) != first:
            return None
    return first
