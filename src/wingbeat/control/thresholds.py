"""Thresholds between the classes of flows, tried out while training goes on (Geryon, III-C).

Rank 0 decides, and its decision travels to everyone in its row of numbers (`control`), as with
bucket sizes. Training does not start again: a threshold only says what goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.log import log
from wingbeat.plans import planfile
from wingbeat.plans.thresholds import saved
from wingbeat.plans.thresholds.result import Result, nothing, written
from wingbeat.plans.thresholds.tuner import ThresholdTuner
from wingbeat.servers.tables import places_of
from wingbeat.settings import is_number
from wingbeat.types import Choices, Serving


@runtime_checkable
class Prioritised(Protocol):
    """An exchange with traffic classes; not all exchanges have any."""

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Divide the classes by other thresholds from now on."""


class ThresholdTuning:
    """Lets a `ThresholdTuner` set the thresholds of an exchange, by what iterations take.

    Thresholds that an earlier run has found, in the tuning's file on rank 0, are taken over at
    once. The tuner begins when the workers have agreed on the order of buckets.
    """

    def __init__(
        self,
        choices: Choices,
        bucketing: Bucketing,
        collectives: Collectives,
        exchange: Prioritised,
    ) -> None:
        assert choices.servers is not None
        assert choices.servers.tuning is not None
        self._bucketing, self._collectives, self._exchange = bucketing, collectives, exchange
        self._tuning = choices.servers.tuning
        self._key = _key_of(bucketing, collectives, choices, choices.servers)
        self._tuner: ThresholdTuner | None = None
        self._nothing: Result | None = None
        self._seconds = 0.0
        self.done = False
        self.thresholds = choices.servers.thresholds
        known = self._known_thresholds() if self._tuning.file else ()
        if known:
            self.decide(known)
            if collectives.world.rank == 0:
                file = self._tuning.file
                log.info("thresholds %s, as plan file %s has them", written(known), file)

    @property
    def result(self) -> Result | None:
        """What was found, once tuning has ended; on rank 0 only."""
        return self._nothing if self._tuner is None else self._tuner.result

    def active(self) -> bool:
        """Whether thresholds are still being tried."""
        return not self.done

    def decide(self, thresholds: Sequence[float]) -> None:
        """End tuning with thresholds that are known already; on all workers, before training."""
        self.done = True
        self._use(thresholds)

    def boundary(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Between two iterations: hear the last decision, and act on it.

        Raises:
            PeerError: rank 0 sent something that is no decision.
        """
        self._seconds = seconds
        if self._tuner is None:
            self._begin()
        if self._tuner is None or rows is None:
            return False
        thresholds = self._tuner.take(rows)
        if thresholds is not None:
            self._use(thresholds)
            self._seconds = 0.0
        if self._tuner.done:
            self.done = True
            self._keep()
        return thresholds is not None

    def row(self) -> Sequence[float]:
        """Return what this worker has measured, and, on rank 0, what is decided."""
        return self._tuner.report(self._seconds) if self._tuner is not None else ()

    def _begin(self) -> None:
        """Begin with the buckets in force, once no others are about to be made.

        All workers come here before the same backward, and know the same.
        """
        if self._bucketing.learning or self._bucketing.stale:
            return
        world, buckets = self._collectives.world, self._bucketing.buckets
        layers = places_of([bucket.names for bucket in buckets]).layers if len(buckets) > 1 else 1
        if layers > 1:
            steps = self._tuning.steps
            self._tuner = ThresholdTuner(layers, self.thresholds, steps, world.rank, world.size)
            return
        self.done = True
        if world.rank == 0:
            self._nothing = nothing(layers, len(self.thresholds) + 1)
            log.info("%s", self._nothing.explain())
            self._keep()

    def _use(self, thresholds: Sequence[float]) -> None:
        self.thresholds = tuple(thresholds)
        self._exchange.prioritise(self.thresholds)

    def _keep(self) -> None:
        if self.result is None or not self._tuning.file:
            return
        try:
            saved.save(self._tuning.file, self.result, self._key)
            log.info("thresholds kept in %s", self._tuning.file)
        except UsageError as err:  # a full disk, say: no reason to end the training
            log.warning("%s; this run goes on with the thresholds it has found", err)

    def _known_thresholds(self) -> tuple[float, ...]:
        """Return those in rank 0's file, none if it has none for this model and cluster.

        Raises:
            UsageError: rank 0 cannot use the file; on every rank.
            PeerError: what rank 0 sent is no thresholds.
        """
        world = self._collectives.world
        classes = len(self.thresholds) + 1
        mine = _read(self._tuning.file, self._key, classes) if world.rank == 0 else None
        answer = world.exchange("thresholds file", mine)[0]
        if isinstance(answer, str):
            raise UsageError(answer)
        levels = answer if isinstance(answer, list) else [None]
        right = all(is_number(level) and 0 <= level <= 1 for level in levels)
        falling = right and levels == sorted(set(levels), reverse=True)
        if not falling or len(levels) not in (0, len(self.thresholds)):
            raise PeerError(f"rank {world.rank}: rank 0 sent malformed thresholds: {answer!r}")
        return tuple(map(float, levels))


def _read(file: str, key: dict[str, Any], classes: int) -> list[float] | str:
    """Return the thresholds that the file holds, none if none, or what is wrong with it."""
    try:
        known = planfile.known(file, saved.load)
    except UsageError as err:
        return str(err)
    if known is None:
        return []
    if not planfile.same_key(known.key, key) or known.result.classes != classes:
        log.warning("plan file %s is for another model, cluster or strategy: tuning anew", file)
        return []
    return list(known.result.thresholds)


def _key_of(
    bucketing: Bucketing, collectives: Collectives, choices: Choices, serving: Serving
) -> dict[str, Any]:
    """Tell apart what thresholds were tuned for: the model, the cluster, the strategy."""
    shapes = [[spec.name, list(spec.shape), spec.dtype] for spec in bucketing.specs]
    fusion = choices.fusion
    return {
        **({"server_updates": True} if choices.server_updates else {}),
        "parameters": planfile.digest(shapes),
        "workers": collectives.world.size,
        "links": len(collectives.world.links),
        "schedule": choices.schedule,
        "wire": str(choices.wire) if choices.wire else "as computed",
        "back": "dense" if serving.dense else "wire",
        "encrypted": serving.encrypted,
        "servers": serving.count,
        "classes": serving.classes,
        "order": serving.order,
        "slice": serving.slice,
        "placement": "whole" if serving.whole else "sharded",
        "pushes": serving.pushes,
        "buckets": f"{fusion.kind} {fusion.bucket_bytes}",
        "urgency": "by layer",
    }
