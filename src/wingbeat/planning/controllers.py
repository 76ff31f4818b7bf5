"""Controllers of compression, strategy, bucket size and thresholds: trials applied to the engine.

Results of an earlier run, in the plan file of rank 0, are used at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.log import log, log_event
from wingbeat.observe.summary import duration
from wingbeat.parts.plan import Candidate, Chosen
from wingbeat.parts.strategy import Strategy
from wingbeat.planning import bucket_size, files, thresholds
from wingbeat.planning.bucket_size import (
    BucketSizeResult,
    Setting,
    bucket_size_trial,
    clip_range,
    format_mb,
    format_setting,
    largest_bucket,
    single_plan,
)
from wingbeat.planning.choice import StrategyResult, TimedStrategy
from wingbeat.planning.plans import make_plan
from wingbeat.planning.thresholds import (
    Cuts,
    ThresholdResult,
    format_thresholds,
    threshold_trial,
    thresholds_from_cuts,
)
from wingbeat.planning.trials import (
    DriftDetector,
    LedTrial,
    Rows,
    Trial,
    compression_trial,
    strategy_trial,
)
from wingbeat.schedules import BY_NAME
from wingbeat.schedules.events import Schedule
from wingbeat.settings import is_number
from wingbeat.transport.world import World
from wingbeat.types import Tuning

FIRST_WINDOWS = 2
"""Consecutive windows with drift before sizes are tuned again; doubled each time."""

C = TypeVar("C")
R = TypeVar("R", bound=files.Record)
T = TypeVar("T", BucketSizeResult, ThresholdResult)


def known_choice(
    world: World,
    file: str,
    record: type[R],
    key: Mapping[str, Any],
    choose: Callable[[R], Any],
) -> Any:
    """Return a choice from the plan file of rank 0, not validated; the same on all workers.

    If rank 0 cannot use the file, every rank raises `UsageError`.
    """
    answer = None
    if world.rank == 0:
        try:
            known = files.load_if_present(file, record)
            if known is not None and known.matches(key):
                answer = choose(known.record)
            elif known is not None:
                log.warning(
                    "plan file %s is for another model, cluster or strategy: planning again", file
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
    """Disables compression unless it makes iterations shorter."""

    def __init__(self, compression: Compression, rank: int, ranks: Sequence[int]) -> None:
        self._compression = compression
        self._trial = compression_trial(rank, ranks)
        self.done = False

    def decide(self, coded: bool) -> None:
        """End the trial with a known decision; on every worker, before training."""
        self._compression.on = coded
        self.done = True

    def boundary(self, _seconds: float, rows: Rows | None) -> bool:
        """Process the measurements of all workers."""
        if rows is None or not self._trial.process_rows(rows):
            return False
        on = self._compression.on = self._trial.candidate
        if self._trial.result is not None:
            self.done = True
            log.info(
                "compression %s: %.4g s an iteration with it, %.4g s with fp32: %s",
                self._compression.coded,
                self._trial.result.compressed_s,
                self._trial.result.uncompressed_s,
                "it stays on" if on else "it is not faster here and is switched off",
            )
        return True

    def row(self, seconds: float) -> Sequence[float]:
        """Return the time of the last iteration and the block of the trial."""
        return self._trial.report(seconds)


class Views(Protocol):
    """The contents of ``p.grad``."""

    def follow(self, schedule: Schedule) -> None:
        """Hide gradients, from the next buckets on, only if ``schedule`` completes them later."""


class Scheduled(Protocol):
    """What performs the commands of a schedule, which may be replaced between two iterations."""

    schedule: Schedule

    @property
    def views(self) -> Views:
        """The contents of ``p.grad``, which depend on the schedule."""


class StrategyController:
    """Changes schedule, buckets, topology and use of a codec to those of the fastest candidate.

    Training begins with the first candidate. The trial begins when the workers have agreed on the
    order of gradients, so that candidates with equal buckets are known. All workers change before
    the same backward, at the moment at which buckets change: all updates are made, and earlier
    gradients are whole. Drift begins the trial again. ``name`` is that of the candidate in use.
    """

    def __init__(
        self,
        plan: Chosen,
        strategy: Strategy,
        bucketing: Bucketing,
        compression: Compression,
        collectives: Collectives,
        runtime: Scheduled,
    ) -> None:
        self._plan, self._strategy, self._bucketing = plan, strategy, bucketing
        self._compression, self._collectives, self._runtime = compression, collectives, runtime
        # A schedule keeps what it has learned of the training loop.
        self._schedules = {strategy.machine: runtime.schedule}
        codec = strategy.codec
        topology = "" if codec else _another_topology(bucketing, collectives)
        self._possible = plan.candidates(topology, codec)
        self._current = self._possible[0]
        self._candidates: Sequence[Candidate] = ()
        self._compression.use(self._current.codec)
        self._trial: Trial[int, list[float]] | None = None
        self._iterations = 0
        self._result: StrategyResult | None = None  # on rank 0
        self.done = False
        self._drift = _DriftAfterDecision(plan.drift, collectives.world.ranks)
        self._key = strategy_key(bucketing, collectives, strategy, self._possible)
        known = self._known_name() if plan.file else None
        if known is not None:
            self.decide(known)
            if collectives.world.leads:
                log.info("%s, from plan file %s", known, plan.file)

    @property
    def name(self) -> str:
        """The candidate in use."""
        return self._current.name

    def compare(self) -> str:
        """Return what the last trial chose, and what DDP's schedule took in it; or nothing."""
        result = self._result
        if not self.done or result is None:
            return ""
        usual = next((each.name for each in self._possible if each.schedule == "wfbp"), "")
        took = {each.name: each.seconds for each in result.tried}.get(usual)
        if result.chosen == usual:
            return f"it chose {usual}, which has DDP's schedule"
        text = f"it chose {result.chosen}"
        return text if took is None else f"{text}; {usual}, as DDP, took {duration(took)}"

    def decide(self, name: str) -> None:
        """End the trial with a known candidate; on all workers, before training."""
        self.done = True
        self._use(next(each for each in self._possible if each.name == name))

    def boundary(self, seconds: float, rows: Rows | None) -> bool:
        """Process the rows of all workers, and use the candidate of the trial."""
        if self.done:
            return self._detect_drift(seconds, rows)
        if self._trial is None:
            if not self._bucketing.learning:
                self._begin()
            return self._trial is not None
        self._iterations += 1
        if rows is None or not self._trial.process_rows(rows):
            return False
        self._use(self._candidates[self._trial.candidate])
        if self._trial.done:
            self._end(self._trial)
        return True

    def row(self, seconds: float) -> Sequence[float]:
        """Return the row of the trial; after it, the median of a window at its end, in seconds."""
        if self.done:
            return self._drift.row()
        return () if self._trial is None else self._trial.report(seconds)

    def _begin(self) -> None:
        """Begin a trial of the candidates that differ in more than their names."""
        world, specs = self._collectives.world, self._bucketing.specs
        order, found = self._bucketing.ready_order, dict[Any, Candidate]()
        for each in self._possible:
            buckets = make_plan(each.fusion, specs, order).buckets
            found.setdefault((each.schedule, buckets, each.topology, each.codec), each)
        self._candidates, self._iterations = list(found.values()), 0
        self._trial = strategy_trial(len(found), self._plan.steps, world.rank, world.ranks)
        self._use(self._candidates[self._trial.candidate])

    def _use(self, candidate: Candidate) -> None:
        if candidate.schedule not in self._schedules:
            self._schedules[candidate.schedule] = BY_NAME[candidate.schedule]()
        # It receives `Planned` when the buckets are made, before any gradient is in them.
        self._runtime.schedule = schedule = self._schedules[candidate.schedule]
        self._runtime.views.follow(schedule)
        self._bucketing.use(candidate.fusion)
        self._compression.use(candidate.codec)
        if candidate.topology != self._current.topology:
            self._collectives.use(candidate.topology or self._strategy.topology)
        self._current = candidate

    def _end(self, trial: Trial[int, list[float]]) -> None:
        self.done, self._trial = True, None
        self._drift.decided()
        if not self._collectives.world.leads or trial.result is None:
            return
        timed = [
            TimedStrategy(each.name, seconds)
            for each, seconds in zip(self._candidates, trial.result, strict=True)
        ]
        result = StrategyResult(tried=tuple(timed), chosen=self.name, iterations=self._iterations)
        self._result = result
        log_event("strategy-changed", result.explain(), rank=0)
        if self._plan.file:
            keep(self._plan.file, result, self._key)

    def _detect_drift(self, seconds: float, rows: Rows | None) -> bool:
        """Count an iteration under the chosen candidate; return whether a trial begins."""
        drifted = self._drift.detect(seconds, rows)
        if drifted is None:
            return False
        if self._collectives.world.leads:
            log_event(
                "strategy-changed",
                f"iterations take {drifted[1]:.4g} s in place of {drifted[0]:.4g} s with "
                f"{self.name}: trying strategies again",
                rank=0,
            )
        self.done = False
        self._begin()
        return True

    def _known_name(self) -> str | None:
        world, file = self._collectives.world, self._plan.file
        names = [each.name for each in self._possible]

        def choose(result: StrategyResult) -> list[str]:
            self._result = result
            return [result.chosen]

        answer = known_choice(world, file, StrategyResult, self._key, choose)
        if answer is None:
            return None
        if isinstance(answer, list) and len(answer) == 1 and answer[0] in names:
            return str(answer[0])
        raise PeerError(f"{world.me}: {world.name(0)} sent a malformed strategy: {answer!r}")


