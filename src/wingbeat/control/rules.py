"""The rules by which layers are merged, by their names in `Merging`."""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.costs import Costs, Workload
from wingbeat.observe.log import log
from wingbeat.plans import merge
from wingbeat.types import Plan

_WORK = 200_000_000
"""Of the search for the best plan: a second or two, which the other workers wait."""


def _exact(workload: Workload, costs: Costs) -> Plan:
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


RULES: dict[str, Callable[[Workload, Costs], Plan]] = {
    "exact": _exact,
    "paper": merge.greedy,
    "wfbp": merge.wfbp,
}
