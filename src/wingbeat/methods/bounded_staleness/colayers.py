"""Colayers from measurements: workers profile the model's layers and change colayers together.

Each worker measures when backward computes each gradient, and how wide gradients are distributed
(Canary, section 4.3.2). When the fastest worker enters a certain iteration, all workers drain. Each
worker then writes its measurements and its view to the rendezvous store, and applies no round until
there is a decision. The first decision that is written is binding:

- Other colayers, grouped by the medians of all measurements, if all members have written the same
  view and number of rounds. All replicas are then equal, and nothing is in flight.
- The same colayers, if the view has changed meanwhile. Workers then try again later, unless one has
  finished training.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.planning import plans
from wingbeat.planning.backward import BackwardProfiler
from wingbeat.planning.plans import Measured
from wingbeat.schema import MalformedMessage, Range, Text, excerpt, parse_json
from wingbeat.transport.membership import Number, View, members
from wingbeat.transport.store import AtomicStore
from wingbeat.types import Plan, PlannedBucket

SAMPLE = 4096
"""Elements of a gradient that are sampled."""

QUANTILE = 0.999
"""The quantile of the absolute values that measures the width."""

FIRST_ATTEMPT = 6
"""The iteration in which workers drain. Five are measured, after the slow first one."""

RETRY_AFTER = 50
"""Iterations after which workers try again."""

_POLL_S = 0.05  # between reads of the store
_STORE_S = 10.0  # timeout of a call of the store
_MAX_MEASURED = 1e6
_VIEW_CHANGED = "a worker came or went"

Buckets = tuple[tuple[int, ...], ...]

Measurements = tuple[list[float] | None, list[float | None]]
"""By tensor: seconds from the first gradient until its gradient is ready; and its width."""


class LayerProfiler:
    """Measurements of one worker, and the colayers chosen from those of all workers.

    ``passes`` measures when backward computes each gradient.
    """

    def __init__(self, bucketing: Bucketing, rebucket: Callable[[], object]) -> None:
        self._bucketing, self.rebucket = bucketing, rebucket
        self.count = len(bucketing.slots)
        self.passes = BackwardProfiler(self.count, bucketing.device, asynchronous=False)
        self._widths: list[list[float]] = [[] for _ in range(self.count)]

    @torch.no_grad()
    def measure_widths(self, bucket: Bucket) -> None:
        """Measure the widths of the gradients of a complete bucket."""
        if self.passes.enabled:
            for slot in bucket.slots:
                if slot.used and (width := gradient_width(slot.view)) is not None:
                    self._widths[slot.index].append(width)

    def measurements(self) -> Measurements:
        """Return the medians over this worker's iterations, as values that JSON can represent."""
        widths = [statistics.median(each) if each else None for each in self._widths]
        if not self.passes.totals():
            return None, widths
        order = self._bucketing.ready_order
        ready = dict(zip(order, self.passes.medians(order), strict=True))
        return [ready[slot.index] for slot in self._bucketing.slots], widths

    def choose_colayers(self, measured: Sequence[Any]) -> Buckets | None:
        """Return the tensors of each colayer; None if no worker has measured."""
        rows = [self._validated(each) for each in measured]
        ready = [times for times, _ in rows if times is not None]
        if not ready:
            return None
        widths = [
            [width for width in column if width is not None]
            for column in zip(*(widths for _, widths in rows), strict=True)
        ]
        medians = Measured(
            tuple(statistics.median(column) for column in zip(*ready, strict=True)),
            tuple(statistics.median(column) if column else None for column in widths),
        )
        b = self._bucketing
        plan = plans.make_plan(b.fusion, b.specs, b.ready_order, medians)
        return tuple(bucket.tensors for bucket in plan.buckets)

    def set_colayers(self, buckets: Sequence[Sequence[int]]) -> None:
        """Use these colayers from the next plan on, and stop measuring."""
        self.stop()
        self._bucketing.follow(Plan(tuple(PlannedBucket(tuple(each)) for each in buckets)))

    def stop(self) -> None:
        """Stop measuring."""
        self.passes.enabled = False

    def _validated(self, measured: Any) -> Measurements:
        count = self.count
        try:
            ready, widths = measured
            times = [0.0] * count if ready is None else ready
            valid = len(times) == len(widths) == count and all(
                type(value) in (int, float) and math.isfinite(value) and abs(value) <= _MAX_MEASURED
                for value in (*times, *(width for width in widths if width is not None))
            )
        except (TypeError, ValueError, OverflowError):
            valid = False
        if not valid:
            raise PeerError(
                f"a worker sent {excerpt(measured):.60} as the measurements of {count} gradients; "
                "all workers have to run the same model and the same version of wingbeat"
            )
        return ready, widths


def gradient_width(gradient: torch.Tensor) -> float | None:
    """Return the natural logarithm of a high quantile of the absolute values of a sample.

    The result is None if no value is finite and nonzero.

    >>> gradient_width(torch.tensor([0.5, -1.0, 0.25, 0.0]))
    0.0
    >>> gradient_width(torch.zeros(3))
    """
    flat = gradient.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLE)].abs().float()
    place = max(0, math.ceil(QUANTILE * sample.numel()) - 1)
    value = float(sample.sort().values[place]) if sample.numel() else 0.0
    return math.log(value) if 0 < value < math.inf else None


class ColayerDecision(NamedTuple):
    """A decision about colayers, the same on all workers.

    Attributes:
        rounds: in the parameters of the worker that decided.
        view: of that worker.
        buckets: the tensors of each colayer; None to keep the colayers.
        reason: why they are kept.
        retry: whether there is another attempt.
    """

    rounds: Number
    view: View
    buckets: tuple[tuple[Annotated[int, Range(0, "tensors")], ...], ...] | None
    reason: Annotated[str, Text(60)] = ""
    retry: bool = False


