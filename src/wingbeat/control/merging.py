"""Layers merged by what they are measured to cost (OMGS-SGD, sections III and IV).

The first iterations run with all layers in one bucket while backward is measured. Then all workers
measure the codec and the links together, rank 0 makes the plan, and everyone follows it. Backward
is measured once more under the plan, and planned for again. Times that drift begin it all anew.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from wingbeat import schedules
from wingbeat.collectives import Collectives
from wingbeat.control.drift import Drift
from wingbeat.control.rules import RULES
from wingbeat.costs import Workload
from wingbeat.errors import PeerError, UsageError
from wingbeat.gradients.bucket import Slot, UnderWay
from wingbeat.gradients.bucketing import Bucketing
from wingbeat.gradients.compression import Compression
from wingbeat.observe.log import log
from wingbeat.plans import merge, planfile
from wingbeat.probe import saved
from wingbeat.probe.backward import BackwardTimes, combine
from wingbeat.probe.exchange import measure_wire
from wingbeat.probe.links import measure_links
from wingbeat.probe.model import (
    Probe,
    fitted,
    fitted_links,
    key_of,
    payload_bytes,
    wire_text,
)
from wingbeat.types import Choices, Merging, Plan, PlannedBucket
from wingbeat.wires import Coded, TopK


class LayerMerging:
    """Measures, has a plan made, and lets a `Bucketing` follow it.

    What an earlier run has measured, in the file on rank 0, is taken over at once.
    """

    def __init__(
        self,
        rule: Merging,
        choices: Choices,
        bucketing: Bucketing,
        compression: Compression,
        collectives: Collectives,
        wire_is_known: bool = True,
    ) -> None:
        self._rule = rule
        self._choices = choices
        self._compression = compression
        self._bucketing = bucketing
        self._collectives = collectives
        self._device = bucketing.device
        self._halves = choices.schedule == "dear"
        # Collectives of a library for GPUs tell nobody when they are done.
        native = self._device.type in collectives.world.native_on
        later = not schedules.BY_NAME[choices.schedule].whole_after_backward
        self._goes_on = later and not native
        self._drift = Drift(rule.steps, rule.drift)
        self._began = 0.0
        self._ends: list[float] = []
        self._forget_times()
        self.probe: Probe | None = None
        self.timeline: merge.Timeline | None = None
        self._known = not rule.file
        # While it is tried whether a codec stays on, nobody knows what will travel.
        if wire_is_known:
            self._take_known()

    @property
    def _wire(self) -> str | Coded:
        """What gradients travel as: fp32 where a codec was tried and is not faster."""
        return self._choices.wire if self._compression.on or not self._compression.coded else ""

    def _key(self) -> dict[str, Any]:
        world = self._collectives.world
        links = [link.name for link in world.links]
        return key_of(self._bucketing.specs, world.size, links, self._wire, self._way())

    def active(self) -> bool:
        """Always: iterations are counted, and watched for drift, to the end of training."""
        return True

    def deciding(self) -> bool:
        """Whether the plan is still to be made."""
        return self._drift.watching

    def decide(self, found: Probe) -> None:
        """Plan from what was measured before; on all workers at once, before training."""
        self._known = True
        self._follow(found)
        self._drift.planned(known=True)

    def report(self) -> dict[str, Any] | None:
        """Return what was measured and what the plan should bring; None before there is one."""
        if self.probe is None or self.timeline is None:
            return None
        return {
            "merge": self._rule.rule,
            "buckets": len(self.timeline.rows),
            "tensors": len(self.probe.tensors),
            "predicted_s": self.probe.rest_s + self.timeline.finish_s,
            "rest_s": self.probe.rest_s,
            "backward_s": self.timeline.backward_s,
            "encode_s": self.timeline.encode_s,
            "exposed_s": self.timeline.exposed_s,
            "encode": self.probe.encode.to_json(),
            "exchange": self.probe.exchange.to_json(),
            "fit_error": self.probe.exchange.error,
        }

    # -- in backward ----------------------------------------------------------------------

    def begin(self) -> None:
        """A backward has brought its first gradient."""
        if self._drift.watching:
            self._times.begin()
            self._began = time.perf_counter()

    def enter(self, index: int) -> None:
        """A gradient is ready, and the engine begins to work on it."""
        if self._drift.watching:
            self._times.enter(index)

    def leave(self) -> None:
        """The engine has done with that gradient."""
        if self._drift.watching:
            self._times.leave()

    def end(self) -> None:
        """The last gradient of a backward has come."""
        if self._drift.watching:
            self._times.end()

    def launched(self, last: UnderWay | None) -> None:
        """All exchanges of a backward have been started; ``last`` is that of the last bucket."""
        if self._goes_on and last is not None:
            began, self._began = self._began, 0.0  # the next backward may begin before that
            last.add_done_callback(lambda _handle: self._ended(began))

    def waited(self) -> None:
        """Gradients are as the schedule leaves them when backward returns."""
        if not self._goes_on:
            self._ended(self._began)
            self._began = 0.0

    def _ended(self, began: float) -> None:
        if self._drift.watching and began:
            self._ends.append(time.perf_counter() - began)

    def abandon(self) -> None:
        """A backward was cut short: nothing of it counts."""
        self._began = 0.0
        self._times.begin()

    # -- between iterations ---------------------------------------------------------------

    def boundary(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Count an iteration; plan when enough has been seen, and hear whether times drift.

        Raises:
            PeerError: a worker failed, or sent something that is no measurement.
        """
        self._take_known()
        if rows is not None:
            self._hear(self._drift.take([row[0] for row in rows]))
        self._drift.lap(seconds)
        if not self._drift.due():
            return False
        self._plan()
        return True

    def row(self) -> Sequence[float]:
        """Return the median at the end of a window, in seconds."""
        return [self._drift.median()] if self._drift.reports() else []

    def _hear(self, drifted: tuple[float, float] | None) -> None:
        if drifted is None:
            return
        if self._collectives.world.rank == 0:
            log.info(
                "iterations take %.4g s in place of %.4g s: measuring anew, to merge layers anew",
                drifted[1],
                drifted[0],
            )
        self._forget_times()

    # -- planning -------------------------------------------------------------------------

    def _plan(self) -> None:
        """Measure together, combine by the slowest, follow rank 0's plan."""
        world = self._collectives.world
        order = list(self._bucketing.ready_order)
        told = world.exchange("backward times", self._own_times(order))
        first = self._drift.first
        self._drift.planned()
        self._forget_times()
        if all(row is None for row in told):  # nobody had a batch of its own
            return
        # Who had none keeps nobody waiting.
        told = [[0.0] * (len(order) + 1) if row is None else row for row in told]
        outside = [row.pop() if isinstance(row, list) and row else None for row in told]
        ready = tuple(combine(told, len(order), world.rank))
        rest_s = _slowest(outside, world.rank)
        if first or self.probe is None:
            found = self._measured(order, ready, rest_s)
        else:
            found = replace(self.probe, ready_s=ready, rest_s=rest_s)
        self._follow(found)
        if world.rank == 0 and self._rule.file and not self._drift.watching:
            self._keep(found)

    def _forget_times(self) -> None:
        self._times = BackwardTimes(len(self._bucketing.slots), self._device)
        self._ends.clear()

    def _own_times(self, order: Sequence[int]) -> list[float] | None:
        """Return ready times, then what an iteration takes outside of backward and exchange."""
        if not self._times.totals() or not self._ends:
            return None
        rest = max(0.0, self._drift.median() - statistics.median(self._ends))
        return [*self._times.medians(order), rest]

    def _measured(self, order: Sequence[int], ready: tuple[float, ...], rest_s: float) -> Probe:
        world = self._collectives.world
        specs = self._bucketing.specs
        if world.rank == 0:
            log.info("measuring codec and links, to merge layers by what they cost")
        samples = measure_wire(
            self._collectives,
            self._wire,
            self._way(),
            sum(spec.numel for spec in specs),
            device=self._device,
            dtype=_prevalent_dtype(self._bucketing.slots),
        )
        encode, exchange = fitted(samples, self._wire)
        links = measure_links(self._collectives, topology=self._choices.topology)
        return Probe(
            workers=world.size,
            links=tuple(link.name for link in world.links),
            wire=wire_text(self._wire),
            way=self._way(),
            tensors=tuple(order),
            names=tuple(specs[i].name for i in order),
            ready_s=ready,
            encode=encode,
            exchange=exchange,
            interfaces=fitted_links(links),
            rest_s=rest_s,
        )

    def _follow(self, found: Probe) -> None:
        """Take over rank 0's plan: equal arithmetic on all machines is not relied on."""
        world = self._collectives.world
        workload = self._workload(found)
        mine: Any = None
        if world.rank == 0:
            try:
                made = RULES[self._rule.rule](workload, found.costs())
                mine = [list(bucket.tensors) for bucket in made.buckets]
            except Exception as err:
                mine = f"rank 0 could not merge layers: {type(err).__name__}: {err}"
        answer = world.exchange("merged layers", mine)[0]
        if isinstance(answer, str):
            raise PeerError(f"rank {world.rank}: {answer}")
        plan_of_all = _checked(answer, found.tensors, world.rank)
        self.probe = found
        self.timeline = merge.predict(plan_of_all, workload, found.costs())
        self._bucketing.follow(plan_of_all)
        if world.rank == 0:
            log.info(
                "%d gradients merged into %d: %.4g ms an iteration expected, %.3g ms of exchange "
                "exposed",
                len(found.tensors),
                len(plan_of_all.buckets),
                1e3 * (found.rest_s + self.timeline.finish_s),
                1e3 * self.timeline.exposed_s,
            )

    # -- the file -------------------------------------------------------------------------

    def _keep(self, found: Probe) -> None:
        try:
            saved.save(self._rule.file, found, self._key())
            log.info("what was measured is kept in %s", self._rule.file)
        except UsageError as err:  # a full disk, say: no reason to end the training
            log.warning("%s; this run goes on with what it has measured", err)

    def _take_known(self) -> None:
        """Follow what the file on rank 0 says, if it is there and for this model and cluster.

        Raises:
            UsageError: rank 0 cannot use the file; on every rank.
        """
        if self._known:
            return
        self._known = True
        world = self._collectives.world
        mine = self._read() if world.rank == 0 else None
        answer = world.exchange("plan file", mine)[0]
        if isinstance(answer, str):
            raise UsageError(answer)
        if answer is None:
            return
        try:
            self.decide(saved.from_json(answer))
        except UsageError as err:
            raise PeerError(f"rank {world.rank}: rank 0 sent a damaged plan: {err}") from None

    def _read(self) -> dict[str, Any] | str | None:
        """Return what the file holds for this key as JSON, None if nothing, or what is wrong."""
        file = self._rule.file
        try:
            known = planfile.known(file, saved.load)
        except UsageError as err:
            return str(err)
        if known is None:
            return None
        if not planfile.same_key(known.key, self._key()):
            log.warning("plan file %s is for another model, cluster or wire: measuring anew", file)
            return None
        try:
            self._workload(known.probe)
        except UsageError as err:
            return f"plan_file={file!r}: {err}; {planfile.MEASURED.remedy}"
        return saved.to_json(known.probe)

    def _workload(self, found: Probe) -> Workload:
        """Return the backward pass that was measured, with what travels.

        Raises:
            UsageError: it is of another model, or another wire was measured.
        """
        if (found.wire, found.way) != (wire_text(self._wire), self._way()):
            raise UsageError(
                f"gradients travel as {wire_text(self._wire)} ({self._way()}), and what was "
                f"measured is {found.wire} ({found.way})"
            )
        specs = self._bucketing.specs
        return found.workload(specs, payload_bytes(specs, self._wire))

    def _way(self) -> str:
        """Return what of an exchange competes with backward: under DeAR its first half."""
        if self._halves:
            return "scatter"
        return "gather" if isinstance(self._wire, TopK) else "reduce"


