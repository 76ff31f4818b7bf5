"""Every plan there is, one after the other: the yardstick for the others."""

from __future__ import annotations

import numpy as np

from wingbeat.errors import UsageError
from wingbeat.planning.costs.curve import Floats
from wingbeat.planning.costs.workload import Costs, Workload
from wingbeat.planning.plans.merge.runs import Runs, plan_of
from wingbeat.types import Plan

MOST = 20
"""Tensors; beyond, there are too many plans."""
TIE = 1e-12
"""Relative; what rounding can make of equal finishes."""


def exhaustive(workload: Workload, costs: Costs) -> Plan:
    """Look at all plans of runs and return the one with the least finish_s.

    Finishes that are equal within rounding (1e-12 of them) are ties; they go to fewer buckets, and
    then to the lesser finish. There are ``2**(L - 1)`` plans (Eq. 16).

    Raises:
        UsageError: there are more than 20 tensors.
    """
    count = len(workload)
    if count > MOST:
        raise UsageError(
            f"exhaustive search over {count} tensors: allowed are at most {MOST}; use exact"
        )
    if not count:
        return Plan(())
    finish, buckets, stops = _all(Runs(workload, costs))
    tied = np.flatnonzero(finish <= finish.min() * (1.0 + TIE))
    best = tied[np.lexsort((finish[tied], buckets[tied]))[0]]
    return plan_of(workload, [stop for stop in range(1, count + 1) if stops[best] >> stop & 1])


def _all(runs: Runs) -> tuple[Floats, np.ndarray, np.ndarray]:
    """Return finish, number of buckets and stops of every plan; stops as a set of bits."""
    # Plans that end in the same run share what comes before it: one row for each beginning.
    delayed, finish = [np.zeros(1)], [np.zeros(1)]
    buckets, stops = [np.zeros(1, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    for stop in range(1, len(runs) + 1):
        starts = range(int(runs.first[stop]), stop)
        counts = [len(delayed[start]) for start in starts]
        places = np.arange(starts.start, stop)
        stops_here = np.full(len(places), stop)
        encode = np.repeat(runs.encode(places, stops_here), counts)
        exchange = np.repeat(runs.exchange(places, stops_here), counts)
        delay = np.repeat(runs.delay(places, stops_here), counts)
        encode += np.concatenate([delayed[start] for start in starts])
        free = np.concatenate([finish[start] for start in starts])
        delayed.append(encode + delay)
        finish.append(np.maximum(runs.ready[stop - 1] + encode, free) + exchange)
        buckets.append(np.concatenate([buckets[start] for start in starts]) + 1)
        stops.append(np.concatenate([stops[start] for start in starts]) | 1 << stop)
    return finish[-1], buckets[-1], stops[-1]
