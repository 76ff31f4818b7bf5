"""What merged layers are planned from, and the plans: the same on all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.control.rules import Candidate, candidates
from wingbeat.costs import Workload
from wingbeat.costs.fit import Fit, best_fit
from wingbeat.engine.gradients.bucket import Slot
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.log import log
from wingbeat.plans import merge
from wingbeat.plans.merge.runs import plan_of, stops_of
from wingbeat.probe.exchange import SPREAD, measure_wire
from wingbeat.probe.links import measure_links
from wingbeat.probe.matrices import measure_matrices
from wingbeat.probe.model import (
    Probe,
    fitted,
    fitted_cpu,
    fitted_links,
    key_of,
    payload_bytes,
    wire_text,
)
from wingbeat.types import Choices, Plan, PlannedBucket
from wingbeat.wires import Coded, TopK


class Planner:
    """Measures codec and links with all workers, and has rank 0 plan for all."""

    def __init__(
        self,
        choices: Choices,
        bucketing: Bucketing,
        compression: Compression,
        collectives: Collectives,
    ) -> None:
        self._choices = choices
        self._bucketing = bucketing
        self._compression = compression
        self._collectives = collectives

    @property
    def wire(self) -> str | Coded:
        """What gradients travel as: fp32 where a codec was tried and is not faster."""
        return self._choices.wire if self._compression.on or not self._compression.coded else ""

    @property
    def way(self) -> str:
        """What of an exchange competes with backward: under DeAR its first half.

        The other competes with the next forward, and is measured for itself.
        """
        if self._choices.schedule == "dear":
            return "scatter"
        return "gather" if isinstance(self.wire, TopK) else "reduce"

    def key(self) -> dict[str, Any]:
        """Return what tells this model on this cluster from others."""
        world = self._collectives.world
        links = [link.name for link in world.links]
        key = key_of(self._bucketing.specs, world.size, links, self.wire, self.way)
        # Files of earlier versions have the first half of two alone.
        return key | ({"halves": "both"} if self.way == "scatter" else {})

    def workload(self, found: Probe) -> Workload:
        """Return the backward pass that was measured, with what travels.

        Raises:
            UsageError: it is of another model, or another wire was measured.
        """
        if (found.wire, found.way) != (wire_text(self.wire), self.way):
            raise UsageError(
                f"gradients travel as {wire_text(self.wire)} ({self.way}), and what was "
                f"measured is {found.wire} ({found.way})"
            )
        specs = self._bucketing.specs
        return found.workload(specs, payload_bytes(specs, self.wire))

    def check(self, found: Probe) -> None:
        """Raise a `UsageError` unless this model can be planned for by it."""
        workload = self.workload(found)
        for each in found.tried:
            stops_of(plan_of(workload, each.stops), workload)

    def measured(self, order: Sequence[int], ready: tuple[float, ...], rest_s: float) -> Probe:
        """Measure codec and links, together with all workers; nothing else may be under way.

        Args:
            order: the tensors, first ready first.
            ready: when each gradient is ready.
            rest_s: what an iteration takes besides.

        Raises:
            PeerError: a worker failed, or sent something that is no measurement.
        """
        world, specs = self._collectives.world, self._bucketing.specs
        if world.rank == 0:
            log.info("measuring codec and links, to merge layers by what they cost")
        samples = measure_wire(
            self._collectives,
            self.wire,
            self.way,
            sum(spec.numel for spec in specs),
            device=self._bucketing.device,
            dtype=_prevalent_dtype(self._bucketing.slots),
        )
        encode, exchange = fitted(samples, self.wire)
        gather = self._measured_gather() if self.way == "scatter" else None
        matrices = measure_matrices(
            self._collectives,
            self.wire,
            self.way,
            specs,
            device=self._bucketing.device,
            dtype=_prevalent_dtype(self._bucketing.slots),
        )
        links = measure_links(self._collectives, topology=self._choices.topology)
        return Probe(
            workers=world.size,
            links=tuple(link.name for link in world.links),
            wire=wire_text(self.wire),
            way=self.way,
            tensors=tuple(order),
            names=tuple(specs[i].name for i in order),
            ready_s=ready,
            encode=encode,
            exchange=exchange,
            interfaces=fitted_links(links),
            rest_s=rest_s,
            cpu=fitted_cpu(samples),
            gather=gather,
            matrices=matrices,
        )

    def _measured_gather(self) -> Fit | None:
        """Measure the half of an all-reduce that the next forward hides; None if there is none.

        A divided optimizer's all-gathers carry parameters, as they are. Factors are summed whole.
        """
        wire = "" if self._choices.shard_optimizer else self.wire
        if not isinstance(wire, str) and wire.summed:
            return None
        specs = self._bucketing.specs
        total = sum(spec.numel for spec in specs)
        samples = measure_wire(
            self._collectives,
            wire,
            SPREAD,
            total,
            device=self._bucketing.device,
            dtype=_prevalent_dtype(self._bucketing.slots),
        )
        if not self._choices.shard_optimizer:
            return fitted(samples, wire)[1]
        # Buckets are known by the bytes of their gradients.
        each = sum(payload_bytes(specs, self.wire)) / total
        pairs = zip(samples.encode, samples.exchange, strict=True)
        return best_fit([(elements * each, seconds) for (elements, _), (_, seconds) in pairs])

    def feed_s(self, found: Probe, plan: Plan) -> float:
        """Return what the next forward takes with its all-gathers; 0 where exchanges are whole."""
        return merge.feed_s(plan, self.workload(found), found.costs())

    def candidates(self, rule: str, found: Probe) -> list[Candidate]:
        """Return rank 0's plans by a rule, or by all that are tried: at least one.

        Equal arithmetic on all machines is not relied on.

        Raises:
            PeerError: a worker failed, or rank 0's plans have no meaning.
        """
        world = self._collectives.world
        mine: Any = None
        if world.rank == 0:
            try:
                made = candidates(rule, self.workload(found), found.costs())
                mine = [
                    [list(each.rules), [list(bucket.tensors) for bucket in each.plan.buckets]]
                    for each in made
                ]
            except Exception as err:
                mine = f"rank 0 could not merge layers: {type(err).__name__}: {err}"
        answer = world.exchange("merged layers", mine)[0]
        if isinstance(answer, str):
            raise PeerError(f"rank {world.rank}: {answer}")
        return checked(answer, found.tensors, world.rank)


def checked(answer: Any, tensors: Sequence[int], rank: int) -> list[Candidate]:
    """Return rank 0's plans.

    Raises:
        PeerError: one is none: its buckets, end to end, have to be all tensors in their order.
    """
    if isinstance(answer, list) and answer and all(_right(each, tensors) for each in answer):
        return [
            Candidate(tuple(rules), Plan(tuple(PlannedBucket(tuple(b)) for b in buckets)))
            for rules, buckets in answer
        ]
    raise PeerError(
        f"rank {rank}: rank 0 sent a malformed plan of merged layers: {str(answer)[:60]}"
    )


def _right(sent: Any, tensors: Sequence[int]) -> bool:
    if not isinstance(sent, list) or len(sent) != 2:
        return False
    rules, buckets = sent
    if not isinstance(rules, list) or not all(isinstance(name, str) for name in rules):
        return False
    if not isinstance(buckets, list) or not all(isinstance(b, list) and b for b in buckets):
        return False
    flat = [index for bucket in buckets for index in bucket]
    return flat == list(tensors) and all(type(index) is int for index in flat)


def _prevalent_dtype(slots: Sequence[Slot]) -> torch.dtype:
    """Return the dtype of most elements: the one whose costs decide."""
    counts: Counter[torch.dtype] = Counter()
    for slot in slots:
        counts[slot.param.dtype.to_real()] += slot.elements
    return counts.most_common(1)[0][0]
