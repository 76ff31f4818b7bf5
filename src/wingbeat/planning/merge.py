"""Merge plans: which consecutive tensors share a bucket when encoding and exchanging take time.

OMGS-SGD (Shi et al., INFOCOM 2020), sections III and IV. A plan cuts the tensors, first ready
first, into segments; each segment is a bucket. `predict` computes when each bucket is encoded and
exchanged; the other functions make plans. The search is in C++, in ``native/src/merge.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.planning.costs import ZERO, CostModel, Curve, Floats, Linear, Workload
from wingbeat.types import Plan, PlannedBucket

Positions = NDArray[np.int64]

# -- timeline ------------------------------------------------------------------------------------

FORWARD = 0.5
"""Forward time of a layer over its backward time, as in DeAR (section VI-I); it is not measured."""


class SegmentCosts:
    """Costs of the segments ``[start, stop)`` of a workload's positions.

    All planners price segments here, so that equal segments have bit-identical costs. Positions are
    whole numbers, or int64 arrays of shapes that broadcast; the results are alike.

    ``ready`` is the ready time of each position, float64[L]. ``first`` is for each stop 0 to L the
    least start of a segment that ends there, int64[L + 1]: the tensors before are of another kind.
    """

    def __init__(self, workload: Workload, costs: CostModel) -> None:
        self.costs = costs
        self.ready = np.array(workload.ready_s, dtype=np.float64)
        self._numels, self._nbytes = (
            np.concatenate(([0.0], np.cumsum(np.array(values, dtype=np.float64))))
            for values in (workload.numels, workload.nbytes)
        )
        first = [0]
        for position in range(len(workload)):
            new = position > 0 and workload.kinds[position] != workload.kinds[position - 1]
            first.append(position if new else first[-1])
        self.first = np.array(first, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ready)

    def encode(self, starts: Any, stops: Any) -> Any:
        """Return seconds to encode each segment."""
        return self.costs.encode(self._numels[stops] - self._numels[starts])

    def exchange(self, starts: Any, stops: Any) -> Any:
        """Return seconds to exchange each segment."""
        return self.costs.exchange(self._nbytes[stops] - self._nbytes[starts])

    def delay(self, starts: Positions, stops: Positions) -> Floats:
        """Return seconds by which each segment's exchange delays backward; 0 for the last one."""
        delays = self.costs.delay(self._nbytes[stops] - self._nbytes[starts])
        seconds: Floats = np.where(stops == len(self), 0.0, delays)
        return seconds

    def gather(self, starts: Positions, stops: Positions) -> Floats:
        """Return seconds to all-gather each segment in the next forward."""
        curve: Curve = self.costs.gather or ZERO
        return curve(self._nbytes[stops] - self._nbytes[starts])


def plan_from_stops(workload: Workload, stops: Iterable[int]) -> Plan:
    """Return the plan whose buckets end before these positions, rising, the last one L."""
    ends = pairwise([0, *stops])
    return Plan(tuple(PlannedBucket(workload.tensors[start:stop]) for start, stop in ends))


