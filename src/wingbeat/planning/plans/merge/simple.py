"""Plans that need no costs: all tensors in one bucket, and up to a number of elements."""

from __future__ import annotations

from wingbeat.errors import UsageError
from wingbeat.planning.costs.workload import Workload
from wingbeat.planning.plans.merge.runs import plan_of
from wingbeat.types import Plan


def one(workload: Workload) -> Plan:
    """Send all tensors in one bucket, or one for each run of a kind (TopK-SGD, section II-C)."""
    return _merged(workload, None)


def by_size(workload: Workload, elements: int) -> Plan:
    """Merge until a bucket has at least so many elements (MGS-SGD; 8192 in section V-D).

    What is left at the end, or before another kind, is a bucket of its own.

    Raises:
        UsageError: ``elements`` is less than 1.
    """
    if elements < 1:
        raise UsageError(f"elements={elements!r}: allowed are whole numbers, 1 or more")
    return _merged(workload, elements)


def _merged(workload: Workload, elements: int | None) -> Plan:
    stops: list[int] = []
    count = 0
    for position, kind in enumerate(workload.kinds):
        if position and kind != workload.kinds[position - 1] and stops[-1:] != [position]:
            stops.append(position)
            count = 0
        count += workload.numels[position]
        if elements is not None and count >= elements:
            stops.append(position + 1)
            count = 0
    if len(workload) and stops[-1:] != [len(workload)]:
        stops.append(len(workload))
    return plan_of(workload, stops)