def _prevalent_dtype(slots: Sequence[Slot]) -> torch.dtype:
    """Return the dtype of most elements: the one whose costs decide."""
    counts: Counter[torch.dtype] = Counter()
    for slot in slots:
        counts[slot.param.dtype] += slot.param.numel()
    return counts.most_common(1)[0][0]


def _slowest(values: Sequence[Any], rank: int) -> float:
    """Return the largest: who begins backward last keeps all exchanges waiting.

    Raises:
        PeerError: one is no time.
    """
    for peer, value in enumerate(values):
        if type(value) not in (int, float) or not 0 <= value < 1e9:
            raise PeerError(f"rank {rank}: rank {peer} sent {value!r} where a time was due")
    return float(max(values))


def _checked(answer: Any, tensors: Sequence[int], rank: int) -> Plan:
    """Return rank 0's plan.

    Raises:
        PeerError: it is none: its buckets, end to end, have to be all tensors in their order.
    """
    if isinstance(answer, list) and all(isinstance(b, list) and b for b in answer):
        flat = [index for bucket in answer for index in bucket]
        if flat == list(tensors) and all(type(index) is int for index in flat):
            return Plan(tuple(PlannedBucket(tuple(bucket)) for bucket in answer))
    raise PeerError(
        f"rank {rank}: rank 0 sent a malformed plan of merged layers: {str(answer)[:60]}"
    )