def bucket_stops(plan: Plan, workload: Workload) -> list[int]:
    """Return the positions before which a plan's buckets end.

    A `UsageError` if a bucket is no segment of the workload's tensors, or mixes kinds.
    """
    stops: list[int] = []
    start = 0
    for number, bucket in enumerate(plan.buckets):
        stop = start + len(bucket.tensors)
        if not bucket.tensors or workload.tensors[start:stop] != bucket.tensors:
            raise UsageError(
                f"plan: bucket {number} holds the tensors {list(bucket.tensors)!r}; allowed: "
                f"segments of the remaining tensors {list(workload.tensors[start:])!r}"
            )
        kinds = sorted(set(workload.kinds[start:stop]))
        if len(kinds) > 1:
            raise UsageError(
                f"plan: bucket {number} mixes {' and '.join(kinds)}; allowed: one kind in each"
            )
        stops.append(stop)
        start = stop
    if start != len(workload):
        raise UsageError(
            f"plan: {start} of {len(workload)} tensors are in its buckets; allowed: all"
        )
    return stops


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """The times of one bucket, in seconds from the start of backward (Eqs. 7 and 8).

    ``ready_s`` is when its last gradient would be ready if nothing were encoded; encoding begins
    after the delay by the encoding and the exchanges of earlier buckets.
    """

    bucket: PlannedBucket
    ready_s: float
    encode_begin_s: float
    encode_end_s: float
    exchange_begin_s: float
    exchange_end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted backward pass of a plan, in seconds.

    ``backward_s`` is backward alone; ``encode_s`` and ``delay_s`` are its total delays by encoding
    and by exchanges. ``finish_s`` is the end of the last exchange, from the start of backward
    (Eq. 17, which counts from the start of forward). ``exposed_s`` is the exchange time after the
    last encoding: Eq. 9 with its sign corrected, as it has to subtract both ``tau_s`` and ``t_s``.
    """

    buckets: tuple[BucketTimes, ...]
    backward_s: float
    encode_s: float
    delay_s: float
    exposed_s: float
    finish_s: float


def predict(plan: Plan, workload: Workload, costs: CostModel) -> Timeline:
    """Predict when each bucket of ``plan`` is encoded and exchanged (Eqs. 5 to 9 and 13 to 18).

    A bucket is encoded when its last gradient is ready, on the thread that runs backward; a merged
    layer costs nothing. Exchanges run in the background, one at a time, in the plan's order. One
    term is added to the paper: an exchange that needs the processors of backward delays it, so
    Eq. 6 becomes ``tau_b(l) = tau_s(l+1) + t_s(l+1) + t_w(l+1)``, where t_w is `CostModel.delay`.
    No backward runs during the last exchange.
    """
    stops = np.array(bucket_stops(plan, workload), dtype=np.int64)
    if not len(stops):
        return Timeline((), 0.0, 0.0, 0.0, 0.0, 0.0)
    segments = SegmentCosts(workload, costs)
    starts = np.concatenate(([0], stops[:-1]))
    encodes = segments.encode(starts, stops).tolist()
    exchanges = segments.exchange(starts, stops).tolist()
    delays = segments.delay(starts, stops).tolist()
    delayed = finish = 0.0
    buckets = []
    for number, bucket in enumerate(plan.buckets):
        ready = workload.ready_s[stops[number] - 1]
        begin = ready + delayed
        # The search adds in the same order, because plans are compared by these bits.
        delayed += encodes[number]
        end = ready + delayed
        delayed += delays[number]
        sent = max(end, finish)
        finish = sent + exchanges[number]
        buckets.append(BucketTimes(bucket, ready, begin, end, sent, finish))
    return Timeline(
        buckets=tuple(buckets),
        backward_s=workload.ready_s[-1],
        encode_s=sum(encodes),
        delay_s=sum(delays),
        exposed_s=finish - buckets[-1].encode_end_s,
        finish_s=finish,
    )


def gather_phase_s(plan: Plan, workload: Workload, costs: CostModel) -> float:
    """Return the seconds of the next forward with its all-gathers (DeAR, FeedPipe).

    From the end of all reduce-scatters until forward ends, without the time before the layer whose
    gradient is ready first. 0 if there are no all-gathers (``costs.gather`` is None).
    """
    if costs.gather is None:
        return 0.0
    done = 0.0
    for start, stop in pairwise([0, *bucket_stops(plan, workload)]):
        gather = costs.gather(float(sum(workload.nbytes[start:stop])))
        done = max(done, FORWARD * workload.ready_s[stop - 1]) + gather
    return done


# -- published rules -----------------------------------------------------------------------------
# They visit the layers once, in ready order, and decide at each whether it waits for the next.


def single_bucket(workload: Workload) -> Plan:
    """Merge all tensors, or consecutive ones of a kind, into one bucket (TopK-SGD, II-C)."""
    return _merge_up_to(workload, None)


def by_elements(workload: Workload, elements: int) -> Plan:
    """Merge until a bucket has at least ``elements`` elements (MGS-SGD; 8192 in section V-D).

    The remainder at the end, or before another kind, is a bucket of its own. `UsageError` below 1.
    """
    if elements < 1:
        raise UsageError(f"elements={elements!r}: allowed: whole numbers, 1 or more")
    return _merge_up_to(workload, elements)


def _merge_up_to(workload: Workload, elements: int | None) -> Plan:
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
    return plan_from_stops(workload, stops)


def startup_s(exchange: Curve, workload: Workload) -> float:
    """Return the startup time of an exchange in seconds, the alpha of the rules (Eq. 11).

    Curves other than `Linear` have no alpha; the cost of the smallest non-empty tensor replaces it.
    """
    if isinstance(exchange, Linear):
        return exchange.alpha
    sizes = [size for size in workload.nbytes if size > 0]
    return exchange(min(sizes)) if sizes else 0.0


def greedy(workload: Workload, costs: CostModel) -> Plan:
    """Return the plan of Algorithm 1, FindMergedLayers (OMGS-SGD, section IV-B).

    Layer l waits for layer l - 1 if both hold (Eq. 24), with ``u = tau_b(l) + t_b(l) + t_b(l-1)``:

    - Q3: ``u + t_s(d(l)) + t_s(d(l-1)) < tau_c(l) + t_c(d(l))``: the links are busy anyway;
    - Q5: ``tau_c(l) + alpha > u + t_s(d(l) + d(l-1))``: waiting costs less than alpha.

    The paper calls the result optimal (Theorem 1). It is not: the proof changes one layer at a time
    with the others fixed. The rule looks one layer ahead, so it does not merge three layers where
    two save nothing. A later end of layer l - 1 counts as a loss even where later layers hide it;
    time by which encoding delays the layers after it does not count. Q3 and Q5 are the gain of a
    merge only if ``t_s`` grows faster than its amount and ``t_c`` is linear. A merged layer costs
    nothing (Eq. 13); `greedy_as_printed` follows the lines that contradict section IV-A.

    ``costs.delay`` is ignored: the paper has no such term. A layer whose next one is of another
    kind never waits. Alpha is `startup_s`.
    """
    segments = SegmentCosts(workload, costs)
    alpha = startup_s(costs.exchange, workload)
    encode = segments.encode

    def waits(start: int, stop: int, begin: float, encoded: float) -> bool:
        ready = segments.ready[stop] + encoded
        apart = ready + encode(start, stop) + encode(stop, stop + 1)
        together = ready + encode(start, stop + 1)
        exchanged = begin + segments.exchange(start, stop)
        return bool(apart < exchanged and begin + alpha > together)

    return _walk(workload, segments, waits)


def greedy_as_printed(workload: Workload, costs: CostModel) -> Plan:
    """Return the plan of Algorithm 1, line by line as printed (OMGS-SGD, section IV-B).

    Its lines contradict the equations of section IV-A, which `greedy` follows, in three places:

    - line 5: ``u = tau_b(l) + t_b(l-1)``, without the ``t_b(l)`` of section IV-A, so more layers
      seem worth merging;
    - line 10: after a merge the times from layer l on are counted from ``tau_b(l) + t_b(l-1)``,
      where ``t_b(l-1)`` is that of both layers already (line 38), and not from ``tau_b(l)``
      (Eq. 15), so backward of merged layers counts twice;
    - line 22: a merged layer, of 0 elements, is charged alpha instead of nothing (Eq. 13).

    Line 16 takes ``0 * log 0`` for a merged layer; it counts as 0 here. The text from which this
    was read prints tau_b and t_b alike: of the two terms in lines 5 and 10, the first is read as a
    time and the second as a duration. Otherwise as `greedy`, in O(L^2).
    """
    count, alpha = len(workload), startup_s(costs.exchange, workload)
    # Layers are counted as in the paper: L is ready first, and index 0 is not used.
    ready = (0.0, *workload.ready_s)
    tb = [0.0, *(b - a for a, b in reversed([*pairwise(ready)]))]
    d, b = [0.0, *map(float, workload.numels[::-1])], [0.0, *workload.nbytes[::-1]]
    kinds = ("", *workload.kinds[::-1])
    ts = [0.0, *map(costs.encode, d[1:])]
    tc = [0.0, *(costs.exchange(nbytes) if nbytes else alpha for nbytes in b[1:])]
    tau_b, tau_s, tau_c = ([0.0] * (count + 1) for _ in range(3))

    def times_from(last: int, tau: float) -> None:
        """CalculateCompStart (lines 27 to 36), then CalculateCommStart (19 to 26)."""
        for layer in range(last, 0, -1):
            tau_b[layer] = tau if layer == last else tau_s[layer + 1] + ts[layer + 1]
            tau_s[layer] = tau_b[layer] + tb[layer]
        for layer in range(count, 0, -1):
            encoded = tau_s[layer] + ts[layer]
            free = tau_c[layer + 1] + tc[layer + 1] if layer < count else 0.0
            tau_c[layer] = max(free, encoded)

    times_from(count, 0.0)
    stops = []
    for layer in range(count, 1, -1):
        u = tau_b[layer] + tb[layer - 1]
        q3 = u + ts[layer] + ts[layer - 1] < tau_c[layer] + tc[layer]
        q5 = tau_c[layer] + alpha > u + costs.encode(d[layer] + d[layer - 1])
        if not (q3 and q5 and kinds[layer] == kinds[layer - 1]):
            stops.append(count - layer + 1)
            continue
        for amounts in (tb, d, b):  # Merge (lines 37 to 41)
            amounts[layer - 1], amounts[layer] = amounts[layer - 1] + amounts[layer], 0.0
        ts[layer - 1], ts[layer] = costs.encode(d[layer - 1]), 0.0
        tc[layer - 1] = costs.exchange(b[layer - 1]) if b[layer - 1] else alpha
        tc[layer] = alpha  # by line 22, which line 12 reaches after line 40 has set it to 0
        times_from(layer, tau_b[layer] + tb[layer - 1])
    return plan_from_stops(workload, [*stops, count] if count else [])


def mg_wfbp(workload: Workload, costs: CostModel) -> Plan:
    """Return the plan of MG-WFBP for dense gradients (Shi, Chu and Li, INFOCOM 2019).

    Layer l waits for layer l - 1 if the latter's gradient is ready before ``tau_c(l) + alpha``.
    ``costs.encode`` is ignored: dense gradients are not encoded. Otherwise as `greedy`.
    """
    segments = SegmentCosts(workload, CostModel(ZERO, costs.exchange))
    alpha = startup_s(costs.exchange, workload)

    def waits(_start: int, stop: int, begin: float, _encoded: float) -> bool:
        return bool(segments.ready[stop] < begin + alpha)

    return _walk(workload, segments, waits)


def _walk(
    workload: Workload,
    segments: SegmentCosts,
    waits: Callable[[int, int, float, float], bool],
) -> Plan:
    """Close a segment wherever it does not wait for the next tensor.

    ``waits(start, stop, begin, encoded)`` decides for the segment ``[start, stop)``, whose exchange
    would begin at ``begin`` (tau_c), after ``encoded`` seconds of encoding earlier segments. Times
    before the segment never change, so one pass is enough.
    """
    stops: list[int] = []
    start, encoded, free = 0, 0.0, 0.0
    for stop in range(1, len(workload)):
        same_kind = workload.kinds[stop] == workload.kinds[stop - 1]
        after = encoded + segments.encode(start, stop)
        begin = max(segments.ready[stop - 1] + after, free)
        if same_kind and waits(start, stop, begin, encoded):
            continue
        stops.append(stop)
        free = begin + segments.exchange(start, stop)
        start, encoded = stop, after
    return plan_from_stops(workload, [*stops, len(workload)] if len(workload) else [])


# -- optimal plans -------------------------------------------------------------------------------

TIE = 1e-12
"""Relative difference below which finish times are equal within rounding."""

WIDTH, ROOM, GROWTH = 32, 4, 4
"""Corners and prefixes kept for each position in the first round, and the growth of both."""

UNLIMITED = 2**63
"""A work limit that no search reaches."""

MAX_EXHAUSTIVE = 20
"""Most tensors for `exhaustive`; more have too many plans."""

MAX_LABELS = 32
"""Prefixes that `exact_two_phase` keeps for each position. For 40 random curves of resnet50 and
bert_base, on one core of an Intel Xeon, 32 took 0.8 s on average and 128 2.2 s; the plans were
0.04% longer, 0.5% at worst (2026-11-28).
"""

_PIVOTS = 16


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan found by a search with limited work.

    No plan finishes before ``lower_bound_s``, except for rounding. With ``optimal`` the plan is
    proven to be that of `exact`, ties included, and finishes at the bound, within a tie.
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
    ``free`` alone is sufficient only if delays are proportional to elements and bytes: otherwise a
    prefix that frees the links sooner may have delayed backward for longer, which Theorem 1 of the
    paper overlooks.

    **From both ends.** A suffix also affects the rest through two numbers only: ``rest``, the
    seconds of its exchanges, and ``late``, when its last exchange would end with free links and no
    delay before. Together with a prefix it finishes at

        finish_s = max(delayed + late, free + rest)

    and a bucket in front changes it to ``c + rest`` and ``max(r + e + c + rest, e + w + late)``.

    **Time.** No polynomial bound is known for curves of any shape. Fronts are therefore thinned:
    neighbours are replaced by the corner below them, which bounds them all. A round bounds suffixes
    in this way, extends the most promising prefixes up to a limit, which gives better plans, and
    bounds prefixes in the same way. Both ends drop labels that, by the bounds of the other, cannot
    finish before the best plan so far. The limit grows until nothing has to be dropped: then the
    best plan is optimal. 500 tensors take about 10 ms, curves with jumps sometimes tenths of a
    second.
    """
    return search(workload, costs, UNLIMITED).plan


