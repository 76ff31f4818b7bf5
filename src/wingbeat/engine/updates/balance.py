"""Whole tensors divided among workers, in the order in which they lie in a buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wingbeat.types import Span


def work(shape: Sequence[int]) -> int:
    """Return what the update of a tensor of this shape costs, compared with others.

    Updates of whole matrices multiply them: Muon's orthogonalisation, whose factors are as long as
    the matrix's shorter side; further dimensions count as columns. Of a vector each element counts.

    >>> work((512, 64)), work((64, 512)), work((8, 4, 2)), work((512,)), work(())
    (2097152, 2097152, 512, 512, 1)
    """
    elements = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    return elements * min(rows, elements // max(1, rows))


def divide(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Give each worker the tensors that follow those of the worker before it.

    The most that a worker has to do, with what it had before, is the least possible.

    Args:
        costs: of the tensors, in order.
        loads: what each worker has to do already; what is given here is added.

    Returns:
        How many tensors each worker has, in the workers' order.

    >>> loads = [0, 0]
    >>> divide([4, 4, 1, 1], loads), divide([3], loads), loads
    ([1, 3], [1, 0], [7, 6])
    """
    low, high = 0, max(loads) + sum(costs)
    while low < high:  # the least limit up to which all can be filled, one worker after the other
        middle = (low + high) // 2
        if sum(_filled(costs, loads, middle)) == len(costs):
            high = middle
        else:
            low = middle + 1
    counts = _filled(costs, loads, low)
    start = 0
    for worker, count in enumerate(counts):
        loads[worker] += sum(costs[start : start + count])
        start += count
    return counts


def _filled(costs: Sequence[int], loads: Sequence[int], limit: int) -> list[int]:
    counts, start = [], 0
    for load in loads:
        stop = start
        while stop < len(costs) and load + costs[stop] <= limit:
            load += costs[stop]
            stop += 1
        counts.append(stop - start)
        start = stop
    return counts


def blocks(lengths: Sequence[int], counts: Sequence[int], length: int) -> tuple[Span, ...]:
    """Return each worker's part of a buffer.

    Args:
        lengths: of the tensors, in elements; they lie end to end from the buffer's beginning.
        counts: how many of them each worker has.
        length: of the buffer; what comes after the tensors is the last worker's.

    >>> blocks([5, 3, 2], [1, 0, 2], 12)
    (Span(start=0, stop=5), Span(start=5, stop=5), Span(start=5, stop=12))
    """
    out, start, first = [], 0, 0
    for count in counts:
        stop = start + sum(lengths[first : first + count])
        out.append(Span(start, stop))
        start, first = stop, first + count
    out[-1] = Span(out[-1].start, length)
    return tuple(out)