def _another_topology(bucketing: Bucketing, collectives: Collectives) -> str:
    """Return a topology to try beside the strategy's own; empty: none.

    A mesh has fewer hops than a ring of three or more workers, or of hosts with several workers.
    Tensors of accelerators keep the strategy's: their sums inside hosts have one topology.
    """
    layout = collectives.world.layout
    ends = len(layout.hosts) if len(layout.hosts) > 1 else layout.workers
    if bucketing.device.type != "cpu" or ends < 3:
        return ""
    return "mesh" if collectives.fits("mesh") else ""


class _DriftAfterDecision:
    """Detects that iterations are no longer as long as after a decision.

    The first window after a decision is the reference. ``ranks`` has the rank in the job of each
    worker, as used in error messages.
    """

    def __init__(self, factor: float, ranks: Sequence[int]) -> None:
        self._factor, self._ranks, self._windows = factor, ranks, FIRST_WINDOWS
        self.decided()

    def decided(self) -> None:
        """Begin again with a reference."""
        self._drift = DriftDetector(0, self._factor, self._windows)
        self._drift.planned(known=True)

    def row(self) -> Sequence[float]:
        """Return the median of a window at its end, in seconds."""
        return [self._drift.median()] if self._drift.window_ended() else []

    def detect(self, seconds: float, rows: Rows | None) -> tuple[float, float] | None:
        """Count an iteration; return the seconds before and now if they differ by the factor."""
        drifted = None
        if rows is not None:
            drifted = self._drift.compare([row[0] for row in rows], self._ranks)
        self._drift.count(seconds)
        if drifted is not None:
            # Doubling keeps periodic changes from restarting the trial for ever.
            self._windows *= 2
        return drifted


