"""The rules by which layers are merged, by their names in `Merging`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wingbeat.observe.log import log
from wingbeat.planning.costs import NOTHING, Costs, Workload
from wingbeat.planning.plans import merge
from wingbeat.types import Plan

_WORK = 200_000_000
"""Of the search for the best plan: a second or two, which the other workers wait."""

TRIED = "tried"
"""The rule that is none: what several make is tried, and the fastest kept."""


def _exact(workload: Workload, costs: Costs) -> Plan:
    if costs.gather is not None:
        plan, proven = merge.both(workload, costs)
        if not proven:
            log.warning("the search for the best plan of both halves was cut short")
        return plan
    found = merge.bounded(workload, costs, _WORK)
    if not found.proven:
        finish_s = merge.predict(found.plan, workload, costs).finish_s
        log.warning(
            "the search for the best plan was ended: all is exchanged %.4g ms after backward "
            "began, and with no plan before %.4g ms",
            1e3 * finish_s,
            1e3 * found.least_s,
        )
    return found.plan


def _undelayed(workload: Workload, costs: Costs) -> Plan:
    return _exact(workload, replace(costs, delay=NOTHING))


RULES: dict[str, Callable[[Workload, Costs], Plan]] = {
    "exact": _exact,
    "paper": merge.greedy,
    "printed": merge.printed,
    "wfbp": merge.wfbp,
}

CANDIDATES: dict[str, Callable[[Workload, Costs], Plan]] = {
    "exact": lambda workload, costs: RULES["exact"](workload, costs),
    "paper": lambda workload, costs: RULES["paper"](workload, costs),
    "one": lambda workload, _: merge.one(workload),
    "undelayed": _undelayed,
}
"""What is tried, the most promising first. ``undelayed`` is the exact plan of the paper's own
costs, in which exchanges do not hold backward up."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the names of all the rules that make it."""

    rules: tuple[str, ...]
    plan: Plan


def candidates(rule: str, workload: Workload, costs: Costs) -> list[Candidate]:
    """Return the plan of a rule, or all different ones that are to be tried."""
    rules = CANDIDATES if rule == TRIED else {rule: RULES[rule]}
    made: dict[Plan, list[str]] = {}
    for name, make in rules.items():
        made.setdefault(make(workload, costs), []).append(name)
    return [Candidate(tuple(names), plan) for plan, names in made.items()]
