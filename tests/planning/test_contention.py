"""How much exchanges hold backward up: from two plans, of which one has them under backward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.merges import work
from wingbeat.planning import merge
from wingbeat.planning.costs import CostModel, Linear
from wingbeat.planning.probe import NEGLIGIBLE, contention

WORKLOAD = work([1.0, 2.0, 4.0, 7.0], [10, 20, 30, 40], [2.0, 3.0, 5.0, 1.0])
COSTS = CostModel(Linear(0.5, 0.01), Linear(0.2, 0.1))
CPU = Linear(0.1, 0.05)
ONE, EACH = merge.single_bucket(WORKLOAD), merge.by_elements(WORKLOAD, 1)


def span(plan: merge.Timeline) -> float:
    """From the first gradient until all is on its way."""
    return plan.buckets[-1].encode_end_s


@given(st.floats(0.05, 50.0))
def test_contention_recovers_delay_factor(factor: float) -> None:
    costs = CostModel(COSTS.encode, COSTS.exchange, CPU.scaled(factor))
    spans = [span(merge.predict(plan, WORKLOAD, costs)) for plan in (ONE, EACH)]
    found = contention(WORKLOAD, COSTS, CPU, (ONE, spans[0]), (EACH, spans[1]))
    held_up = spans[1] - spans[0] - 3 * 0.5
    if held_up < NEGLIGIBLE * 7.0:
        assert found in (0.0, pytest.approx(factor))
    else:
        # Its exchanges last 0.4, 0.5 and 0.7 s, and take 0.2, 0.25 and 0.35 s of processors.
        assert found == pytest.approx(min(factor, 2.0))


def test_contention_enough_processors_gives_zero() -> None:
    spans = [span(merge.predict(plan, WORKLOAD, COSTS)) for plan in (ONE, EACH)]
    for noise in (-0.5, 0.0, 0.05):
        beside = EACH, spans[1] + noise
        assert contention(WORKLOAD, COSTS, CPU, (ONE, spans[0]), beside) == 0.0


def test_contention_similar_plans_give_zero() -> None:
    assert contention(WORKLOAD, COSTS, CPU, (ONE, 7.0), (ONE, 9.0)) == 0.0
    assert contention(WORKLOAD, COSTS, CPU, (EACH, 7.0), (ONE, 9.0)) == 0.0
    assert contention(WORKLOAD, COSTS, Linear(0.0, 0.0), (ONE, 7.0), (EACH, 99.0)) == 0.0
