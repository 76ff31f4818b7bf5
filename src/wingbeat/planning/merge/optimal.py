"""Optimal merge plans: a search over Pareto labels in C++, its two-phase variant, and brute force.

The C++ part is ``native/src/merge.h``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.planning.costs import ZERO, CostModel, Floats, Workload
from wingbeat.planning.merge.rules import by_elements, greedy, single_bucket
from wingbeat.planning.merge.timeline import (
    FORWARD,
    Positions,
    SegmentCosts,
    gather_phase_s,
    plan_from_stops,
    predict,
)
from wingbeat.types import Plan

TIE = 1e-12
"""Relative difference below which finish times are equal within rounding."""

WIDTH, ROOM, GROWTH = 32, 4, 4
"""Corners and prefixes kept for each position in the first round, and the growth of both."""

UNLIMITED = 2**63
"""A work limit that no search reaches."""

MAX_EXHAUSTIVE = 20
"""Most tensors for `exhaustive`; more have too many plans."""

MAX_LABELS = 128
"""Prefixes that `exact_two_phase` keeps for each position."""

_PIVOTS = 16


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search with limited work.

    Attributes:
        plan: the best plan found.
        lower_bound_s: no plan finishes earlier, except for rounding. It equals the plan's own
            finish, within a tie, if the plan is optimal.
        optimal: whether the plan is proven optimal, ties included, as `exact` returns it.
    """

    plan: Plan
    lower_bound_s: float
    optimal: bool


def exact(workload: Workload, costs: CostModel) -> Plan:
    """Return the plan with the least ``finish_s`` of all ``2**(L - 1)`` (Eqs. 16 to 19).

    Finish times that are equal within rounding (1e-12 of them) are ties; they go to fewer buckets,
    and then to the lesser finish. Curves may have any shape. The search is deterministic.

    **State.** By Eqs. 5 to 9 and 13 to 15 a bucket that ends with the tensor ready at r changes the
    state of the prefix before it to

        free' = max(r + delayed + e, free) + c,    delayed' = delayed + e + w

    where e, c and w, by which its exchange delays backward, depend on the bucket alone. A prefix
    therefore affects the rest only through the pair (delayed, free), Eq. 17 is the last ``free``,
    and both right-hand sides never fall when ``delayed`` or ``free`` grow, rounding included. A
    prefix is dominated, and can be dropped, if another pair at the same position is no greater in
    both numbers. The remaining pairs form a Pareto front, and searching all of it is exact.

    **One number is not enough.** Only if delays are proportional to elements and bytes is
    ``delayed`` the same for all prefixes, and ``free`` alone sufficient: O(L^2). With ``a + b * d``
    it differs by the number of buckets, and with Eq. 10 by where they are cut: a prefix that frees
    the links sooner may have delayed backward for longer. Theorem 1 of the paper overlooks this.

    **From both ends.** A suffix also affects the rest through two numbers only: ``rest``, the
    seconds of its exchanges, and ``late``, when its last exchange would end with free links and no
    delay before. Together with a prefix it finishes at

        finish_s = max(delayed + late, free + rest)

    and a bucket in front changes it to ``c + rest`` and ``max(r + e + c + rest, e + w + late)``.

    **Time.** Fronts may be long (no polynomial bound is known for curves of any shape). A front is
    therefore thinned: neighbours are replaced by the corner below them, which bounds them all. A
    round bounds suffixes in this way, extends the most promising prefixes up to a limit, which
    gives better plans, and bounds prefixes in the same way. Both ends drop labels that, by the
    bounds of the other, cannot finish before the best plan so far. The limit grows from round to
    round until nothing has to be dropped: then the best plan is optimal. 500 tensors take about 10
    ms in all, curves with jumps sometimes tenths of a second.
    """
    return search(workload, costs, UNLIMITED).plan