class _LedController(Generic[C, T]):
    """Applies the decisions of a trial led by rank 0, and keeps its result in the plan file.

    ``done`` without an open decision.
    """

    def __init__(
        self, bucketing: Bucketing, collectives: Collectives, file: str, key: Mapping[str, Any]
    ) -> None:
        self._bucketing, self._collectives = bucketing, collectives
        self._rank0 = collectives.world.leads
        self._file, self._key = file, key
        self._trial: LedTrial[C, T] | None = None
        self._untuned: T | None = None
        self.done = False

    @property
    def result(self) -> T | None:
        """The result, once tuning has ended; on rank 0 only."""
        return self._untuned or (None if self._trial is None else self._trial.result)

    def row(self, seconds: float) -> Sequence[float]:
        """Return the row of the trial."""
        return () if self._trial is None else self._trial.report(seconds)

    def _use(self, candidate: C) -> None:
        raise NotImplementedError

    def _continue(self, trial: LedTrial[C, T], rows: Rows) -> bool:
        """Apply the last decision of the trial; return whether it changed the candidate."""
        candidate = trial.process_rows(rows)
        if candidate is not None:
            self._use(candidate)
        if trial.done:
            self.done = True
            self._keep()
        return candidate is not None

    def _end(self, untuned: T) -> None:
        """End without a trial, as there is nothing to tune."""
        self.done = True
        if self._rank0:
            self._untuned = untuned
            log.info("%s", untuned.explain())
            self._keep()

    def _keep(self) -> None:
        if self.result is not None and self._file:
            keep(self._file, self.result, self._key)


