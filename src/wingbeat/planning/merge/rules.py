"""Merging rules: without costs, Algorithm 1 of OMGS-SGD, and MG-WFBP for dense gradients.

The published rules are greedy. They visit the layers once, in the order in which gradients become
ready, and decide at each whether it waits for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from wingbeat.errors import UsageError
from wingbeat.planning.costs import ZERO, CostModel, Curve, Linear, Workload
from wingbeat.planning.merge.timeline import SegmentCosts, plan_from_stops
from wingbeat.types import Plan


def single_bucket(workload: Workload) -> Plan:
    """Merge all tensors, or consecutive ones of a kind, into one bucket (TopK-SGD, II-C)."""
    return _merge_up_to(workload, None)


def by_elements(workload: Workload, elements: int) -> Plan:
    """Merge until a bucket has at least ``elements`` elements (MGS-SGD; 8192 in section V-D).

    The remainder at the end, or before another kind, is a bucket of its own.

    Raises:
        UsageError: ``elements`` is less than 1.
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
    with the others fixed, and considers the end of layer l - 1 alone. These properties of the
    published algorithm are kept:

    - the rule looks one layer ahead: it does not merge three layers where two save nothing;
    - a later end of layer l - 1 counts as a loss even where later layers hide it, and time by which
      encoding delays the layers after l - 1 does not count at all;
    - Q3 and Q5 assume that ``t_s`` grows faster than its amount and that ``t_c`` is linear; with
      other curves they are not the gain of the merge;
    - a merged layer has no elements left and costs nothing (Eq. 13), although Algorithm 1 as
      written charges it alpha in line 22 and takes the logarithm of 0 in line 16.
      `greedy_as_printed` follows these lines, and the others that contradict section IV-A.

    ``costs.delay`` is ignored: the paper has no such term. A layer whose next one is of another
    kind never waits. Alpha is `startup_s`.
    """
    segments = SegmentCosts(workload, costs)
    alpha = startup_s(costs.exchange, workload)
    encode = segments.encode_one

    def waits(start: int, stop: int, begin: float, encoded: float) -> bool:
        ready = segments.ready[stop] + encoded
        apart = ready + encode(start, stop) + encode(stop, stop + 1)
        together = ready + encode(start, stop + 1)
        exchanged = begin + segments.exchange_one(start, stop)
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
    time and the second as a duration. ``costs.delay`` is ignored. A layer whose next one is of
    another kind never waits. Alpha is `startup_s`. Takes O(L^2).
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
    ``costs.encode`` is ignored: dense gradients are not encoded. A layer whose next one is of
    another kind never waits. Alpha is `startup_s`.
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
        after = encoded + segments.encode_one(start, stop)
        begin = max(segments.ready[stop - 1] + after, free)
        if same_kind and waits(start, stop, begin, encoded):
            continue
        stops.append(stop)
        free = begin + segments.exchange_one(start, stop)
        start, encoded = stop, after
    return plan_from_stops(workload, [*stops, len(workload)] if len(workload) else [])