def search(workload: Workload, costs: CostModel, work: int) -> SearchResult:
    """Run the search of `exact` with limited work; deterministic, because work is counted.

    About ``work`` prefixes and suffixes may be visited; each takes some 10 ns. Anything but a whole
    number is a `UsageError`.
    """
    if type(work) is not int or not 0 <= work <= UNLIMITED:
        raise UsageError(f"work={work!r}: allowed: whole numbers, 0 to 2**63")
    if not len(workload):
        return SearchResult(Plan(()), 0.0, True)
    segments = SegmentCosts(workload, costs)
    # All segments, by stop and then by start.
    places = np.arange(len(segments) + 1)
    counts = places - segments.first
    stops = np.repeat(places, counts)
    starts = np.arange(len(stops)) - np.repeat(np.cumsum(counts) - places, counts)
    arrays = (
        segments.ready, segments.first, segments.encode(starts, stops),
        segments.exchange(starts, stops), segments.delay(starts, stops),
    )  # fmt: skip
    for array in arrays:
        assert array.flags.c_contiguous, "the native code reads contiguous arrays"
        assert array.dtype in (np.float64, np.int64), array.dtype
        assert np.isfinite(array).all(), "seconds are finite"
    ready, first, encode, exchange, delay = (int(array.ctypes.data) for array in arrays)
    best, lower_bound_s, optimal = _native.best_merge(
        len(segments), ready, first, encode, exchange, delay, TIE, WIDTH, ROOM, GROWTH, work
    )
    return SearchResult(plan_from_stops(workload, best), lower_bound_s, optimal)


