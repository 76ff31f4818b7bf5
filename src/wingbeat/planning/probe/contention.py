"""How much exchanges hold backward up, as both need the same processors.

Measured, not modelled: how many processors a worker may use, what else runs on them and how much
of backward waits for a device are all in what backward takes beside exchanges and without them. Of
two plans, the second of which exchanges while backward goes on, the difference is put down to the
seconds of processors that these exchanges take. So it is nothing where there are enough for both.
"""

from __future__ import annotations

from dataclasses import replace

from wingbeat.planning.costs import Curve
from wingbeat.planning.costs.workload import Costs, Workload
from wingbeat.planning.plans import merge
from wingbeat.types import Plan

NEGLIGIBLE = 0.01
"""A share of backward; what differs by less differs by chance."""


def contention(
    workload: Workload,
    costs: Costs,
    cpu: Curve,
    alone: tuple[Plan, float],
    beside: tuple[Plan, float],
) -> float:
    """Return by how many seconds backward is held up for each second of processors, 0 or more.

    By no more than exchanges last: what is longer has other causes, such as other jobs.

    Args:
        workload: the backward pass.
        costs: of buckets; their ``delay`` does not count.
        cpu: seconds of processors that the exchange of so many bytes takes.
        alone: a plan, and the seconds from the first gradient until all is on its way, encoding
            included; the fewer exchanges under backward the better.
        beside: the same of a plan with more of them. With as many or fewer nothing is known, and
            the answer is 0.
    """
    taken, spent, most = [], [], 0.0
    for plan, span_s in (alone, beside):
        timeline = merge.predict(plan, workload, replace(costs, delay=cpu))
        spent.append(timeline.delay_s)
        taken.append(span_s - timeline.encode_s)
        most = sum(row.exchange_end_s - row.exchange_begin_s for row in timeline.rows[:-1])
    held_up, processors = taken[1] - taken[0], spent[1] - spent[0]
    if processors <= 0.0 or held_up <= NEGLIGIBLE * max(0.0, taken[0]):
        return 0.0
    return min(held_up, most) / processors
