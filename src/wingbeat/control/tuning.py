"""Bucket sizes tried out while training goes on (DeAR, section IV-B).

Rank 0 decides, and its decision travels to everyone in its row of numbers (`control`). So all
workers change plans before the same backward, and all end together. Afterwards iterations are
watched: when they drift, all begin anew before the same backward, from the size in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wingbeat.collectives import Collectives
from wingbeat.control.drift import Drift
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.log import log
from wingbeat.plans import planfile, saved
from wingbeat.plans.bounds import largest_kind, one_plan, within
from wingbeat.plans.result import Result, as_mb, nothing, setting
from wingbeat.plans.tuner import Tuner
from wingbeat.types import Choices, Fusion, Tuning

FIRST_WINDOWS = 2
"""Windows in a row that have to be off before sizes are tried anew; each further time twice as
many."""


class SizeTuning:
    """Lets a `Tuner` set the bucket size of a `Bucketing`, by what iterations take.

    A size that an earlier run has found, in the tuning's file on rank 0, is taken over at once.

    Attributes:
        done: whether a size was decided on; sizes may be tried anew, if iterations drift.
    """

    def __init__(
        self, tuning: Tuning, choices: Choices, bucketing: Bucketing, collectives: Collectives
    ) -> None:
        world = collectives.world
        self._bucketing = bucketing
        self._collectives = collectives
        self._file = tuning.file
        self._fusion = bucketing.fusion
        self._asked = tuning = replace(tuning, topologies=_possible(tuning, choices, collectives))
        self.topology = choices.topology if tuning.topologies else ""
        self._key = _key_of(bucketing, collectives, choices, tuning.topologies)
        self._seconds = 0.0
        known, along = self._known_setting(tuning) if tuning.file else (0, "")
        self.done = bool(known)
        self._windows = FIRST_WINDOWS
        self._drift = self._watch()
        self._considered = self._one_plan = False
        self._nothing: Result | None = None
        if known:
            self._use(known, along)
            if world.rank == 0:
                found = setting(known, along)
                log.info("buckets of %s, as plan file %s has it", found, tuning.file)
        self._tuner = self._new_tuner()

    @property
    def result(self) -> Result | None:
        """What was found, once tuning has ended; on rank 0 only."""
        return self._nothing or self._tuner.result

    @property
    def bucket_bytes(self) -> int:
        """The size in use."""
        return self._bucketing.fusion.bucket_bytes

    def active(self) -> bool:
        """Whether sizes are tried, or iterations watched for drift: to the end of training.

        Where all sizes make one plan there is nothing to watch for.
        """
        return not self._one_plan

    def decide(self, nbytes: int, topology: str = "") -> None:
        """End tuning with what is known already; on all workers alike, before training."""
        self.done = True
        self._use(nbytes, topology)

    def boundary(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Between two iterations: hear the last decision, and act on it.

        Raises:
            PeerError: rank 0 sent something that is no decision.
        """
        if self._ends_untried():
            return False
        if self.done:
            return self._watched(seconds, rows)
        self._seconds = seconds
        if rows is None:
            return False
        size = self._tuner.take(rows)
        changed = size is not None or self._tuner.topology != self.topology
        if changed:
            self._use(size, self._tuner.topology)
            self._seconds = 0.0
        if self._tuner.done:
            self.done = True
            self._drift = self._watch()
            self._keep()
        return changed

    def row(self) -> Sequence[float]:
        """Return what this worker has measured, and, on rank 0, what is decided.

        Once a size is decided on: the median of a window at its end, in seconds.
        """
        if self.done:
            return [self._drift.median()] if self._drift.reports() else []
        return self._tuner.report(self._seconds)

    # -- drift ----------------------------------------------------------------------------

    def _watch(self) -> Drift:
        """Return what watches iterations from now on: its first window says what is usual."""
        drift = Drift(0, self._asked.drift, self._windows)
        drift.planned(known=True)
        return drift

    def _watched(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Count an iteration under the size that was decided on; return whether tuning begins anew.

        All workers hear the same medians before the same backward, so all begin together.

        Raises:
            PeerError: a worker sent something that is no median.
        """
        drifted = None if rows is None else self._drift.take([row[0] for row in rows])
        self._drift.lap(seconds)
        if drifted is None:
            return False
        if self._collectives.world.rank == 0:
            log.info(
                "iterations take %.4g s in place of %.4g s: tuning buckets anew, from %s",
                drifted[1],
                drifted[0],
                setting(self.bucket_bytes, self.topology),
            )
        # Times that swing for ever would have sizes tried for ever: so the next time takes longer.
        self._windows *= 2
        self._tuner = self._new_tuner()
        self._seconds = 0.0
        self.done = False
        return True

    def _new_tuner(self) -> Tuner:
        """Return a tuner that starts with the size in use."""
        world, specs = self._collectives.world, self._bucketing.specs
        # What a larger size makes is the plan of the size that holds the whole model.
        start = min(self.bucket_bytes, largest_kind(specs))
        rule = within(self._asked, specs)
        return Tuner(rule, start, world.rank, world.size, self.topology)

    def _use(self, nbytes: int | None, topology: str) -> None:
        """Have buckets of this size, None for the present one, and exchange them along this."""
        if nbytes is not None:
            self._bucketing.use(self._resized(nbytes))
        if topology != self.topology:
            self.topology = topology
            self._collectives.use(topology)

    # -- what was found -------------------------------------------------------------------

    def _ends_untried(self) -> bool:
        """Once the order of the gradients is known, end tuning if all sizes make one plan.

        All workers know the same tensors and the same order, and come here before the same
        backward: so all find the same.
        """
        if self._considered or self._bucketing.learning:
            return False
        self._considered = True
        specs, asked = self._bucketing.specs, self._asked
        rule = within(asked, specs)
        plan = None
        if len(asked.topologies) < 2:
            plan = one_plan(self._fusion, rule, specs, self._bucketing.ready_order)
        known, self._one_plan = self.done, plan is not None
        self.done = known or self._one_plan
        if self._collectives.world.rank == 0 and not known:
            if plan is not None:
                self._nothing = nothing(asked, self._fusion.bucket_bytes, len(plan.buckets))
                log.info("%s", self._nothing.explain())
                self._keep()
            elif rule.high_bytes < asked.high_bytes:
                low, high = as_mb(rule.low_bytes), as_mb(rule.high_bytes)
                log.info("%s MB hold the whole model: tuning from %s to %s MB", high, low, high)
        return self._one_plan

    def _resized(self, nbytes: int) -> Fusion:
        return replace(self._fusion, bucket_bytes=nbytes)

    def _keep(self) -> None:
        result = self.result
        if result is None or not self._file:
            return
        try:
            saved.save(self._file, result, self._key)
            log.info("plan kept in %s", self._file)
        except UsageError as err:  # a full disk, say: no reason to end the training
            log.warning("%s; this run goes on with the plan it has found", err)

    def _known_setting(self, tuning: Tuning) -> tuple[int, str]:
        """Return size and topology in rank 0's file, 0 if it has none for this model and cluster.

        Raises:
            UsageError: rank 0 cannot use the file; on every rank.
        """
        world = self._collectives.world
        mine = _read(tuning, self._fusion.bucket_bytes, self._key) if world.rank == 0 else None
        answer = world.exchange("plan file", mine)[0]
        if isinstance(answer, str):
            raise UsageError(answer)
        if not isinstance(answer, list) or [type(each) for each in answer] != [int, str]:
            raise PeerError(f"rank {world.rank}: rank 0 sent a malformed bucket size: {answer!r}")
        size, topology = answer
        if size < 0 or (topology or self.topology) not in (*tuning.topologies, self.topology):
            raise PeerError(f"rank {world.rank}: rank 0 sent a malformed bucket size: {answer!r}")
        return size, topology or self.topology


def _possible(tuning: Tuning, choices: Choices, collectives: Collectives) -> tuple[str, ...]:
    """Return the topologies that can be tried; none where only the strategy's own can be."""
    if not tuning.topologies:
        return ()
    names = dict.fromkeys((choices.topology, *tuning.topologies))
    found = tuple(name for name in names if collectives.fits(name))
    why = ""
    if choices.servers is not None or choices.partitions is not None:
        why = "gradients do not go through collectives of all"
    elif choices.wire and not isinstance(choices.wire, str):
        why = "a codec goes along its own"
    elif len(found) < 2 or collectives.world.size < 3:
        why = f"{collectives.world.size} workers on these links have one"
    if not why:
        return found
    if collectives.world.rank == 0:
        log.info("topologies are not tuned: %s", why)
    return ()


def _read(tuning: Tuning, start: int, key: dict[str, Any]) -> list[int | str] | str:
    """Return the size and topology that the file holds, 0 if none, or what is wrong with it."""
    try:
        known = planfile.known(tuning.file, saved.load)
    except UsageError as err:
        return str(err)
    if known is None:
        return [0, ""]
    size = known.chosen_bytes
    if not planfile.same_key(known.key, key):
        log.warning(
            "plan file %s is for another model, cluster or strategy: tuning anew", tuning.file
        )
        return [0, ""]
    if not (tuning.low_bytes <= size <= tuning.high_bytes or size == start):
        log.warning("plan file %s has %s MB, out of range: tuning anew", tuning.file, as_mb(size))
        return [0, ""]
    return [size, known.chosen_topology]


def _key_of(
    bucketing: Bucketing,
    collectives: Collectives,
    choices: Choices,
    topologies: Sequence[str] = (),
) -> dict[str, Any]:
    """Tell apart what a plan was tuned for: the model's parameters, the cluster, the strategy."""
    shapes = [[spec.name, list(spec.shape), spec.dtype] for spec in bucketing.specs]
    return {
        **({"server_updates": True} if choices.server_updates else {}),
        **({} if choices.partitions is None else {"partitions": choices.partitions}),
        **({"topologies": list(topologies)} if topologies else {}),
        "parameters": planfile.digest(shapes),
        "workers": collectives.world.size,
        "links": len(collectives.world.links),
        "schedule": choices.schedule,
        "topology": choices.topology,
        "wire": str(choices.wire) if choices.wire else "as computed",
        "shard_optimizer": choices.shard_optimizer,
    }
