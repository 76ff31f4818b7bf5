"""The merging rules by their names in `Merging`, and the plans that are compared in a trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wingbeat.observe.log import log
from wingbeat.planning.costs import ZERO, CostModel, Workload
from wingbeat.planning.merge.optimal import exact_two_phase, search
from wingbeat.planning.merge.rules import greedy, greedy_as_printed, mg_wfbp, single_bucket
from wingbeat.planning.merge.timeline import predict
from wingbeat.types import Plan

_WORK = 200_000_000
"""Work limit of the search: a second or two, for which the other workers wait."""

TRIED = "tried"
"""Instead of a rule: several plans are timed in whole iterations, and the fastest is kept."""

Rule = Callable[[Workload, CostModel], Plan]


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


RULES: dict[str, Rule] = {
    "exact": _exact,
    "paper": greedy,
    "printed": greedy_as_printed,
    "wfbp": mg_wfbp,
}

CANDIDATES: dict[str, Rule] = {
    "exact": lambda workload, costs: RULES["exact"](workload, costs),
    "paper": lambda workload, costs: RULES["paper"](workload, costs),
    "one": lambda workload, _: single_bucket(workload),
    "undelayed": lambda workload, costs: _exact(workload, replace(costs, delay=ZERO)),
}
"""The plans of a trial, the most promising first. ``undelayed`` is the optimal plan under the
paper's own costs, in which exchanges do not delay backward."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the names of all rules that make it."""

    rules: tuple[str, ...]
    plan: Plan


def candidates(rule: str, workload: Workload, costs: CostModel) -> list[Candidate]:
    """Return the plan of a rule, or for `TRIED` all different plans of `CANDIDATES`."""
    rules = CANDIDATES if rule == TRIED else {rule: RULES[rule]}
    made: dict[Plan, list[str]] = {}
    for name, make in rules.items():
        made.setdefault(make(workload, costs), []).append(name)
    return [Candidate(tuple(names), plan) for plan, names in made.items()]
