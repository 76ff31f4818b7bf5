"""When each bucket of a plan is encoded and exchanged (OMGS-SGD, Eqs. 5 to 9 and 13 to 18).

One term is added to those of the paper. An exchange that needs the processors of backward delays
it, so Eq. 6 becomes ``tau_b(l) = tau_s(l+1) + t_s(l+1) + t_w(l+1)``, where t_w is
`CostModel.delay`. No backward runs during the last exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wingbeat.errors import UsageError
from wingbeat.planning.costs import CostModel, Curve, Floats, Workload
from wingbeat.types import Plan, PlannedBucket

Positions = NDArray[np.int64]

FORWARD = 0.5
"""Forward time of a layer over its backward time, as in DeAR (section VI-I); it is not measured."""


class SegmentCosts:
    """Costs of the segments ``[start, stop)`` of a workload's positions.

    All planners price segments here, so that equal segments have bit-identical costs.

    Attributes:
        ready: ``ready_s`` of each position, float64[L].
        first: for each stop 0 to L, the least start of a segment that ends there, int64[L + 1]: the
            tensors before it are of another kind.
    """

    def __init__(self, workload: Workload, costs: CostModel) -> None:
        self.costs = costs
        self.ready = np.array(workload.ready_s, dtype=np.float64)
        self._numels = _running_sums(workload.numels)
        self._nbytes = _running_sums(workload.nbytes)
        first = [0]
        for position in range(len(workload)):
            new = position > 0 and workload.kinds[position] != workload.kinds[position - 1]
            first.append(position if new else first[-1])
        self.first = np.array(first, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ready)

    def encode(self, starts: Positions, stops: Positions) -> Floats:
        """Return seconds to encode each segment; positions are int64, of shapes that broadcast."""
        elements: Floats = self._numels[stops] - self._numels[starts]
        return self.costs.encode(elements)

    def exchange(self, starts: Positions, stops: Positions) -> Floats:
        """Return seconds to exchange each segment."""
        return self._by_bytes(self.costs.exchange, starts, stops)

    def delay(self, starts: Positions, stops: Positions) -> Floats:
        """Return seconds by which each segment's exchange delays backward; 0 for the last one."""
        delays = self._by_bytes(self.costs.delay, starts, stops)
        seconds: Floats = np.where(stops == len(self), 0.0, delays)
        return seconds

    def _by_bytes(self, curve: Curve, starts: Positions, stops: Positions) -> Floats:
        size: Floats = self._nbytes[stops] - self._nbytes[starts]
        return curve(size)

    def encode_one(self, start: int, stop: int) -> float:
        """Return seconds to encode one segment."""
        return self.costs.encode(float(self._numels[stop] - self._numels[start]))

    def exchange_one(self, start: int, stop: int) -> float:
        """Return seconds to exchange one segment."""
        return self.costs.exchange(float(self._nbytes[stop] - self._nbytes[start]))


def _running_sums(values: Iterable[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.array(tuple(values), dtype=np.float64))))


def plan_from_stops(workload: Workload, stops: Iterable[int]) -> Plan:
    """Return the plan whose buckets end before these positions, rising, the last one L."""
    ends = [0, *stops]
    return Plan(
        tuple(PlannedBucket(workload.tensors[start:stop]) for start, stop in pairwise(ends))
    )


