"""The probe: the measurements of one model on one cluster from which plans are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from wingbeat.errors import UsageError
from wingbeat.planning import merge
from wingbeat.planning.costs import ZERO, CostModel, Curve, Fit, Workload
from wingbeat.planning.files import check_range
from wingbeat.types import Plan, TensorSpec

COLLECTIVES = ("payload all-gather", "all-reduce", "reduce-scatter")
"""The exchanges that compete with backward."""

NEGLIGIBLE = 0.01
"""Share of backward below which a difference is noise."""

_LONGEST_S = 1e6
_SHOWN = 5
_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient of the backward pass, on the slowest worker.

    ``ready_s`` is in seconds from the first gradient, backward alone (OMGS-SGD, Eqs. 2 and 7).
    """

    tensor: int
    name: str
    ready_s: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Uncompressed collectives on one network interface, or on several together (Eq. 11).

    ``all_gather`` is seconds by the bytes that each worker contributes, ``all_reduce`` by those of
    the buffer.
    """

    name: str
    all_gather: Fit
    all_reduce: Fit


@dataclass(frozen=True, slots=True)
class MatrixCost:
    """Seconds of the slowest worker to exchange a shape of matrix as sketched low-rank factors."""

    rows: int
    cols: int
    payload_bytes: float
    exchange_s: float

    def __post_init__(self) -> None:
        check_range("rows", (self.rows,), 1)
        check_range("cols", (self.cols,), 1)
        check_range("payload_bytes", (self.payload_bytes,), 0)
        check_range("exchange_s", (self.exchange_s,), 0, _LONGEST_S)


@dataclass(frozen=True, slots=True)
class PlanTiming:
    """A merge plan that was timed in whole iterations.

    ``stops`` are the rising positions before which its buckets end, in ready order. ``iteration_s``
    is the median of its iterations, each the mean of all workers. Other values are a `UsageError`.
    """

    rules: tuple[str, ...]
    stops: tuple[int, ...]
    iteration_s: float

    def __post_init__(self) -> None:
        if not self.stops or self.stops[0] < 1 or sorted(set(self.stops)) != list(self.stops):
            raise UsageError(f"stops is {list(self.stops)!r}; allowed: rising numbers from 1 on")
        check_range("iteration_s", (self.iteration_s,), 0, _LONGEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The backward pass, the costs of encoding and exchange, and the rest of an iteration.

    Attributes:
        links: names of the network interfaces of rank 0.
        wire: encoding of gradients, as text.
        collective: one of `COLLECTIVES`.
        gradients: in the order in which they become ready.
        encode: seconds by elements, on the thread that runs backward (OMGS-SGD, Eq. 10).
        exchange: seconds by bytes of a worker's payload, decoding included (Eq. 11).
        interfaces: each network interface alone, then all together if there are several.
        rest_s: seconds of an iteration outside of backward and exchange, and of the next forward
            with its all-gathers if there are any.
        cpu: seconds of CPU time of an exchange in all threads, by bytes of a payload; None if not
            measured.
        gather: seconds of the all-gather during the next forward, by bytes of a payload, if
            ``collective`` is ``"reduce-scatter"``; None otherwise, and if not measured.
        contention: seconds by which each second of that CPU time delays backward.
        matrices: costs of shapes that travel as factors.
        timings: plans compared in a trial, the chosen one first; empty without a trial.

    Values out of range, or that contradict each other, are a `UsageError`.
    """

    kind: ClassVar[str] = "probe"
    workers: int
    links: tuple[str, ...]
    wire: str
    collective: str
    gradients: tuple[Gradient, ...]
    encode: Fit
    exchange: Fit
    interfaces: tuple[LinkFit, ...]
    rest_s: float
    cpu: Fit | None = None
    gather: Fit | None = None
    contention: float = 0.0
    matrices: tuple[MatrixCost, ...] = ()
    timings: tuple[PlanTiming, ...] = ()

    def __post_init__(self) -> None:
        check_range("workers", (self.workers,), 1)
        if self.collective not in COLLECTIVES:
            allowed = ", ".join(COLLECTIVES)
            raise UsageError(f"collective is {self.collective!r}; allowed: {allowed}")
        check_range("gradients.ready_s", self.ready_s, 0, _LONGEST_S)
        if list(self.ready_s) != sorted(self.ready_s):
            raise UsageError("gradients.ready_s falls; allowed: the order in which they get ready")
        count = len(self.gradients)
        if not count or sorted(self.tensors) != list(range(count)):
            raise UsageError("gradients.tensor has to name each tensor once")
        check_range("rest_s", (self.rest_s,), 0, _LONGEST_S)
        check_range("contention", (self.contention,), 0, _LONGEST_S)
        for timing in self.timings:
            if timing.stops[-1] != count:
                stops = list(timing.stops)
                raise UsageError(f"timings.stops is {stops!r}; allowed: rising up to {count}")

    @property
    def tensors(self) -> tuple[int, ...]:
        """Index of each tensor in the model's list, in ready order."""
        return tuple(gradient.tensor for gradient in self.gradients)

    @property
    def ready_s(self) -> tuple[float, ...]:
        """When each gradient is ready, in seconds from the first."""
        return tuple(gradient.ready_s for gradient in self.gradients)

    @property
    def backward_s(self) -> float:
        """Seconds from the first gradient to the last."""
        return self.gradients[-1].ready_s

    def costs(self) -> CostModel:
        """Return the costs of buckets."""
        delay = ZERO if self.cpu is None else self.cpu.curve.scaled(self.contention)
        gather = None if self.gather is None else self.gather.curve
        return CostModel(self.encode.curve, self.exchange.curve, delay, gather)

    def workload(self, specs: Sequence[TensorSpec], nbytes: Sequence[float]) -> Workload:
        """Return the backward pass of the probe's model; another model is a `UsageError`."""
        known = [specs[t].name if t < len(specs) else None for t in self.tensors]
        if known != [g.name for g in self.gradients] or len(self.gradients) != len(specs):
            raise UsageError(
                f"the probe has {len(self.gradients)} tensors, the model {len(specs)} or others "
                "by name; measure this model again"
            )
        curve = self.exchange.curve
        return Workload(
            tensors=self.tensors,
            ready_s=self.ready_s,
            numels=tuple(specs[t].numel for t in self.tensors),
            nbytes=tuple(
                equivalent_bytes(specs[t].shape, float(nbytes[t]), self.matrices, curve)
                for t in self.tensors
            ),
            kinds=tuple(specs[t].kind for t in self.tensors),
        )

    def explain(self) -> list[str]:
        """Return the measurements as readable lines."""
        lines = [
            f"{self.workers} workers over {' + '.join(self.links)}, gradients as {self.wire}",
            f"backward: {1e3 * self.backward_s:.4g} ms from the first of {len(self.gradients)} "
            f"gradients to the last; the rest of an iteration: {1e3 * self.rest_s:.4g} ms",
            f"encoding, by elements: {self.encode.explain()}",
            f"exchange, by bytes: {self.exchange.explain()}",
        ]
        lines += [
            f"a matrix of {each.rows} x {each.cols} as factors: {each.payload_bytes:g} bytes, "
            f"{1e3 * each.exchange_s:.4g} ms"
            for each in self.matrices
        ]
        if self.cpu is not None:
            lines.append(
                f"CPU time of an exchange, by bytes: {self.cpu.explain()}; each second of it "
                f"delays backward by {self.contention:.3g} s"
            )
        if self.gather is not None:
            lines.append(f"all-gather in the next forward, by bytes: {self.gather.explain()}")
        for link in self.interfaces:
            lines.append(f"all-gather on {link.name}, by bytes: {link.all_gather.explain()}")
            lines.append(f"all-reduce on {link.name}, by bytes: {link.all_reduce.explain()}")
        steps = [(b.ready_s - a.ready_s, b.name) for a, b in pairwise(self.gradients)]
        slowest = sorted(steps, key=lambda step: -step[0])[:_SHOWN]
        shown = ", ".join(f"{name} {1e3 * s:.3g} ms" for s, name in slowest if s > 0)
        if shown:
            lines.append(f"slowest gradients: {shown}")
        if self.timings:
            lines.append(f"plans tried: {format_timings(self.timings)}")
        return lines


