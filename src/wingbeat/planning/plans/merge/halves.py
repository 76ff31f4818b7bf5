"""Plans for all-reduces in two halves: reduce-scatters under backward, all-gathers under forward.

DeAR (Zhang et al., 2023), section III-B. Backward and the reduce-scatters are priced as OMGS-SGD's
Eqs. 5 to 9 price whole exchanges. All-gathers begin when all reduce-scatters are done, in the order
of forward, and a layer waits for its bucket's. So merging has a price in both halves: a bucket
waits for its last gradient, and forward for all of a bucket.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from wingbeat.planning.costs.curve import NOTHING, Floats
from wingbeat.planning.costs.workload import Costs, Workload
from wingbeat.planning.plans.merge.paper import greedy
from wingbeat.planning.plans.merge.runs import Runs, plan_of, stops_of
from wingbeat.planning.plans.merge.simple import by_size, one
from wingbeat.planning.plans.merge.timeline import predict
from wingbeat.types import Plan

FORWARD = 0.5
"""Forward of a layer over its backward, as DeAR takes it (section VI-I); it is not measured."""

ROOM = 128
"""Beginnings that are kept for each position, if so many are no worse than one another."""

_PIVOTS = 16


def feed_s(plan: Plan, workload: Workload, costs: Costs) -> float:
    """Return what the next forward takes with its all-gathers, in seconds (FeedPipe).

    From the moment when all reduce-scatters are done until forward is over; what comes before the
    layer whose gradient is ready first. 0 if there are no all-gathers (``costs.gather`` is None).
    """
    if costs.gather is None:
        return 0.0
    done = 0.0
    for start, stop in pairwise([0, *stops_of(plan, workload)]):
        gather = costs.gather(float(sum(workload.nbytes[start:stop])))
        done = max(done, FORWARD * workload.ready_s[stop - 1]) + gather
    return done


def both(workload: Workload, costs: Costs) -> tuple[Plan, bool]:
    """Return the plan of runs with the least sum of both halves, and whether it is proven to be.

    That is the end of the last reduce-scatter, `Timeline.finish_s`, and `feed_s` after it. Of a
    beginning three numbers matter for the rest: the seconds by which backward is late, when the
    links are free of its reduce-scatters, and what its all-gathers and forward take. All three
    are carried on by sums and maxima, so a beginning that is no better in any of them than another
    one at the same position is dropped, and what remains holds the best. Where more than `ROOM`
    remain, those with the least sums are kept and the answer is not proven.
    """
    count = len(workload)
    if not count:
        return Plan(()), True
    gather = costs.gather if costs.gather is not None else NOTHING
    runs, spread, proven = Runs(workload, costs), Runs(workload, Costs(NOTHING, gather)), True
    forward = FORWARD * runs.ready
    least = min(_whole_s(plan, workload, costs) for plan in _guesses(workload, costs))
    # By position: late, free, fed; then the position and the place of the beginning before.
    labels: list[Floats] = [np.zeros((3, 1))]
    before = [np.zeros((2, 1), dtype=np.int64)]
    for stop in range(1, count + 1):
        starts = np.arange(int(runs.first[stop]), stop)
        counts = [labels[start].shape[1] for start in starts]
        ends = np.full(len(starts), stop)
        encode, exchange, delay, feed = (
            np.repeat(cost(starts, ends), counts)
            for cost in (runs.encode, runs.exchange, runs.delay, spread.exchange)
        )
        late, free, fed = np.concatenate([labels[start] for start in starts], axis=1)
        origin = np.array(
            [np.repeat(starts, counts), np.concatenate([np.arange(n) for n in counts])]
        )
        ready = runs.ready[stop - 1] + late + encode
        made = np.array(
            [
                late + encode + delay,
                np.maximum(ready, free) + exchange,
                np.maximum(fed, forward[stop - 1]) + feed,
            ]
        )
        # What is still to come takes no less than this, whatever the plan.
        at_least = np.maximum(made[1], runs.ready[-1] + made[0]) + np.maximum(made[2], forward[-1])
        hopeful = np.flatnonzero(at_least <= least * (1 + 1e-12))
        kept = hopeful[_front(made[:, hopeful])]
        if len(kept) > ROOM:
            kept, proven = kept[np.argsort(made[:, kept].sum(axis=0))[:ROOM]], False
        labels.append(made[:, kept])
        before.append(origin[:, kept])
    place = int(np.argmin(labels[count][1] + labels[count][2]))
    stops, stop = [], count
    while stop:
        stops.append(stop)
        stop, place = (int(value) for value in before[stop][:, place])
    return plan_of(workload, stops[::-1]), proven


def _whole_s(plan: Plan, workload: Workload, costs: Costs) -> float:
    return predict(plan, workload, costs).finish_s + feed_s(plan, workload, costs)


def _guesses(workload: Workload, costs: Costs) -> list[Plan]:
    """Return plans that are made at once; the best is at least as good."""
    sizes = {max(1, sum(workload.numels) // parts) for parts in (2, 4, 8, 16, 32, 64)}
    return [one(workload), greedy(workload, costs), *(by_size(workload, n) for n in sizes)]


def _front(labels: Floats) -> np.ndarray:
    """Return the places of the columns that no other is as good as in all rows; equal ones once."""
    left = np.lexsort(labels[::-1])
    for pivot in left[np.argsort(labels[:, left].sum(axis=0), kind="stable")[:_PIVOTS]]:
        if pivot not in left:
            continue
        worse = (labels[:, left] >= labels[:, [pivot]]).all(axis=0)
        left = left[~worse | (left == pivot)]
    front: list[int] = []
    rows = np.empty((2, len(left)))
    for column in left:  # the first row does not fall any more
        _, second, third = labels[:, column]
        known = rows[:, : len(front)]
        if not ((known[0] <= second) & (known[1] <= third)).any():
            rows[:, len(front)] = second, third
            front.append(int(column))
    return np.array(front, dtype=np.int64)
