"""The published rules: Algorithm 1 of OMGS-SGD, and MG-WFBP for dense gradients.

All walk once from the layer that is ready first to the one that is ready last and decide at each
whether it waits for the next. Nothing is ever reconsidered, so all are greedy.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from wingbeat.planning.costs.curve import NOTHING, Curve, Line
from wingbeat.planning.costs.workload import Costs, Workload
from wingbeat.planning.plans.merge.runs import Runs, plan_of
from wingbeat.types import Plan


def startup_s(exchange: Curve, workload: Workload) -> float:
    """Return the seconds that the rules take as alpha, what each exchange costs (Eq. 11).

    Of a `Line` it is its alpha. Other curves have none: it is then what the smallest tensor that
    has any bytes costs.
    """
    if isinstance(exchange, Line):
        return exchange.alpha
    sizes = [size for size in workload.nbytes if size > 0]
    return exchange(min(sizes)) if sizes else 0.0


def greedy(workload: Workload, costs: Costs) -> Plan:
    """Make the plan of Algorithm 1, FindMergedLayers (OMGS-SGD, section IV-B).

    Layer l waits for layer l - 1 if both hold (Eq. 24), with ``u = tau_b(l) + t_b(l) + t_b(l-1)``:

    - Q3: ``u + t_s(d(l)) + t_s(d(l-1)) < tau_c(l) + t_c(d(l))``: the links are busy anyway;
    - Q5: ``tau_c(l) + alpha > u + t_s(d(l) + d(l-1))``: waiting costs less than alpha.

    The paper calls the result optimal (Theorem 1). It is not: the proof changes one layer at a
    time with the others as they are, and looks at the end of layer l - 1 alone. Its quirks are
    kept as they are:

    - the rule sees one layer ahead: it does not merge three layers where merging two saves nothing;
    - a later end of layer l - 1 counts as a loss even where the layers after it hide it, and time
      by which encoding delays the layers after l - 1 does not count at all;
    - Q3 and Q5 take ``t_s`` to grow faster than its amount and ``t_c`` to be a line; with other
      curves they are no longer what the merge gains;
    - a merged layer has no elements left, and nothing costs nothing (Eq. 13), although Algorithm 1
      written out would charge it alpha in line 22 and take the logarithm of 0 in line 16. `printed`
      follows these lines, and the others that contradict section IV-A, as they are.

    ``costs.delay`` does not count: the paper has no such term.

    A layer whose next one is of another kind never waits. Alpha is as in `startup_s`.
    """
    runs = Runs(workload, costs)
    alpha = startup_s(costs.exchange, workload)
    encode = runs.encode_one

    def waits(start: int, stop: int, begin: float, encoded: float) -> bool:
        ready = runs.ready[stop] + encoded
        apart = ready + encode(start, stop) + encode(stop, stop + 1)
        together = ready + encode(start, stop + 1)
        return bool(apart < begin + runs.exchange_one(start, stop) and begin + alpha > together)

    return _walk(workload, runs, waits)


def printed(workload: Workload, costs: Costs) -> Plan:
    """Make the plan of Algorithm 1 line by line as it is printed (OMGS-SGD, section IV-B).

    Its lines contradict the equations of section IV-A, which `greedy` follows, in three places:

    - line 5: ``u = tau_b(l) + t_b(l-1)``, without the ``t_b(l)`` of section IV-A. So more layers
      seem worth merging;
    - line 10: after a merge the times from layer l on are counted from ``tau_b(l) + t_b(l-1)``,
      where ``t_b(l-1)`` is that of both layers already (line 38), and not from ``tau_b(l)``
      (Eq. 15). So backward of merged layers counts twice;
    - line 22: a merged layer, of 0 elements, is charged alpha, and not nothing (Eq. 13).

    Line 16 takes ``0 * log 0`` for a merged layer; that is 0 here, as it has no value otherwise.
    The text that this was read from prints tau_b and t_b alike: of the two terms in lines 5 and 10,
    the first is read as a time and the second as a duration. ``costs.delay`` does not count. A
    layer whose next one is of another kind never waits. Alpha is as in `startup_s`. Takes O(L^2).
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
        tc[layer] = alpha  # by line 22, which line 12 comes to after line 40 has set it to 0
        times_from(layer, tau_b[layer] + tb[layer - 1])
    return plan_of(workload, [*stops, count] if count else [])


def wfbp(workload: Workload, costs: Costs) -> Plan:
    """Make the plan of MG-WFBP for dense gradients (Shi, Chu and Li, INFOCOM 2019).

    Layer l waits for layer l - 1 if the latter's gradient is ready before ``tau_c(l) + alpha``.
    ``costs.encode`` does not count: dense gradients are not encoded. A layer whose next one is of
    another kind never waits. Alpha is as in `startup_s`.
    """
    runs = Runs(workload, Costs(NOTHING, costs.exchange))
    alpha = startup_s(costs.exchange, workload)

    def waits(_start: int, stop: int, begin: float, _encoded: float) -> bool:
        return bool(runs.ready[stop] < begin + alpha)

    return _walk(workload, runs, waits)


def _walk(workload: Workload, runs: Runs, waits: Callable[[int, int, float, float], bool]) -> Plan:
    """Close a run wherever it does not wait for the next tensor.

    ``waits(start, stop, begin, encoded)`` decides for the run ``[start, stop)``, whose exchange
    would begin at ``begin`` (tau_c), after ``encoded`` seconds of encoding earlier runs. Times
    before the run never change again, so one pass gives what recomputing all of them would.
    """
    stops: list[int] = []
    start, encoded, free = 0, 0.0, 0.0
    for stop in range(1, len(workload)):
        same_kind = workload.kinds[stop] == workload.kinds[stop - 1]
        after = encoded + runs.encode_one(start, stop)
        begin = max(runs.ready[stop - 1] + after, free)
        if same_kind and waits(start, stop, begin, encoded):
            continue
        stops.append(stop)
        free = begin + runs.exchange_one(start, stop)
        start, encoded = stop, after
    return plan_of(workload, [*stops, len(workload)] if len(workload) else [])
