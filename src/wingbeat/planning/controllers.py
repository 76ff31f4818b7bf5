"""Controllers of compression, bucket size and thresholds: trials applied to the engine.

Results of an earlier run, in the plan file of rank 0, are used at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.log import log
from wingbeat.parts.strategy import Strategy
from wingbeat.planning import bucket_size, files, thresholds
from wingbeat.planning.bucket_size import (
    BucketSizeResult,
    bucket_size_trial,
    format_mb,
    format_setting,
)
from wingbeat.planning.drift import DriftDetector
from wingbeat.planning.search_space import Setting, clip_range, largest_bucket, single_plan
from wingbeat.planning.thresholds import (
    Cuts,
    ThresholdResult,
    format_thresholds,
    threshold_trial,
    thresholds_from_cuts,
)
from wingbeat.planning.trials import LedTrial, Rows, compression_trial
from wingbeat.settings import is_number
from wingbeat.transport.world import World
from wingbeat.types import Tuning

FIRST_WINDOWS = 2
"""Consecutive windows with drift before sizes are tuned again; doubled each time."""

R = TypeVar("R", bound=files.Record)


def known_choice(
    world: World,
    file: str,
    record: type[R],
    key: Mapping[str, Any],
    choose: Callable[[R], Any],
) -> Any:
    """Return a choice from the plan file of rank 0, not validated; the same on all workers.

    Raises:
        UsageError: rank 0 cannot use the file; on every rank.
    """
    answer = None
    if world.rank == 0:
        try:
            known = files.load_if_present(file, record)
            if known is not None and known.matches(key):
                answer = choose(known.record)
            elif known is not None:
                log.warning(
                    "plan file %s is for another model, cluster or strategy: planning anew", file
                )
        except UsageError as err:
            answer = str(err)
    answer = world.exchange("plan file", answer)[0]
    if isinstance(answer, str):
        raise UsageError(answer)
    return answer


def keep(file: str, record: files.Record, key: Mapping[str, Any]) -> None:
    """Write the plan file; training continues if that fails, for example on a full disk."""
    try:
        files.save(file, record, key)
        log.info("%s kept in plan file %s", record.kind, file)
    except UsageError as err:
        log.warning("%s; this run continues with the plan that it has found", err)


class CompressionController:
    """Disables compression unless it makes iterations shorter; ``coded`` while it is enabled."""

    def __init__(self, compression: Compression, rank: int, size: int) -> None:
        self._compression = compression
        self._trial = compression_trial(rank, size)
        self._seconds = 0.0
        self._decided = False
        self.coded = self._trial.candidate

    def active(self) -> bool:
        """Return whether the trial is running."""
        return not self._decided

    def decide(self, coded: bool) -> None:
        """End the trial with a known decision; on every worker, before training."""
        self.coded = self._compression.on = coded
        self._decided = True

    def boundary(self, seconds: float, rows: Rows | None) -> bool:
        """Process the measurements of all workers."""
        self._seconds = seconds
        if rows is None or not self._trial.take(rows):
            return False
        self._seconds = 0.0
        self.coded = self._compression.on = self._trial.candidate
        if self._trial.result is not None:
            self._decided = True
            log.info(
                "compression %s: %.4g s an iteration with it, %.4g s with fp32: %s",
                self._compression.coded,
                self._trial.result.compressed_s,
                self._trial.result.uncompressed_s,
                "it stays on" if self.coded else "it is not faster here and is switched off",
            )
        return True

    def row(self) -> list[float]:
        """Return the time of the last iteration and the block of the trial."""
        return self._trial.report(self._seconds)


class BucketSizeController:
    """Sets the bucket size of a `Bucketing` by a trial (DeAR, section IV-B).

    After the trial, drift starts the tuning again from the size in use, on all workers before the
    same backward. ``topology`` is empty where topologies are not tuned.
    """

    def __init__(
        self, tuning: Tuning, strategy: Strategy, bucketing: Bucketing, collectives: Collectives
    ) -> None:
        self._bucketing = bucketing
        self._collectives = collectives
        self._file = tuning.file
        self._fusion = bucketing.fusion
        topologies = _possible_topologies(tuning, strategy, collectives)
        self._tuning = replace(tuning, topologies=topologies)
        self.topology = strategy.topology if topologies else ""
        self._key = bucket_size_key(bucketing, collectives, strategy, topologies)
        self._seconds = 0.0
        known = self._known_setting() if tuning.file else None
        self.done = known is not None
        self._windows = FIRST_WINDOWS
        self._drift = self._new_detector()
        self._order_known = self._single_plan = False
        self._untuned: BucketSizeResult | None = None
        if known is not None:
            self._use(known)
            if collectives.world.rank == 0:
                log.info("buckets of %s, from plan file %s", format_setting(*known), tuning.file)
        self._trial = self._new_trial()

    @property
    def result(self) -> BucketSizeResult | None:
        """The result, once tuning has ended; on rank 0 only."""
        return self._untuned or self._trial.result

    @property
    def bucket_bytes(self) -> int:
        """The size in use."""
        return self._bucketing.fusion.bucket_bytes

    def active(self) -> bool:
        """Return whether the size can change: to the end of training, unless it has no effect."""
        return not self._single_plan

    def decide(self, nbytes: int, topology: str = "") -> None:
        """End the tuning with a known size; on all workers, before training."""
        self.done = True
        self._use((nbytes, topology))

    def boundary(self, seconds: float, rows: Rows | None) -> bool:
        """Process the rows of all workers, and apply the last decision."""
        if self._has_single_plan():
            return False
        if self.done:
            return self._watch_drift(seconds, rows)
        self._seconds = seconds
        if rows is None:
            return False
        setting = self._trial.take(rows)
        if setting is not None:
            self._use(setting)
            self._seconds = 0.0
        if self._trial.done:
            self.done = True
            self._drift = self._new_detector()
            self._keep()
        return setting is not None

    def row(self) -> Sequence[float]:
        """Return the row of the trial; after it, the median of a window at its end, in seconds."""
        if self.done:
            return [self._drift.median()] if self._drift.window_ended() else []
        return self._trial.report(self._seconds)

    def _new_detector(self) -> DriftDetector:
        """Return a detector whose first window is the reference."""
        drift = DriftDetector(0, self._tuning.drift, self._windows)
        drift.planned(known=True)
        return drift

    def _watch_drift(self, seconds: float, rows: Rows | None) -> bool:
        """Count an iteration under the chosen size; return whether tuning begins again."""
        drifted = None if rows is None else self._drift.compare([row[0] for row in rows])
        self._drift.count(seconds)
        if drifted is None:
            return False
        if self._collectives.world.rank == 0:
            log.info(
                "iterations take %.4g s in place of %.4g s: tuning buckets anew, from %s",
                drifted[1],
                drifted[0],
                format_setting(self.bucket_bytes, self.topology),
            )
        # Doubling keeps periodic changes from restarting the tuning for ever.
        self._windows *= 2
        self._trial = self._new_trial()
        self._seconds = 0.0
        self.done = False
        return True

    def _new_trial(self) -> LedTrial[Setting, BucketSizeResult]:
        world, specs = self._collectives.world, self._bucketing.specs
        # Larger sizes make the same plan as the one that holds the whole model.
        start = min(self.bucket_bytes, largest_bucket(specs))
        space = clip_range(self._tuning, specs)
        return bucket_size_trial(space, start, world.rank, world.size, self.topology)

    def _use(self, setting: Setting) -> None:
        nbytes, topology = setting
        self._bucketing.use(replace(self._fusion, bucket_bytes=nbytes))
        if topology != self.topology:
            self.topology = topology
            self._collectives.use(topology)

    def _has_single_plan(self) -> bool:
        """End the tuning, on all workers at once, if all sizes make the same plan."""
        if self._order_known or self._bucketing.learning:
            return False
        self._order_known = True
        specs, tuning = self._bucketing.specs, self._tuning
        space = clip_range(tuning, specs)
        plan = None
        if len(tuning.topologies) < 2:
            plan = single_plan(self._fusion, space, specs, self._bucketing.ready_order)
        known, self._single_plan = self.done, plan is not None
        self.done = known or self._single_plan
        if self._collectives.world.rank == 0 and not known:
            if plan is not None:
                nbytes = self._fusion.bucket_bytes
                self._untuned = bucket_size.untuned(tuning, nbytes, len(plan.buckets))
                log.info("%s", self._untuned.explain())
                self._keep()
            elif space.high_bytes < tuning.high_bytes:
                low, high = format_mb(space.low_bytes), format_mb(space.high_bytes)
                log.info("%s MB hold the whole model: tuning from %s to %s MB", high, low, high)
        return self._single_plan

    def _keep(self) -> None:
        if self.result is not None and self._file:
            keep(self._file, self.result, self._key)

    def _known_setting(self) -> Setting | None:
        world, tuning = self._collectives.world, self._tuning
        start = self._fusion.bucket_bytes

        def choose(result: BucketSizeResult) -> list[int | str] | None:
            size = result.chosen_bytes
            if not (tuning.low_bytes <= size <= tuning.high_bytes or size == start):
                mb = format_mb(size)
                log.warning("plan file %s has %s MB, out of range: planning anew", tuning.file, mb)
                return None
            return [size, result.chosen_topology]

        answer = known_choice(world, tuning.file, BucketSizeResult, self._key, choose)
        if answer is None:
            return None
        if isinstance(answer, list) and [type(each) for each in answer] == [int, str]:
            size, topology = answer[0], answer[1] or self.topology
            if size > 0 and topology in (*tuning.topologies, self.topology):
                return size, topology
        raise PeerError(f"rank {world.rank}: rank 0 sent a malformed bucket size: {answer!r}")


def _possible_topologies(
    tuning: Tuning, strategy: Strategy, collectives: Collectives
) -> tuple[str, ...]:
    """Return the topologies that can be tuned; empty if the strategy's own is the only one."""
    if not tuning.topologies:
        return ()
    names = dict.fromkeys((strategy.topology, *tuning.topologies))
    found = tuple(name for name in names if collectives.fits(name))
    why = ""
    if not strategy.exchange.collective:
        why = "gradients do not go through collectives of all"
    elif strategy.codec is not None:
        why = "a codec goes along its own"
    elif len(found) < 2 or collectives.world.size < 3:
        why = f"{collectives.world.size} workers on these links have one"
    if not why:
        return found
    if collectives.world.rank == 0:
        log.info("topologies are not tuned: %s", why)
    return ()