def search(workload: Workload, costs: CostModel, work: int) -> SearchResult:
    """Run the search of `exact` with limited work; deterministic, because work is counted.

    About ``work`` prefixes and suffixes may be visited; each takes some 10 ns.

    Raises:
        UsageError: ``work`` is negative or no whole number.
    """
    if type(work) is not int or not 0 <= work <= UNLIMITED:
        raise UsageError(f"work={work!r}: allowed: whole numbers, 0 to 2**63")
    if not len(workload):
        return SearchResult(Plan(()), 0.0, True)
    segments = SegmentCosts(workload, costs)
    starts, stops = _all_segments(segments)
    encode, exchange = segments.encode(starts, stops), segments.exchange(starts, stops)
    delay = segments.delay(starts, stops)
    best, lower_bound_s, optimal = _native.best_merge(
        len(segments),
        _address(segments.ready),
        _address(segments.first),
        _address(encode),
        _address(exchange),
        _address(delay),
        TIE,
        WIDTH,
        ROOM,
        GROWTH,
        work,
    )
    return SearchResult(plan_from_stops(workload, best), lower_bound_s, optimal)


def _all_segments(segments: SegmentCosts) -> tuple[Positions, Positions]:
    """Return starts and stops of all segments, by stop and then by start."""
    places = np.arange(len(segments) + 1)
    counts = places - segments.first
    stops = np.repeat(places, counts)
    starts = np.arange(len(stops)) - np.repeat(np.cumsum(counts) - places, counts)
    return starts, stops


def _address(array: Floats | Positions) -> int:
    assert array.flags.c_contiguous, "the native code reads contiguous arrays"
    assert array.dtype in (np.float64, np.int64), array.dtype
    assert np.isfinite(array).all(), "seconds are finite"
    return int(array.ctypes.data)


def exhaustive(workload: Workload, costs: CostModel) -> Plan:
    """Evaluate all ``2**(L - 1)`` plans (Eq. 16) and return the one with the least finish_s.

    Ties are resolved as in `exact`.

    Raises:
        UsageError: there are more than 20 tensors.
    """
    count = len(workload)
    if count > MAX_EXHAUSTIVE:
        raise UsageError(
            f"exhaustive search over {count} tensors: allowed: at most {MAX_EXHAUSTIVE}; use exact"
        )
    if not count:
        return Plan(())
    finish, buckets, stops = _all_plans(SegmentCosts(workload, costs))
    tied = np.flatnonzero(finish <= finish.min() * (1.0 + TIE))
    best = tied[np.lexsort((finish[tied], buckets[tied]))[0]]
    chosen = [stop for stop in range(1, count + 1) if stops[best] >> stop & 1]
    return plan_from_stops(workload, chosen)


