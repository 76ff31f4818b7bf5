"""Plans of merged gradients for all-reduces in two halves, priced in both."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.merges import curves, groups, instances, plan_of, profile, work
from wingbeat.planning import merge
from wingbeat.planning.costs import ZERO, CostModel, Linear, PiecewiseLinear, Workload
from wingbeat.types import Plan


def all_plans(workload: Workload) -> list[Plan]:
    count = len(workload)
    must = {i for i in range(1, count) if workload.kinds[i] != workload.kinds[i - 1]}
    plans = []
    for size in range(count):
        for cuts in combinations(range(1, count), size):
            if must <= set(cuts):
                ends = pairwise([0, *cuts, count])
                plans.append(plan_of(*(workload.tensors[a:b] for a, b in ends)))
    return plans


def whole_s(plan: Plan, workload: Workload, costs: CostModel) -> float:
    return merge.predict(plan, workload, costs).finish_s + merge.gather_phase_s(
        plan, workload, costs
    )


def test_gather_phase_hand_computed_example_matches() -> None:
    """Forward goes from the tensor that is ready last; its layers take 1, 0.5 and 0 seconds."""
    workload = work([0.0, 1.0, 3.0], [1, 1, 1], [1.0, 2.0, 4.0])
    costs = CostModel(ZERO, ZERO, gather=Linear(0.25, 1.0))
    # (2,) is here at 4.25, its forward ends at 5.25; (1,) came at 6.5 and takes 0.5; (0,) at 7.75.
    assert merge.gather_phase_s(plan_of((0,), (1,), (2,)), workload, costs) == pytest.approx(7.75)
    # All are here at 7.25, and forward takes 1.5.
    assert merge.gather_phase_s(plan_of((0, 1, 2)), workload, costs) == pytest.approx(8.75)
    assert merge.gather_phase_s(plan_of((0, 1, 2)), workload, replace(costs, gather=None)) == 0.0


def test_exact_two_phase_differs_from_backward_optimum() -> None:
    """A reduce-scatter's startup time merges all; forward would wait for all of that."""
    workload = work([0.0, 4.0, 8.0], [1, 1, 1], [1.0, 1.0, 1.0])
    costs = CostModel(ZERO, Linear(0.1, 0.0), gather=Linear(0.1, 2.0))
    undecided = CostModel(ZERO, Linear(0.1, 0.0))
    assert groups(merge.exact(workload, undecided)) == [(0, 1, 2)]
    plan, proven = merge.exact_two_phase(workload, costs)
    assert groups(plan) == [(0,), (1,), (2,)]
    assert proven


@given(instances(most=8), st.data())
@settings(deadline=None, max_examples=examples(120))
def test_exact_two_phase_equals_best_of_all_plans(instance: Any, data: st.DataObject) -> None:
    workload, costs = instance
    sizes = st.sampled_from([1.0, 10.0, 500.0, 1000.0, 2000.0, 8000.0, 20000.0])
    costs = replace(costs, gather=data.draw(curves(sizes)))
    plan, proven = merge.exact_two_phase(workload, costs)
    assert proven
    best = min(whole_s(each, workload, costs) for each in all_plans(workload))
    assert whole_s(plan, workload, costs) == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
@pytest.mark.parametrize("delay", [ZERO, Linear(1e-4, 1e-9)])
def test_exact_two_phase_whole_models_no_simple_plan_is_better(name: str, delay: Any) -> None:
    workload = profile(name)
    workload = replace(workload, nbytes=tuple(4.0 * n for n in workload.numels))
    costs = CostModel(ZERO, Linear(1e-3, 4e-9), delay, Linear(1e-3, 4e-9))
    plan, proven = merge.exact_two_phase(workload, costs)
    assert proven
    own = whole_s(plan, workload, costs)
    for other in (merge.exact(workload, costs), *merge._initial_plans(workload, costs)):
        assert own <= whole_s(other, workload, costs) * (1 + 1e-9)


def test_exact_two_phase_label_limit_reports_not_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MAX_LABELS", 1)
    workload = profile("resnet50")
    workload = replace(workload, nbytes=tuple(4.0 * n for n in workload.numels))
    plan, proven = merge.exact_two_phase(
        workload, CostModel(ZERO, Linear(1e-3, 4e-9), gather=Linear(1e-3, 4e-9))
    )
    assert not proven
    assert sorted(t for bucket in plan.buckets for t in bucket.tensors) == sorted(workload.tensors)


@pytest.mark.parametrize("seed", range(8))
def test_exact_two_phase_label_limit_no_simple_plan_is_better(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the limit drops every prefix that could end before the simple plans."""
    rng = random.Random(seed)

    def curve(alpha: float, beta: float) -> PiecewiseLinear:
        amounts = [4096.0 * 4**step for step in range(7)]
        noisy = (rng.uniform(0.3, 3) * (alpha + beta * amount) for amount in amounts)
        return PiecewiseLinear(tuple(amounts), tuple(accumulate(noisy, max)))

    workload = profile("alexnet")
    workload = replace(workload, nbytes=tuple(0.1 * n for n in workload.numels))
    alpha, beta = 10 ** rng.uniform(-4, -2), 10 ** rng.uniform(-10, -7)
    delay = curve(alpha / 3, beta / 3)
    costs = CostModel(ZERO, curve(alpha, beta), delay, curve(alpha, beta))
    monkeypatch.setattr(merge, "MAX_LABELS", 1)
    plan, proven = merge.exact_two_phase(workload, costs)
    assert not proven
    least = min(whole_s(each, workload, costs) for each in merge._initial_plans(workload, costs))
    assert whole_s(plan, workload, costs) <= least * (1 + 1e-9)
    tensors = sorted(tensor for bucket in plan.buckets for tensor in bucket.tensors)
    assert tensors == sorted(workload.tensors)
