"""The published rules for merging: Algorithm 1 of OMGS-SGD, and MG-WFBP."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.merges import groups, plan_of, work
from wingbeat.planning import merge
from wingbeat.planning.costs import ZERO, CostModel, Linear, Linearithmic, PiecewiseLinear, Workload
from wingbeat.planning.merge import startup_s


def test_greedy_hand_computed_example_matches() -> None:
    # Layer 3 (position 0): u = 2, Q3: 2 < 1 + (1 + 1), Q5: 1 + 1 > 2 is false: a bucket.
    # Layer 2 (position 1): u = 2.5, tau_c = 3, Q3: 2.5 < 3 + 2, Q5: 3 + 1 > 2.5: it waits.
    workload = work([1.0, 2.0, 2.5], [1, 1, 1], [1.0, 1.0, 1.0])
    assert groups(merge.greedy(workload, CostModel(ZERO, Linear(1.0, 1.0)))) == [(0,), (1, 2)]


def algorithm_1(workload: Workload, costs: CostModel, alpha: float) -> list[int]:
    """The pseudo-code line by line, layers counted as there: 1 is ready last. Returns stops."""
    count = len(workload)
    d = {count - p: float(workload.numels[p]) for p in range(count)}
    b = {count - p: workload.nbytes[p] for p in range(count)}
    ready = (0.0, *workload.ready_s)
    tb = {count - p: ready[p + 1] - ready[p] for p in range(count)}

    def ccps(top: int, tau: float) -> None:
        for layer in range(top, 0, -1):
            ts[layer] = costs.encode(d[layer])
            taub[layer] = tau if layer == top else taus[layer + 1] + ts[layer + 1]
            taus[layer] = taub[layer] + tb[layer]

    def ccms() -> None:
        for layer in range(count, 0, -1):
            tc[layer] = costs.exchange(b[layer])
            end = taus[layer] + ts[layer]
            tauc[layer] = end if layer == count else max(tauc[layer + 1] + tc[layer + 1], end)

    taub: dict[int, float] = {}
    taus: dict[int, float] = {}
    ts: dict[int, float] = {}
    tc: dict[int, float] = {}
    tauc: dict[int, float] = {}
    ccps(count, 0.0)
    ccms()
    merged = set()
    for layer in range(count, 1, -1):
        u = taub[layer] + tb[layer] + tb[layer - 1]
        q3 = u + ts[layer] + costs.encode(d[layer - 1]) < tauc[layer] + costs.exchange(b[layer])
        q5 = tauc[layer] + alpha > u + costs.encode(d[layer] + d[layer - 1])
        if q3 and q5:
            tb[layer - 1], tb[layer] = tb[layer - 1] + tb[layer], 0.0
            d[layer - 1], d[layer] = d[layer - 1] + d[layer], 0.0
            b[layer - 1], b[layer] = b[layer - 1] + b[layer], 0.0
            ccps(layer, taub[layer])
            ccms()
            merged.add(layer)
    return [count - layer + 1 for layer in range(count, 0, -1) if layer not in merged]


@given(
    st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(1, 5000)), min_size=1, max_size=12),
    st.floats(0.01, 3.0),
    st.floats(1e-5, 1e-3),
    st.floats(1e-6, 1e-4),
)
@settings(deadline=None, max_examples=examples(200))
def test_greedy_equals_independent_algorithm_1(
    rows: Any, alpha: float, beta: float, gamma: float
) -> None:
    ready = [math.fsum(gap for gap, _ in rows[: i + 1]) for i in range(len(rows))]
    workload = work(ready, [numel for _, numel in rows], [float(numel) for _, numel in rows])
    costs = CostModel(Linearithmic(gamma, 0.5), Linear(alpha, beta))
    stops = algorithm_1(workload, costs, alpha)
    plan = plan_of(*(workload.tensors[a:b] for a, b in pairwise([0, *stops])))
    assert merge.greedy(workload, costs) == plan


def test_greedy_counterexample_is_not_optimal() -> None:
    """Against Theorem 1: the links' first message is best sent early, not merged for its alpha.

    The rule sees that (0, 1) ends sooner than (0,), (1,); that 2 then waits for it, it does not.
    """
    workload = work([1.0, 3.0, 6.0], [2, 1, 1], [2.0, 1.0, 1.0])
    costs = CostModel(Linearithmic(1e-9, 0.001), Linear(3.0, 1.0))
    greedy, best = merge.greedy(workload, costs), merge.exact(workload, costs)
    assert groups(greedy) == [(0, 1), (2,)]
    assert groups(best) == [(0,), (1, 2)]
    assert merge.predict(greedy, workload, costs).finish_s == pytest.approx(13.0)
    assert merge.predict(best, workload, costs).finish_s == pytest.approx(11.0)


def test_greedy_as_printed_hand_computed_example_matches() -> None:
    """The layers of `test_greedy_hand_computed_example_matches`.

    Layer 3: u = tau_b(3) + t_b(2) = 1, Q3: 1 < 1 + 2, Q5: 1 + 1 > 1: it waits; t_b(3) is missing.
    Then tau_b(3) = 0 + 2, tau_s(2) = 2 + 2, tau_c(2) = 4, by line 10, and layer 2: u = 2 + 0.5,
    Q3: 2.5 < 4 + 3, Q5: 4 + 1 > 2.5: it waits, too.
    """
    workload = work([1.0, 2.0, 2.5], [1, 1, 1], [1.0, 1.0, 1.0])
    assert groups(merge.greedy_as_printed(workload, CostModel(ZERO, Linear(1.0, 1.0)))) == [
        (0, 1, 2)
    ]


@pytest.mark.parametrize(
    ("line", "ready", "alpha", "printed"),
    [
        # With t_b(l) in u, (3,) would be alone, as it is by section IV-A.
        (5, [0.5, 1.0, 1.5, 2.5], 1.0, [(0, 1, 2, 3)]),
        # Counted from tau_b(l), all would be one.
        (10, [0.5, 1.0, 2.0, 6.0], 2.0, [(0, 1, 2), (3,)]),
        # Were nothing charged for what is merged, (0, 1) and (2, 3) would be.
        (22, [0.5, 1.0, 5.0, 5.5], 3.0, [(0, 1, 2, 3)]),
    ],
)
def test_greedy_as_printed_each_deviating_line_changes_plans(
    line: int, ready: list[float], alpha: float, printed: list[tuple[int, ...]]
) -> None:
    """In each instance that line alone decides: found by changing one at a time."""
    workload, costs = work(ready, [1] * 4, [1.0] * 4), CostModel(ZERO, Linear(alpha, 1.0))
    assert groups(merge.greedy_as_printed(workload, costs)) == printed


@given(st.floats(0.01, 3.0), st.floats(0.01, 3.0), st.floats(0.01, 3.0), st.floats(0.001, 1.0))
def test_greedy_as_printed_two_layers_merge_by_lines_6_and_7(
    first: float, second: float, alpha: float, gamma: float
) -> None:
    workload = work([first, first + second], [50, 70], [50.0, 70.0])
    costs = CostModel(Linearithmic(gamma, 0.1), Linear(alpha, 0.01))
    u, tau_c = second, first + costs.encode(50.0)
    q3 = u + costs.encode(50.0) + costs.encode(70.0) < tau_c + costs.exchange(50.0)
    q5 = tau_c + alpha > u + costs.encode(120.0)
    assume(not math.isclose(u + costs.encode(120.0), tau_c + alpha))
    expected = [(0, 1)] if q3 and q5 else [(0,), (1,)]
    assert groups(merge.greedy_as_printed(workload, costs)) == expected


def test_mg_wfbp_hand_computed_example_matches() -> None:
    # Tensor 1 comes 0.5 after 0 is ready, less than alpha; tensor 2 comes 5 later.
    workload = work([1.0, 1.5, 6.5], [1, 1, 1], [1.0, 1.0, 1.0])
    costs = CostModel(Linear(9.0, 9.0), Linear(1.0, 0.0))
    assert groups(merge.mg_wfbp(workload, costs)) == [(0, 1), (2,)]


def test_startup_of_nonlinear_curve_is_cost_of_smallest_tensor() -> None:
    """Of those that have bytes: half a second here, where the largest takes three."""
    workload = work([1.0, 1.5, 6.5], [1, 1, 1], [0.0, 4.0, 9.0])
    curve = PiecewiseLinear((2.0, 4.0, 9.0), (0.25, 0.5, 3.0))
    assert startup_s(curve, workload) == 0.5
    assert startup_s(Linear(0.125, 1.0), workload) == 0.125
    assert startup_s(curve, work([1.0, 2.0], [1, 1], [0.0, 0.0])) == 0.0


@pytest.mark.parametrize(("smallest_s", "merged"), [(0.4, False), (0.6, True)])
def test_greedy_nonlinear_curve_waits_for_startup(smallest_s: float, merged: bool) -> None:
    """The first could be sent at once, and the second is ready half a second later."""
    workload = work([1.0, 1.5], [1, 1], [4.0, 9.0])
    costs = CostModel(ZERO, PiecewiseLinear((4.0, 9.0), (smallest_s, 3.0)))
    assert groups(merge.mg_wfbp(workload, costs)) == ([(0, 1)] if merged else [(0,), (1,)])


def plans(monkeypatch: pytest.MonkeyPatch, **stops: list[int]) -> None:
    """Have the rules of a trial make plans with these stops."""
    for name in ("exact", "paper", "one", "undelayed"):
        ends = stops.get(name, stops["exact"])
        monkeypatch.setitem(
            merge.RULES, name, lambda workload, _, ends=ends: merge.plan_from_stops(workload, ends)
        )


@pytest.mark.parametrize(
    ("third_s", "tried"),
    [(2.05, [("exact", "undelayed")]), (2.2, [("exact", "undelayed"), ("paper",)])],
)
def test_candidates_alike_plans_of_equally_many_buckets_are_tried_once(
    third_s: float, tried: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges take a second; the first begins with the second or with the third gradient."""
    workload = work([1.0, 2.0, third_s, third_s], [1] * 4)
    plans(monkeypatch, exact=[2, 4], paper=[3, 4], one=[4])
    found = merge.candidates(merge.TRIED, workload, CostModel(ZERO, Linear(1.0, 0.0)))
    assert [each.rules for each in found] == [*tried, ("one",)]


def test_candidates_alike_plans_of_other_buckets_are_all_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prediction may be wrong about what one more bucket costs."""
    workload = work([1.0, 1.0, 1.0], [1] * 3)
    plans(monkeypatch, exact=[1, 3], one=[3])
    found = merge.candidates(merge.TRIED, workload, CostModel(ZERO, Linear(1e-6, 0.0)))
    assert [each.rules for each in found] == [("exact", "paper", "undelayed"), ("one",)]


def test_candidates_named_rule_has_one_plan() -> None:
    workload = work([1.0, 2.0, 2.5], [1, 1, 1])
    [found] = merge.candidates("paper", workload, CostModel(ZERO, Linear(1.0, 1.0)))
    assert found.rules == ("paper",)
