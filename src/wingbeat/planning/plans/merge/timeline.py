"""When each bucket of a plan is encoded and exchanged (OMGS-SGD, Eqs. 5 to 9 and 13 to 18).

One term is added to the paper's. Where an exchange needs processors that backward needs as well, it
holds backward up: so Eq. 6 becomes ``tau_b(l) = tau_s(l+1) + t_s(l+1) + t_w(l+1)``, with t_w of
`Costs.delay`. The last exchange has no backward beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wingbeat.planning.costs.workload import Costs, Workload
from wingbeat.planning.plans.merge.runs import Runs, stops_of
from wingbeat.types import Plan, PlannedBucket


@dataclass(frozen=True, slots=True)
class Row:
    """One bucket's times, in seconds from the begin of backward.

    Attributes:
        bucket: which tensors.
        ready_s: when its last gradient would be ready if nothing were encoded.
        encode_begin_s: when its last gradient is ready, behind earlier buckets' encoding and what
            their exchanges have held up (Eq. 7).
        encode_end_s: when it may be exchanged.
        exchange_begin_s: when the links are free for it (Eq. 8).
        exchange_end_s: when its sum is there.
    """

    bucket: PlannedBucket
    ready_s: float
    encode_begin_s: float
    encode_end_s: float
    exchange_begin_s: float
    exchange_end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A plan's backward pass, in seconds.

    Attributes:
        rows: one for each bucket, in the plan's order.
        backward_s: backward alone.
        encode_s: all encoding, which backward waits for.
        delay_s: by how much exchanges hold backward up besides.
        exposed_s: exchange that nothing hides: from the end of the last encoding to the end of the
            last exchange. Eq. 9 with its sign put right: it subtracts ``tau_s`` and adds ``t_s``
            where it has to subtract both.
        finish_s: end of the last exchange, from the begin of backward (Eq. 17, which counts from
            the begin of forward).
    """

    rows: tuple[Row, ...]
    backward_s: float
    encode_s: float
    delay_s: float
    exposed_s: float
    finish_s: float


def predict(plan: Plan, workload: Workload, costs: Costs) -> Timeline:
    """Say when each bucket of ``plan`` is encoded and exchanged.

    A bucket is encoded as soon as its last gradient is ready, on the thread that runs backward
    (Eqs. 6 and 7; a merged layer costs nothing, Eqs. 13 to 15). Exchanges go on in the background,
    one at a time, in the plan's order (Eq. 8), and hold up what is ready later by `Costs.delay`.

    Raises:
        UsageError: the buckets are not runs of the workload's tensors, each of one kind.
    """
    stops = np.array(stops_of(plan, workload), dtype=np.int64)
    if not len(stops):
        return Timeline((), 0.0, 0.0, 0.0, 0.0, 0.0)
    runs = Runs(workload, costs)
    starts = np.concatenate(([0], stops[:-1]))
    encodes = runs.encode(starts, stops).tolist()
    exchanges = runs.exchange(starts, stops).tolist()
    delays = runs.delay(starts, stops).tolist()
    delayed = finish = 0.0
    rows = []
    for number, bucket in enumerate(plan.buckets):
        ready = workload.ready_s[stops[number] - 1]
        begin = ready + delayed
        # This order of additions is the search's own: plans compare by these very bits.
        delayed += encodes[number]
        end = ready + delayed
        delayed += delays[number]
        sent = max(end, finish)
        finish = sent + exchanges[number]
        rows.append(Row(bucket, ready, begin, end, sent, finish))
    return Timeline(
        rows=tuple(rows),
        backward_s=workload.ready_s[-1],
        encode_s=sum(encodes),
        delay_s=sum(delays),
        exposed_s=finish - rows[-1].encode_end_s,
        finish_s=finish,
    )
