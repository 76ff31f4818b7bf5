"""Runs of neighbouring tensors: what each weighs and costs, and plans made of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wingbeat.errors import UsageError
from wingbeat.planning.costs.curve import Floats
from wingbeat.planning.costs.workload import Costs, Workload
from wingbeat.types import Plan, PlannedBucket

Positions = NDArray[np.int64]


class Runs:
    """Costs of the runs ``[start, stop)`` of a workload's positions.

    Everyone who prices a run does it here, so that equal runs cost equal bits.

    Attributes:
        ready: ``ready_s`` of each position, float64[L].
        first: for each stop 0 to L, the least start of a run that ends there, int64[L + 1]: before
            it stand tensors of another kind.
    """

    def __init__(self, workload: Workload, costs: Costs) -> None:
        self.costs = costs
        self.ready = np.array(workload.ready_s, dtype=np.float64)
        self._numels = _sums(workload.numels)
        self._nbytes = _sums(workload.nbytes)
        first = [0]
        for position in range(len(workload)):
            new = position > 0 and workload.kinds[position] != workload.kinds[position - 1]
            first.append(position if new else first[-1])
        self.first = np.array(first, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ready)

    def encode(self, starts: Positions, stops: Positions) -> Floats:
        """Seconds to encode each run; positions are int64, of shapes that broadcast."""
        elements: Floats = self._numels[stops] - self._numels[starts]
        return self.costs.encode(elements)

    def exchange(self, starts: Positions, stops: Positions) -> Floats:
        """Seconds to exchange each run; positions are int64, of shapes that broadcast."""
        size: Floats = self._nbytes[stops] - self._nbytes[starts]
        return self.costs.exchange(size)

    def delay(self, starts: Positions, stops: Positions) -> Floats:
        """Seconds by which the exchange of each run holds up backward; of the last ones nothing.

        When they are exchanged backward is over.
        """
        size: Floats = self._nbytes[stops] - self._nbytes[starts]
        seconds: Floats = np.where(stops == len(self), 0.0, self.costs.delay(size))
        return seconds

    def encode_one(self, start: int, stop: int) -> float:
        """Seconds to encode one run."""
        return self.costs.encode(float(self._numels[stop] - self._numels[start]))

    def exchange_one(self, start: int, stop: int) -> float:
        """Seconds to exchange one run."""
        return self.costs.exchange(float(self._nbytes[stop] - self._nbytes[start]))


def _sums(values: Iterable[float]) -> Floats:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0.0], np.cumsum(np.array(tuple(values), dtype=np.float64))))


def plan_of(workload: Workload, stops: Iterable[int]) -> Plan:
    """Make the plan whose buckets end before these positions, rising, the last one L."""
    ends = [0, *stops]
    return Plan(
        tuple(PlannedBucket(workload.tensors[start:stop]) for start, stop in pairwise(ends))
    )


def stops_of(plan: Plan, workload: Workload) -> list[int]:
    """Return before which positions a plan's buckets end.

    Raises:
        UsageError: the buckets are not runs of the workload's tensors, in their order, or one
            holds tensors of several kinds.
    """
    stops: list[int] = []
    start = 0
    for number, bucket in enumerate(plan.buckets):
        stop = start + len(bucket.tensors)
        if not bucket.tensors or workload.tensors[start:stop] != bucket.tensors:
            raise UsageError(
                f"plan: bucket {number} holds the tensors {list(bucket.tensors)!r}; allowed are "
                f"runs of {list(workload.tensors[start:])!r}, the tensors not yet placed"
            )
        kinds = sorted(set(workload.kinds[start:stop]))
        if len(kinds) > 1:
            raise UsageError(
                f"plan: bucket {number} mixes {' and '.join(kinds)}; allowed is one kind in each"
            )
        stops.append(stop)
        start = stop
    if start != len(workload):
        raise UsageError(
            f"plan: {start} of {len(workload)} tensors are in its buckets; allowed are all"
        )
    return stops