class BucketSizeController(_LedController[Setting, BucketSizeResult]):
    """Sets the bucket size of a `Bucketing` by a trial (DeAR, section IV-B).

    After the trial, drift starts the tuning again from the size in use, on all workers before the
    same backward. ``topology`` is empty where topologies are not tuned. With ``single_plan`` the
    size has no effect.
    """

    def __init__(
        self, tuning: Tuning, strategy: Strategy, bucketing: Bucketing, collectives: Collectives
    ) -> None:
        topologies = _possible_topologies(tuning, strategy, collectives)
        key = bucket_size_key(bucketing, collectives, strategy, topologies)
        super().__init__(bucketing, collectives, tuning.file, key)
        self._fusion = bucketing.fusion
        self._tuning = replace(tuning, topologies=topologies)
        self.topology = strategy.topology if topologies else ""
        self._drift = _DriftAfterDecision(tuning.drift, collectives.world.ranks)
        self._order_known = self.single_plan = False
        known = self._known_setting() if tuning.file else None
        if known is not None:
            self.decide(*known)
            if self._rank0:
                log.info("buckets of %s, from plan file %s", format_setting(*known), tuning.file)
        self._trial = self._new_trial()

    @property
    def bucket_bytes(self) -> int:
        """The size in use."""
        return self._bucketing.fusion.bucket_bytes

    def decide(self, nbytes: int, topology: str = "") -> None:
        """End the tuning with a known size; on all workers, before training."""
        self.done = True
        self._use((nbytes, topology))

    def boundary(self, seconds: float, rows: Rows | None) -> bool:
        """Process the rows of all workers, and apply the last decision."""
        if self._has_single_plan():
            return False
        if self.done:
            return self._detect_drift(seconds, rows)
        if rows is None or self._trial is None:
            return False
        changed = self._continue(self._trial, rows)
        if self._trial.done:
            self._drift.decided()
        return changed

    def row(self, seconds: float) -> Sequence[float]:
        """Return the row of the trial; after it, the median of a window at its end, in seconds."""
        if self.done:
            return self._drift.row()
        return super().row(seconds)

    def _detect_drift(self, seconds: float, rows: Rows | None) -> bool:
        """Count an iteration under the chosen size; return whether tuning begins again."""
        drifted = self._drift.detect(seconds, rows)
        if drifted is None:
            return False
        if self._rank0:
            log.info(
                "iterations take %.4g s in place of %.4g s: tuning buckets again, from %s",
                drifted[1],
                drifted[0],
                format_setting(self.bucket_bytes, self.topology),
            )
        self._trial = self._new_trial()
        self.done = False
        return True

    def _new_trial(self) -> LedTrial[Setting, BucketSizeResult]:
        world, specs = self._collectives.world, self._bucketing.specs
        # Larger sizes make the same plan as the one that holds the whole model.
        start = min(self.bucket_bytes, largest_bucket(specs))
        space = clip_range(self._tuning, specs)
        return bucket_size_trial(space, start, world.rank, world.ranks, self.topology)

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
        self.single_plan = plan is not None
        if self.done:
            return self.single_plan
        if plan is not None:
            nbytes = self._fusion.bucket_bytes
            self._end(bucket_size.untuned(tuning, nbytes, len(plan.buckets)))
        elif self._rank0 and space.high_bytes < tuning.high_bytes:
            low, high = format_mb(space.low_bytes), format_mb(space.high_bytes)
            log.info("%s MB hold the whole model: tuning from %s to %s MB", high, low, high)
        return self.single_plan

    def _known_setting(self) -> Setting | None:
        world, tuning = self._collectives.world, self._tuning
        start = self._fusion.bucket_bytes

        def choose(result: BucketSizeResult) -> list[int | str] | None:
            size = result.chosen_bytes
            if not (tuning.low_bytes <= size <= tuning.high_bytes or size == start):
                mb = format_mb(size)
                log.warning("plan file %s has %s MB, out of range: planning again", tuning.file, mb)
                return None
            return [size, result.chosen_topology]

        answer = known_choice(world, tuning.file, BucketSizeResult, self._key, choose)
        if answer is None:
            return None
        if isinstance(answer, list) and [type(each) for each in answer] == [int, str]:
            size, topology = answer[0], answer[1] or self.topology
            if size > 0 and topology in (*tuning.topologies, self.topology):
                return size, topology
        raise PeerError(f"{world.me}: {world.name(0)} sent a malformed bucket size: {answer!r}")


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
    if collectives.world.leads:
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