def format_timings(timings: Sequence[PlanTiming]) -> str:
    """Format the compared plans and their times in one line.

    >>> format_timings(
    ...     [PlanTiming(("paper",), (1, 3), 0.48), PlanTiming(("exact", "one"), (3,), 0.5)]
    ... )
    'paper (2 buckets) 480 ms, exact = one (1 bucket) 500 ms'
    """
    return ", ".join(
        f"{' = '.join(each.rules)} ({len(each.stops)} bucket{'s' * (len(each.stops) > 1)}) "
        f"{1e3 * each.iteration_s:.4g} ms"
        for each in timings
    )


def equivalent_bytes(
    shape: Sequence[int], nbytes: float, matrices: Sequence[MatrixCost], exchange: Curve
) -> float:
    """Return the bytes whose exchange takes as long as that of a tensor.

    Factorizing takes more work per payload byte than sketching, so a matrix counts as more bytes
    than its payload has (Canary, section 4.3.1, case 1, under the costs of OMGS-SGD).
    """
    seconds = next((m.exchange_s for m in matrices if (m.rows, m.cols) == tuple(shape)), None)
    if seconds is None or exchange(nbytes) >= seconds:
        return nbytes
    low, high = nbytes, max(1.0, nbytes)
    while exchange(high) < seconds:
        low, high = high, 2.0 * high
        if high > 2.0**60:  # the curve is constant
            return nbytes
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if exchange(middle) >= seconds else (middle, high)
    return high


def contention(
    workload: Workload,
    costs: CostModel,
    cpu: Curve,
    alone: tuple[Plan, float],
    beside: tuple[Plan, float],
) -> float:
    """Return by how many seconds each second of CPU time of exchanges delays backward, 0 or more.

    The delay is measured, because it depends on the processors that a worker may use, their other
    load, and how much of backward waits for a device. The difference between two plans, the second
    of which exchanges during backward, is attributed to the CPU time of these exchanges. It is 0
    where there are processors for both.

    The delay is at most the duration of the exchanges. The excess has other causes, such as other
    jobs. ``alone`` and ``beside`` are these plans, each with the seconds from the first gradient
    until the last launch; the result is 0 unless the second has more exchanges during backward.
    """
    measured, spent, most = [], [], 0.0
    for plan, span_s in (alone, beside):
        timeline = merge.predict(plan, workload, replace(costs, delay=cpu))
        spent.append(timeline.delay_s)
        measured.append(span_s - timeline.encode_s)
        most = sum(times.exchange_end_s - times.exchange_begin_s for times in timeline.buckets[:-1])
    delay_s, cpu_s = measured[1] - measured[0], spent[1] - spent[0]
    if cpu_s <= 0.0 or delay_s <= NEGLIGIBLE * max(0.0, measured[0]):
        return 0.0
    return min(delay_s, most) / cpu_s