def exhaustive(workload: Workload, costs: CostModel) -> Plan:
    """Evaluate all ``2**(L - 1)`` plans (Eq. 16): the reference of `exact`, with its ties.

    More than 20 tensors are a `UsageError`.
    """
    count = len(workload)
    if count > MAX_EXHAUSTIVE:
        raise UsageError(
            f"exhaustive search over {count} tensors: allowed: at most {MAX_EXHAUSTIVE}; use exact"
        )
    if not count:
        return Plan(())
    segments = SegmentCosts(workload, costs)
    # By position, for every prefix: delay, finish, number of buckets, and stops as a set of bits.
    delayed, finish = [np.zeros(1)], [np.zeros(1)]
    buckets, stops = [np.zeros(1, dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    for stop in range(1, count + 1):
        places = np.arange(int(segments.first[stop]), stop)
        before = slice(places[0], stop)
        ends = np.full(len(places), stop)
        encode, exchange, delay = (
            np.repeat(cost(places, ends), [len(each) for each in delayed[before]])
            for cost in (segments.encode, segments.exchange, segments.delay)
        )
        encode += np.concatenate(delayed[before])
        free = np.concatenate(finish[before])
        delayed.append(encode + delay)
        finish.append(np.maximum(segments.ready[stop - 1] + encode, free) + exchange)
        buckets.append(np.concatenate(buckets[before]) + 1)
        stops.append(np.concatenate(stops[before]) | 1 << stop)
    tied = np.flatnonzero(finish[-1] <= finish[-1].min() * (1.0 + TIE))
    best = tied[np.lexsort((finish[-1][tied], buckets[-1][tied]))[0]]
    chosen = [stop for stop in range(1, count + 1) if stops[-1][best] >> stop & 1]
    return plan_from_stops(workload, chosen)


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
    prefixes remained at a position; then those with the least sums were kept. If none of these
    ends before the best of some simple plans, the plan is the latter.
    """
    count = len(workload)
    if not count:
        return Plan(()), True
    segments = SegmentCosts(workload, costs)
    optimal, forward = True, FORWARD * segments.ready
    least, simple = math.inf, Plan(())
    for plan in _initial_plans(workload, costs):
        whole_s = predict(plan, workload, costs).finish_s + gather_phase_s(plan, workload, costs)
        if whole_s < least:
            least, simple = whole_s, plan
    # By position: delay, free links, end of gathers; then the previous position and label.
    labels: list[Floats] = [np.zeros((3, 1))]
    before = [np.zeros((2, 1), dtype=np.int64)]
    for stop in range(1, count + 1):
        starts = np.arange(int(segments.first[stop]), stop)
        counts = [labels[start].shape[1] for start in starts]
        ends = np.full(len(starts), stop)
        encode, exchange, delay, gathered = (
            np.repeat(cost(starts, ends), counts)
            for cost in (segments.encode, segments.exchange, segments.delay, segments.gather)
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
    if not labels[count].size:  # prefixes that were dropped had the only ends by `least`
        return simple, False
    place = int(np.argmin(labels[count][1] + labels[count][2]))
    stops, stop = [], count
    while stop:
        stops.append(stop)
        stop, place = (int(value) for value in before[stop][:, place])
    return plan_from_stops(workload, stops[::-1]), optimal


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


# -- rules by name -------------------------------------------------------------------------------

_WORK = 200_000_000
"""Work limit of the search: a second or two, for which the other workers wait."""

TRIED = "tried"
"""Instead of a rule: several plans are timed in whole iterations, and the fastest is kept."""


def _exact(workload: Workload, costs: CostModel) -> Plan:
    if costs.gather is not None:
        plan, optimal = exact_two_phase(workload, costs)
        if not optimal:
            log.warning("the search for the best two-phase plan was cut short")
        return plan
    found = search(workload, costs, _WORK)
    if not found.optimal:
        finish_s = predict(found.plan, workload, costs).finish_s
        log.warning(
            "the search for the best plan was cut short: its exchanges end %.4g ms after the "
            "start of backward; no plan ends before %.4g ms",
            1e3 * finish_s,
            1e3 * found.lower_bound_s,
        )
    return found.plan


RULES: dict[str, Callable[[Workload, CostModel], Plan]] = {
    "exact": _exact,
    "paper": greedy,
    "printed": greedy_as_printed,
    "wfbp": mg_wfbp,
    "one": lambda workload, _: single_bucket(workload),
    "undelayed": lambda workload, costs: _exact(workload, replace(costs, delay=ZERO)),
}
"""The merging rules by their names in `Merging`, and two for a trial. ``undelayed`` is optimal
under the paper's own costs, in which exchanges do not delay backward."""

_TRIED_RULES = ("exact", "paper", "one", "undelayed")
"""The rules of a trial, the most promising first."""

ALIKE = 0.02
"""Relative difference of predictions below which plans of equally many buckets are alike. A trial
could hardly tell them apart, and errors of the prediction affect both."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the names of all rules that make it."""

    rules: tuple[str, ...]
    plan: Plan


def candidates(rule: str, workload: Workload, costs: CostModel) -> list[Candidate]:
    """Return the plan of a rule, or for `TRIED` all plans of a trial that differ.

    Plans of equally many buckets whose predictions differ by less than `ALIKE` are alike: the first
    of them is tried.
    """
    made: dict[Plan, list[str]] = {}
    for name in _TRIED_RULES if rule == TRIED else (rule,):
        made.setdefault(RULES[name](workload, costs), []).append(name)
    found: list[Candidate] = []
    kept: list[tuple[int, float]] = []
    for plan, names in made.items():
        seconds = predict(plan, workload, costs).finish_s + gather_phase_s(plan, workload, costs)
        buckets = len(plan.buckets)
        if not any(n == buckets and abs(seconds - s) < ALIKE * s for n, s in kept):
            kept.append((buckets, seconds))
            found.append(Candidate(tuple(names), plan))
    return found