def _all_plans(segments: SegmentCosts) -> tuple[Floats, np.ndarray, np.ndarray]:
    """Return finish, number of buckets and stops of every plan; stops as a set of bits."""
    # Plans with the same last segment share a prefix: one row for each prefix.
    delayed, finish = [np.zeros(1)], [np.zeros(1)]
    buckets, stops = [np.zeros(1, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    for stop in range(1, len(segments) + 1):
        starts = range(int(segments.first[stop]), stop)
        counts = [len(delayed[start]) for start in starts]
        places = np.arange(starts.start, stop)
        stops_here = np.full(len(places), stop)
        encode = np.repeat(segments.encode(places, stops_here), counts)
        exchange = np.repeat(segments.exchange(places, stops_here), counts)
        delay = np.repeat(segments.delay(places, stops_here), counts)
        encode += np.concatenate([delayed[start] for start in starts])
        free = np.concatenate([finish[start] for start in starts])
        delayed.append(encode + delay)
        finish.append(np.maximum(segments.ready[stop - 1] + encode, free) + exchange)
        buckets.append(np.concatenate([buckets[start] for start in starts]) + 1)
        stops.append(np.concatenate([stops[start] for start in starts]) | 1 << stop)
    return finish[-1], buckets[-1], stops[-1]


def exact_two_phase(workload: Workload, costs: CostModel) -> tuple[Plan, bool]:
    """Return the best plan for reduce-scatters in backward and all-gathers in forward (DeAR).

    DeAR (Zhang et al., 2023), section III-B. Backward and the reduce-scatters are priced as
    OMGS-SGD's Eqs. 5 to 9 price whole exchanges. All-gathers begin when all reduce-scatters are
    done, in the order of forward, and a layer waits for that of its bucket. Merging therefore costs
    time in both phases: a bucket waits for its last gradient, and forward for all of a bucket.

    The plan minimizes the end of the last reduce-scatter, `Timeline.finish_s`, plus
    `gather_phase_s`. A prefix affects the rest through three numbers: the delay of backward, when
    the links are free, and the time of its all-gathers with forward. All three are sums and maxima,
    so dominated prefixes can be dropped.

    The second result is whether the plan is proven optimal. It is not if more than `MAX_LABELS`
    prefixes remained at a position; then those with the least sums were kept.
    """
    count = len(workload)
    if not count:
        return Plan(()), True
    gather = costs.gather if costs.gather is not None else ZERO
    segments, gathers = (
        SegmentCosts(workload, costs),
        SegmentCosts(workload, CostModel(ZERO, gather)),
    )
    optimal, forward = True, FORWARD * segments.ready
    least = min(_two_phase_s(plan, workload, costs) for plan in _initial_plans(workload, costs))
    # By position: delay, free links, end of gathers; then the previous position and label.
    labels: list[Floats] = [np.zeros((3, 1))]
    before = [np.zeros((2, 1), dtype=np.int64)]
    for stop in range(1, count + 1):
        starts = np.arange(int(segments.first[stop]), stop)
        counts = [labels[start].shape[1] for start in starts]
        ends = np.full(len(starts), stop)
        encode, exchange, delay, gathered = (
            np.repeat(cost(starts, ends), counts)
            for cost in (segments.encode, segments.exchange, segments.delay, gathers.exchange)
        )
        late, free, fed = np.concatenate([labels[start] for start in starts], axis=1)
        origin = np.array(
            [np.repeat(starts, counts), np.concatenate([np.arange(n) for n in counts])]
        )
        ready = segments.ready[stop - 1] + late + encode
        made = np.array(
            [
                late + encode + delay,
                np.maximum(ready, free) + exchange,
                np.maximum(fed, forward[stop - 1]) + gathered,
            ]
        )
        # A lower bound on the total of any plan that begins so.
        bound = np.maximum(made[1], segments.ready[-1] + made[0])
        bound = bound + np.maximum(made[2], forward[-1])
        promising = np.flatnonzero(bound <= least * (1 + 1e-12))
        kept = promising[_pareto_front(made[:, promising])]
        if len(kept) > MAX_LABELS:
            kept, optimal = kept[np.argsort(made[:, kept].sum(axis=0))[:MAX_LABELS]], False
        labels.append(made[:, kept])
        before.append(origin[:, kept])
    place = int(np.argmin(labels[count][1] + labels[count][2]))
    stops, stop = [], count
    while stop:
        stops.append(stop)
        stop, place = (int(value) for value in before[stop][:, place])
    return plan_from_stops(workload, stops[::-1]), optimal


def _two_phase_s(plan: Plan, workload: Workload, costs: CostModel) -> float:
    return predict(plan, workload, costs).finish_s + gather_phase_s(plan, workload, costs)


def _initial_plans(workload: Workload, costs: CostModel) -> list[Plan]:
    """Return plans that are cheap to make; the best of them is an upper bound."""
    sizes = {max(1, sum(workload.numels) // parts) for parts in (2, 4, 8, 16, 32, 64)}
    by_size = (by_elements(workload, elements) for elements in sizes)
    return [single_bucket(workload), greedy(workload, costs), *by_size]


def _pareto_front(labels: Floats) -> np.ndarray:
    """Return the indices of the columns that no other column dominates; equal ones once."""
    left = np.lexsort(labels[::-1])
    for pivot in left[np.argsort(labels[:, left].sum(axis=0), kind="stable")[:_PIVOTS]]:
        if pivot not in left:
            continue
        worse = (labels[:, left] >= labels[:, [pivot]]).all(axis=0)
        left = left[~worse | (left == pivot)]
    front: list[int] = []
    rows = np.empty((2, len(left)))
    for column in left:  # sorted by the first row
        _, second, third = labels[:, column]
        known = rows[:, : len(front)]
        if not ((known[0] <= second) & (known[1] <= third)).any():
            rows[:, len(front)] = second, third
            front.append(int(column))
    return np.array(front, dtype=np.int64)
