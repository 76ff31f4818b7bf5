"""Which bucket sizes can make a difference for a model: no trial is spent on the others.

Pure functions of what all workers agree on, so that all decide the same without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from wingbeat.planning import plans
from wingbeat.planning.plans.sample import between
from wingbeat.types import Fusion, Plan, TensorSpec, Tuning

_LOOKED_AT = 64
"""Sizes of the range whose plans are compared; evenly spaced on a logarithmic scale."""


def largest_kind(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of all tensors of the dtype and device that has most of them.

    No bucket can hold more, so all sizes from there on make one plan.
    """
    totals: Counter[str] = Counter()
    for spec in specs:
        totals[spec.kind] += spec.nbytes
    return max([1, *totals.values()])


def within(tuning: Tuning, specs: Sequence[TensorSpec]) -> Tuning:
    """Return the tuning with a range that ends where buckets hold the whole model."""
    high = max(tuning.low_bytes, min(tuning.high_bytes, largest_kind(specs)))
    return replace(tuning, high_bytes=high)


def one_plan(
    fusion: Fusion, tuning: Tuning, specs: Sequence[TensorSpec], order: Sequence[int]
) -> Plan | None:
    """Return the plan that the start and all sizes of the range make, None if there are several.

    Args:
        fusion: the rule, with the size that training starts with.
        tuning: the range.
        specs: all tensors of the model.
        order: in which gradients become ready, as all workers have agreed.
    """
    first = plans.make(fusion, specs, order)
    # From the ends inwards: where sizes matter, the smallest and the largest show it at once.
    for i in sorted(range(_LOOKED_AT), key=lambda i: min(i, _LOOKED_AT - 1 - i)):
        size = between(tuning, i / (_LOOKED_AT - 1))
        if plans.make(replace(fusion, bucket_bytes=size), specs, order) != first:
            return None
    return first