class _Told(NamedTuple):
    """What a worker writes for an attempt; its measurements are checked where they are used."""

    view: View
    rounds: Number
    measured: Any


def parse_decision(text: str, tensors: int) -> ColayerDecision:
    """Return a decision about this many tensors; MalformedMessage if it is malformed."""
    decision = parse_json(ColayerDecision, text, tensors=tensors)
    buckets = decision.buckets
    if buckets is not None:
        found = sorted(tensor for bucket in buckets for tensor in bucket)
        if found != list(range(tensors)) or not all(buckets):
            raise MalformedMessage(f"buckets is {buckets!r:.60}; allowed: each tensor once")
    return decision


class ColayerChange:
    """One worker's part in the decision; nonblocking, without a thread.

    From iteration ``due`` on workers drain for an attempt; None if there are no more attempts.
    ``decision`` is the last one that was read.
    """

    def __init__(
        self,
        store: AtomicStore,
        namespace: str,
        rank: int,
        tensors: int,
        choose: Callable[[Sequence[Any]], Buckets | None],
        *,
        first: int = FIRST_ATTEMPT,
        retry_after: int = RETRY_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._namespace, self._rank = store, namespace, rank
        self._tensors, self._choose = tensors, choose
        self._clock, self._retry_after = clock, retry_after
        self.due: int | None = first
        self.decision: ColayerDecision | None = None
        self._attempt, self._polled = 0, -1.0
        self._view: View | None = None  # as written in this attempt

    @property
    def _key(self) -> str:
        return f"{self._namespace}/{self._attempt}"

    def is_due(self, iteration: int) -> bool:
        """Whether workers drain for an attempt, because one has entered this iteration."""
        return self.due is not None and iteration >= self.due

    def mark_finished(self) -> None:
        """Publish that this worker has finished training; colayers do not change afterwards."""
        with contextlib.suppress(RuntimeError):  # no decisions without a store
            self._store.set(f"{self._namespace}/ended", "")

    def catch_up(self) -> None:
        """Read all decisions, as a restarted worker does."""
        while self.due is not None and self._read_decision():
            pass

    def poll_decision(self) -> bool:
        """Whether there is a decision, also if this worker has not drained."""
        return self._may_poll() and self._read_decision()

    def _may_poll(self) -> bool:
        now = self._clock()
        due = now >= self._polled + _POLL_S
        if due:
            self._polled = now
        return due

    def decide(
        self, machine: Worker, lost: Collection[int], measurements: Any
    ) -> ColayerDecision | None:
        """Contribute to the decision of drained workers; return it, or None if it is still open."""
        view, rounds = machine.view, machine.applied
        if self._view is None:
            self._view = view
            with self._deciding():
                text = json.dumps([view, rounds, measurements])
                self._store.set(f"{self._key}/{self._rank}", text)
        elif not self._may_poll():
            return None
        if self._read_decision():
            return self.decision
        if machine.view_changing or view != self._view or not set(lost).isdisjoint(members(view)):
            return self._claim(ColayerDecision(rounds, view, None, _VIEW_CHANGED, True))
        if self._store.has(f"{self._namespace}/ended"):
            reason = "a worker has ended its training"
            return self._claim(ColayerDecision(rounds, view, None, reason))
        if self.missing():
            return None
        told = [self._told(worker) for worker in members(view)]
        if any((each.view, each.rounds) != (view, rounds) for each in told):
            return self._claim(ColayerDecision(rounds, view, None, _VIEW_CHANGED, True))
        buckets = self._choose([each.measured for each in told])
        reason = "" if buckets else "nothing was measured"
        return self._claim(ColayerDecision(rounds, view, buckets, reason, buckets is None))

    def _told(self, worker: int) -> _Told:
        try:
            return parse_json(_Told, self._store.get(f"{self._key}/{worker}", _STORE_S))
        except MalformedMessage as error:
            raise PeerError(
                f"rank {self._rank}: rank {worker} has written malformed measurements for colayers "
                f"to the store: {error}; all workers have to run the same version of wingbeat"
            ) from None

    def missing(self) -> list[int]:
        """Return the members that have not written their measurements."""
        present = () if self._view is None else members(self._view)
        return [w for w in present if not self._store.has(f"{self._key}/{w}")]

    def _claim(self, decision: ColayerDecision) -> ColayerDecision:
        with self._deciding():
            text = self._store.claim(f"{self._key}/decided", json.dumps(decision))
        return self._adopt(text)

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, RuntimeError) as error:
            raise PeerError(
                f"rank {self._rank}: cannot reach the rendezvous store to decide whether colayers "
                f"change: {error}; start the job again from a checkpoint"
            ) from None

    def _read_decision(self) -> bool:
        key = f"{self._key}/decided"
        if not self._store.has(key):
            return False
        self._adopt(self._store.get(key, _STORE_S))
        return True

    def _adopt(self, text: str) -> ColayerDecision:
        try:
            decision = parse_decision(text, self._tensors)
        except MalformedMessage:
            raise PeerError(
                f"rank {self._rank}: {text!r:.60} is not a decision about {self._tensors} tensors; "
                "all workers have to run the same model and the same version of wingbeat"
            ) from None
        self.decision, self._view = decision, None
        self._attempt += 1
        self.due = decision.rounds + self._retry_after if decision.retry else None
        return decision