class ThresholdController(_LedController[Cuts, ThresholdResult]):
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
        tuning = cast(TunedThresholds, strategy.exchange)
        key = threshold_key(bucketing, collectives, strategy)
        super().__init__(bucketing, collectives, tuning.file, key)
        self._exchange, self._steps = exchange, tuning.steps
        self._layers = 1
        self.thresholds = tuning.levels
        known = self._known_thresholds() if tuning.file else None
        if known is not None:
            self.decide(known)
            if self._rank0:
                text = format_thresholds(known)
                log.info("thresholds %s, from plan file %s", text, tuning.file)

    def decide(self, thresholds: Sequence[float]) -> None:
        """End the tuning with known thresholds; on all workers, before training."""
        self.done = True
        self.thresholds = tuple(thresholds)
        self._exchange.prioritise(self.thresholds)

    def boundary(self, _seconds: float, rows: Rows | None) -> bool:
        """Process the rows of all workers, and apply the last decision."""
        if self._trial is not None:
            return rows is not None and self._continue(self._trial, rows)
        if not (self._bucketing.learning or self._bucketing.stale):
            self._begin()
        return False

    def _begin(self) -> None:
        """Start the trial once the buckets are final; on all workers before the same backward."""
        world, buckets = self._collectives.world, self._bucketing.buckets
        layers = {name.rpartition(".")[0] for bucket in buckets for name in bucket.names}
        self._layers = len(layers) if len(buckets) > 1 else 1
        if self._layers > 1:
            self._trial = threshold_trial(
                self._layers, self.thresholds, self._steps, world.rank, world.ranks
            )
        else:
            self._end(thresholds.untuned(self._layers, len(self.thresholds) + 1))

    def _use(self, candidate: Cuts) -> None:
        classes = len(self.thresholds) + 1
        self.thresholds = thresholds_from_cuts(candidate, self._layers, classes)
        self._exchange.prioritise(self.thresholds)

    def _known_thresholds(self) -> tuple[float, ...] | None:
        world, count = self._collectives.world, len(self.thresholds)
        answer = known_choice(
            world, self._file, ThresholdResult, self._key, lambda result: list(result.thresholds)
        )
        if answer is None:
            return None
        levels = answer if isinstance(answer, list) else [None]
        valid = all(is_number(level) and 0 <= level <= 1 for level in levels)
        falling = valid and levels == sorted(set(levels), reverse=True)
        if not falling or len(levels) != count:
            raise PeerError(f"{world.me}: {world.name(0)} sent malformed thresholds: {answer!r}")
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


def strategy_key(
    bucketing: Bucketing,
    collectives: Collectives,
    strategy: Strategy,
    candidates: Sequence[Candidate],
) -> dict[str, Any]:
    """Return the model, cluster and candidates for which a choice is valid."""
    layout = collectives.world.layout
    return {
        **_common_key(bucketing, collectives, strategy),
        "hosts": len(layout.hosts),
        "topology": strategy.topology,
        "candidates": [each.name for each in candidates],
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