def bucket_stops(plan: Plan, workload: Workload) -> list[int]:
    """Return the positions before which a plan's buckets end.

    Raises:
        UsageError: the buckets are not segments of the workload's tensors, in their order, or one
            holds tensors of several kinds.
    """
    stops: list[int] = []
    start = 0
    for number, bucket in enumerate(plan.buckets):
        stop = start + len(bucket.tensors)
        if not bucket.tensors or workload.tensors[start:stop] != bucket.tensors:
            raise UsageError(
                f"plan: bucket {number} holds the tensors {list(bucket.tensors)!r}; allowed: "
                f"segments of the remaining tensors {list(workload.tensors[start:])!r}"
            )
        kinds = sorted(set(workload.kinds[start:stop]))
        if len(kinds) > 1:
            raise UsageError(
                f"plan: bucket {number} mixes {' and '.join(kinds)}; allowed: one kind in each"
            )
        stops.append(stop)
        start = stop
    if start != len(workload):
        raise UsageError(
            f"plan: {start} of {len(workload)} tensors are in its buckets; allowed: all"
        )
    return stops


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """The times of one bucket, in seconds from the start of backward.

    Attributes:
        ready_s: when its last gradient would be ready if nothing were encoded.
        encode_begin_s: when its last gradient is ready, delayed by the encoding and the exchanges
            of earlier buckets (Eq. 7).
        encode_end_s: when it may be exchanged.
        exchange_begin_s: when the links are free for it (Eq. 8).
        exchange_end_s: when its sum has arrived.
    """

    bucket: PlannedBucket
    ready_s: float
    encode_begin_s: float
    encode_end_s: float
    exchange_begin_s: float
    exchange_end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted backward pass of a plan, in seconds.

    Attributes:
        backward_s: backward alone.
        encode_s: all encoding, which backward waits for.
        delay_s: total delay of backward by exchanges.
        exposed_s: exchange time that is not hidden: from the end of the last encoding to the end of
            the last exchange. Eq. 9 with its sign corrected: it subtracts ``tau_s`` and adds
            ``t_s`` where it has to subtract both.
        finish_s: end of the last exchange, from the start of backward (Eq. 17, which counts from
            the start of forward).
    """

    buckets: tuple[BucketTimes, ...]
    backward_s: float
    encode_s: float
    delay_s: float
    exposed_s: float
    finish_s: float


def predict(plan: Plan, workload: Workload, costs: CostModel) -> Timeline:
    """Predict when each bucket of ``plan`` is encoded and exchanged.

    A bucket is encoded when its last gradient is ready, on the thread that runs backward (Eqs. 6
    and 7; a merged layer costs nothing, Eqs. 13 to 15). Exchanges run in the background, one at a
    time, in the plan's order (Eq. 8), and delay later gradients by `CostModel.delay`.
    """
    stops = np.array(bucket_stops(plan, workload), dtype=np.int64)
    if not len(stops):
        return Timeline((), 0.0, 0.0, 0.0, 0.0, 0.0)
    segments = SegmentCosts(workload, costs)
    starts = np.concatenate(([0], stops[:-1]))
    encodes = segments.encode(starts, stops).tolist()
    exchanges = segments.exchange(starts, stops).tolist()
    delays = segments.delay(starts, stops).tolist()
    delayed = finish = 0.0
    buckets = []
    for number, bucket in enumerate(plan.buckets):
        ready = workload.ready_s[stops[number] - 1]
        begin = ready + delayed
        # The search adds in the same order, because plans are compared by these bits.
        delayed += encodes[number]
        end = ready + delayed
        delayed += delays[number]
        sent = max(end, finish)
        finish = sent + exchanges[number]
        buckets.append(BucketTimes(bucket, ready, begin, end, sent, finish))
    return Timeline(
        buckets=tuple(buckets),
        backward_s=workload.ready_s[-1],
        encode_s=sum(encodes),
        delay_s=sum(delays),
        exposed_s=finish - buckets[-1].encode_end_s,
        finish_s=finish,
    )


def gather_phase_s(plan: Plan, workload: Workload, costs: CostModel) -> float:
    """Return the seconds of the next forward with its all-gathers (DeAR, FeedPipe).

    From the end of all reduce-scatters until forward ends, without the time before the layer whose
    gradient is ready first. 0 if there are no all-gathers (``costs.gather`` is None).
    """
    if costs.gather is None:
        return 0.0
    done = 0.0
    for start, stop in pairwise([0, *bucket_stops(plan, workload)]):
        gather = costs.gather(float(sum(workload.nbytes[start:stop])))
        done = max(done, FORWARD * workload.ready_s[stop - 1]) + gather
    return done