@runtime_checkable
class Prioritized(Protocol):
    """An exchange with priority classes."""

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds between the classes."""


class TunedThresholds(Protocol):
    """The options of an exchange part with `ExchangePart.tuned`, such as `wingbeat.parts.Servers`.

    Attributes:
        levels: the initial thresholds.
        steps: iterations for which each is tried.
        file: file in which rank 0 stores the result; empty: none.
    """

    levels: tuple[float, ...]
    steps: int
    file: str


class ThresholdController:
    """Sets the thresholds between the priority classes of an exchange by a trial (Geryon, III-C).

    The trial begins when the workers have agreed on the order of buckets. A threshold only affects
    priorities, so training continues.
    """

    def __init__(
        self,
        strategy: Strategy,
        bucketing: Bucketing,
        collectives: Collectives,
        exchange: Prioritized,
    ) -> None:
        self._bucketing, self._collectives, self._exchange = bucketing, collectives, exchange
        self._tuning = tuning = cast(TunedThresholds, strategy.exchange)
        self._key = threshold_key(bucketing, collectives, strategy)
        self._trial: LedTrial[Cuts, ThresholdResult] | None = None
        self._untuned: ThresholdResult | None = None
        self._layers = 1
        self._seconds = 0.0
        self.done = False
        self.thresholds = tuning.levels
        known = self._known_thresholds() if tuning.file else None
        if known is not None:
            self.decide(known)
            if collectives.world.rank == 0:
                text = format_thresholds(known)
                log.info("thresholds %s, from plan file %s", text, tuning.file)

    @property
    def result(self) -> ThresholdResult | None:
        """The result, once tuning has ended; on rank 0 only."""
        return self._untuned if self._trial is None else self._trial.result

    def active(self) -> bool:
        """Return whether thresholds are being tuned."""
        return not self.done

    def decide(self, thresholds: Sequence[float]) -> None:
        """End the tuning with known thresholds; on all workers, before training."""
        self.done = True
        self._use(thresholds)

    def boundary(self, seconds: float, rows: Rows | None) -> bool:
        """Process the rows of all workers, and apply the last decision."""
        self._seconds = seconds
        if self._trial is None:
            self._begin()
        if self._trial is None or rows is None:
            return False
        cuts = self._trial.take(rows)
        if cuts is not None:
            self._use(thresholds_from_cuts(cuts, self._layers, len(self.thresholds) + 1))
            self._seconds = 0.0
        if self._trial.done:
            self.done = True
            self._keep()
        return cuts is not None

    def row(self) -> Sequence[float]:
        """Return the row of the trial."""
        return self._trial.report(self._seconds) if self._trial is not None else ()

    def _begin(self) -> None:
        """Start the trial once the buckets are final; on all workers before the same backward."""
        if self._bucketing.learning or self._bucketing.stale:
            return
        world, buckets = self._collectives.world, self._bucketing.buckets
        names = {name.rpartition(".")[0] for bucket in buckets for name in bucket.names}
        self._layers = layers = len(names) if len(buckets) > 1 else 1
        if layers > 1:
            steps = self._tuning.steps
            self._trial = threshold_trial(layers, self.thresholds, steps, world.rank, world.size)
            return
        self.done = True
        if world.rank == 0:
            self._untuned = thresholds.untuned(layers, len(self.thresholds) + 1)
            log.info("%s", self._untuned.explain())
            self._keep()

    def _use(self, values: Sequence[float]) -> None:
        self.thresholds = tuple(values)
        self._exchange.prioritise(self.thresholds)

    def _keep(self) -> None:
        if self.result is not None and self._tuning.file:
            keep(self._tuning.file, self.result, self._key)

    def _known_thresholds(self) -> tuple[float, ...] | None:
        world, file = self._collectives.world, self._tuning.file
        count = len(self.thresholds)
        answer = known_choice(
            world, file, ThresholdResult, self._key, lambda result: list(result.thresholds)
        )
        if answer is None:
            return None
        levels = answer if isinstance(answer, list) else [None]
        valid = all(is_number(level) and 0 <= level <= 1 for level in levels)
        falling = valid and levels == sorted(set(levels), reverse=True)
        if not falling or len(levels) != count:
            raise PeerError(f"rank {world.rank}: rank 0 sent malformed thresholds: {answer!r}")
        return tuple(map(float, levels))


# -- keys ----------------------------------------------------------------------------------------


def _common_key(
    bucketing: Bucketing, collectives: Collectives, strategy: Strategy
) -> dict[str, Any]:
    wire = strategy.wire
    shapes = [[spec.name, list(spec.shape), spec.dtype] for spec in bucketing.specs]
    return {
        **({"server_updates": True} if strategy.update_part.on_servers else {}),
        "parameters": files.digest(shapes),
        "workers": collectives.world.size,
        "links": len(collectives.world.links),
        **strategy.exchange.key(),
        "schedule": strategy.schedule.machine,
        "wire": str(wire) if wire else "as computed",
    }


def bucket_size_key(
    bucketing: Bucketing,
    collectives: Collectives,
    strategy: Strategy,
    topologies: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the model, cluster and strategy for which a bucket size is valid."""
    return {
        **_common_key(bucketing, collectives, strategy),
        **({"topologies": list(topologies)} if topologies else {}),
        "topology": strategy.topology,
        "shard_optimizer": strategy.update_part.shards,
    }


def threshold_key(
    bucketing: Bucketing, collectives: Collectives, strategy: Strategy
) -> dict[str, Any]:
    """Return the model, cluster and strategy for which thresholds are valid."""
    fusion = strategy.plan.fusion()
    return {
        **_common_key(bucketing, collectives, strategy),
        "buckets": f"{fusion.kind} {fusion.bucket_bytes}",
    }
