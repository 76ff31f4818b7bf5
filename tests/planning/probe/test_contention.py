"""How much exchanges hold backward up: from two plans, of which one has them under backward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.merges import work
from wingbeat.planning.costs import Costs, Line
from wingbeat.planning.plans import merge
from wingbeat.planning.probe.contention import NEGLIGIBLE, contention

WORKLOAD = work([1.0, 2.0, 4.0, 7.0], [10, 20, 30, 40], [2.0, 3.0, 5.0, 1.0])
COSTS = Costs(Line(0.5, 0.01), Line(0.2, 0.1))
CPU = Line(0.1, 0.05)
ONE, EACH = merge.one(WORKLOAD), merge.by_size(WORKLOAD, 1)


def span(plan: merge.Timeline) -> float:
    """From the first gradient until all is on its way."""
    return plan.rows[-1].encode_end_s


@given(st.floats(0.05, 50.0))
def test_what_holds_backward_up_is_found(factor: float) -> None:
    costs = Costs(COSTS.encode, COSTS.exchange, CPU.times(factor))
    spans = [span(merge.predict(plan, WORKLOAD, costs)) for plan in (ONE, EACH)]
    found = contention(WORKLOAD, COSTS, CPU, (ONE, spans[0]), (EACH, spans[1]))
    held_up = spans[1] - spans[0] - 3 * 0.5
    if held_up < NEGLIGIBLE * 7.0:
        assert found in (0.0, pytest.approx(factor))
    else:
        # Its exchanges last 0.4, 0.5 and 0.7 s, and take 0.2, 0.25 and 0.35 s of processors.
        assert found == pytest.approx(min(factor, 2.0))


def test_where_there_are_processors_for_both_nothing_is_held_up() -> None:
    spans = [span(merge.predict(plan, WORKLOAD, COSTS)) for plan in (ONE, EACH)]
    for noise in (-0.5, 0.0, 0.05):
        beside = EACH, spans[1] + noise
        assert contention(WORKLOAD, COSTS, CPU, (ONE, spans[0]), beside) == 0.0


def test_of_plans_that_are_alike_nothing_is_learnt() -> None:
    assert contention(WORKLOAD, COSTS, CPU, (ONE, 7.0), (ONE, 9.0)) == 0.0
    assert contention(WORKLOAD, COSTS, CPU, (EACH, 7.0), (ONE, 9.0)) == 0.0
    assert contention(WORKLOAD, COSTS, Line(0.0, 0.0), (ONE, 7.0), (EACH, 99.0)) == 0.0
