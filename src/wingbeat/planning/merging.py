"""Layers merged by measured costs (OMGS-SGD, sections III and IV).

The first iterations run with all layers in one bucket while backward is profiled. Then all workers
measure compression and links together, and rank 0 makes the plan that all follow. Backward is
profiled again under the plan, to measure the delay by exchanges, and a second plan is made. The
gain of a plan is predicted; if several plans may be the best, whole iterations with each decide.
Drift restarts the process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from wingbeat import schedules
from wingbeat.collectives import Collectives
from wingbeat.compression import Coded, options_of
from wingbeat.engine.gradients.bucket import Slot
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.log import log
from wingbeat.parts.plan import Merged
from wingbeat.parts.strategy import Strategy
from wingbeat.planning import controllers, measure, merge
from wingbeat.planning.backward import BackwardProfiler, combine
from wingbeat.planning.costs import Fit, Workload, best_fit
from wingbeat.planning.files import REMEDY
from wingbeat.planning.measure import Samples, fit_samples, key_of, payload_bytes, wire_text
from wingbeat.planning.merge import TRIED, Candidate
from wingbeat.planning.probe import (
    Gradient,
    LinkFit,
    PlanTiming,
    Probe,
    contention,
    format_timings,
)
from wingbeat.planning.trials import DriftDetector, Rows, Trial, plan_trial
from wingbeat.schema import MalformedMessage, from_json, to_json
from wingbeat.transport.world import World
from wingbeat.types import Plan

MISPREDICTED = 0.1
"""Relative error above which a prediction is reported."""


@dataclass
class ActivePlan:
    """The merge plan in force, its prediction, and the iterations under it.

    ``rules`` names the rules that make the plan. ``measured_s`` is 0.0 before a measurement.
    """

    rules: tuple[str, ...]
    plan: Plan
    timeline: merge.Timeline
    predicted_s: float
    measured_s: float = 0.0

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None before there is a measurement."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


@dataclass
class Effort:
    """What deciding has taken: iterations, which train, their seconds, and a pause for measuring.

    ``seconds`` are 0.0 while it is not over, and contain ``paused_s``.
    """

    began_s: float
    iterations: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0


class CostProbe:
    """Measures the costs of a model's exchanges with all workers, and prices its backward."""

    def __init__(
        self,
        strategy: Strategy,
        bucketing: Bucketing,
        compression: Compression,
        collectives: Collectives,
    ) -> None:
        self._strategy = strategy
        self._bucketing = bucketing
        self._compression = compression
        self._collectives = collectives

    @property
    def wire(self) -> str | Coded:
        """The encoding of gradients; fp32 where a trial has disabled compression."""
        return self._strategy.wire if self._compression.on or not self._compression.coded else ""

    @property
    def collective(self) -> str:
        """The exchange that competes with backward: with DeAR its first phase.

        The second phase competes with the next forward and is measured separately.
        """
        if self._strategy.schedule.machine == "dear":
            return "reduce-scatter"
        return "payload all-gather" if options_of(self.wire).gathers else "all-reduce"

    def key(self) -> dict[str, Any]:
        """Return the model and cluster for which a probe is valid."""
        world = self._collectives.world
        links = [link.name for link in world.links]
        return key_of(
            self._bucketing.specs,
            world.size,
            links,
            self.wire,
            self.collective,
            self._compression.dense,
        )

    def workload(self, found: Probe) -> Workload:
        """Return the profiled backward, with the bytes that travel; `UsageError` for others."""
        wire = wire_text(self.wire)
        if (found.wire, found.collective) != (wire, self.collective):
            raise UsageError(
                f"gradients travel as {wire} ({self.collective}), and the probe is of {found.wire} "
                f"({found.collective})"
            )
        return found.workload(self._bucketing.specs, self._payload_bytes())

    def _payload_bytes(self) -> list[float]:
        return payload_bytes(self._bucketing.specs, self.wire, self._compression.dense)

    def measure(self, order: Sequence[int], ready: tuple[float, ...], rest_s: float) -> Probe:
        """Measure compression and links with all workers; no exchange may be in progress."""
        world, specs = self._collectives.world, self._bucketing.specs
        if world.leads:
            log.info("measuring compression and links, to merge layers by their costs")
        samples = self._measure_wire(self.wire, self.collective)
        encode, exchange = fit_samples(samples, self.wire)
        gather = self._measure_gather() if self.collective == "reduce-scatter" else None
        matrices = measure.measure_matrices(
            self._collectives,
            self.wire,
            self.collective,
            specs,
            device=self._bucketing.device,
            dtype=_prevalent_dtype(self._bucketing.slots),
        )
        return Probe(
            workers=world.size,
            links=tuple(link.name for link in world.links),
            wire=wire_text(self.wire),
            collective=self.collective,
            gradients=tuple(
                Gradient(tensor, specs[tensor].name, seconds)
                for tensor, seconds in zip(order, ready, strict=True)
            ),
            encode=encode,
            exchange=exchange,
            interfaces=self._measure_interfaces(),
            rest_s=rest_s,
            cpu=best_fit(samples.cpu) if samples.cpu else None,
            gather=gather,
            matrices=matrices,
        )

    def _measure_interfaces(self) -> tuple[LinkFit, ...]:
        """Measure plain links for a plan file, which shows them; no plan depends on them."""
        merged = self._strategy.plan.merging()
        if merged is None or not merged.file:
            return ()
        return measure.measure_links(self._collectives, topology=self._strategy.topology)

    def _measure_wire(self, wire: str | Coded, collective: str) -> Samples:
        return measure.measure_wire(
            self._collectives,
            wire,
            collective,
            sum(spec.numel for spec in self._bucketing.specs),
            device=self._bucketing.device,
            dtype=_prevalent_dtype(self._bucketing.slots),
        )

    def _measure_gather(self) -> Fit | None:
        """Measure the phase of an all-reduce that the next forward hides; None if there is none.

        The all-gathers of a sharded optimizer carry uncompressed parameters. Factors are summed
        whole.
        """
        wire = "" if self._strategy.update_part.shards else self.wire
        if options_of(wire).summed:
            return None
        samples = self._measure_wire(wire, measure.SECOND_PHASE)
        if not self._strategy.update_part.shards:
            return fit_samples(samples, wire)[1]
        # The cost model counts the bytes of a bucket's gradients.
        specs = self._bucketing.specs
        each = sum(self._payload_bytes()) / sum(spec.numel for spec in specs)
        pairs = zip(samples.encode, samples.exchange, strict=True)
        return best_fit([(elements * each, seconds) for (elements, _), (_, seconds) in pairs])


def _prevalent_dtype(slots: Sequence[Slot]) -> torch.dtype:
    """Return the dtype of most elements, whose costs dominate."""
    counts: Counter[torch.dtype] = Counter()
    for slot in slots:
        counts[slot.param.dtype.to_real()] += slot.elements
    return counts.most_common(1)[0][0]


class LayerMerging:
    """Profiles backward, makes and tries plans, and applies the best to a `Bucketing`.

    Results of an earlier run, in the plan file of rank 0, are used at once. ``probe`` and ``plan``
    are None before there are any.
    """

    def __init__(
        self,
        rule: Merged,
        strategy: Strategy,
        bucketing: Bucketing,
        compression: Compression,
        collectives: Collectives,
        wire_is_known: bool = True,
    ) -> None:
        self._rule = rule
        self._compression = compression
        self._bucketing = bucketing
        self._world = collectives.world
        self._costs = CostProbe(strategy, bucketing, compression, collectives)
        # Collectives of a GPU library do not report their completion.
        native = bucketing.device.type in collectives.world.nccl_devices
        later = not schedules.BY_NAME[strategy.schedule.machine].whole_after_backward
        self.passes = BackwardProfiler(
            len(bucketing.slots), bucketing.device, asynchronous=later and not native
        )
        self.probe: Probe | None = None
        self.plan: ActivePlan | None = None
        self._drift = DriftDetector(rule.steps, rule.drift)
        self._effort: Effort | None = None
        self._alone: tuple[Plan, float] | None = None
        self._candidates: list[Candidate] = []
        self._trial: Trial[int, list[float]] | None = None
        self._file_read = not rule.file
        # During the trial of compression the final encoding is not known.
        if wire_is_known:
            self._read_file()

    @property
    def done(self) -> bool:
        """Whether the plan is made and chosen; afterwards drift is detected."""
        return not self._drift.measuring and self._trial is None

    @property
    def chosen(self) -> tuple[str, ...] | None:
        """Names of the rules of the plan that a trial has chosen; None without one."""
        return self.probe.timings[0].rules if self.probe and self.probe.timings else None

    def decide(self, found: Probe) -> None:
        """Plan from a known probe; on all workers at once, before training."""
        self._file_read = True
        self._drift.planned(known=True)
        self._restart_profile()
        if found.timings and self._rule.rule == TRIED:
            self.probe, best = found, found.timings[0]
            plan = merge.plan_from_stops(self._costs.workload(found), best.stops)
            self._follow(Candidate(best.rules, plan), measured_s=best.iteration_s)
        else:
            self._plan_from(replace(found, timings=()))
            self._start_trial()

    def report(self) -> dict[str, Any] | None:
        """Return the probe and the plan as JSON values; None before there is a plan."""
        probe, plan = self.probe, self.plan
        if probe is None or plan is None:
            return None
        timeline = plan.timeline
        return {
            "merge": self._rule.rule,
            "rules": list(plan.rules),
            "buckets": len(timeline.buckets),
            "tensors": len(probe.gradients),
            "predicted_s": plan.predicted_s,
            "measured_s": plan.measured_s or None,
            "prediction_error": plan.error,
            "rest_s": probe.rest_s,
            "backward_s": timeline.backward_s,
            "encode_s": timeline.encode_s,
            "delay_s": timeline.delay_s,
            "exposed_s": timeline.exposed_s,
            "encode": to_json(probe.encode),
            "exchange": to_json(probe.exchange),
            "gather": to_json(probe.gather),
            "cpu": to_json(probe.cpu),
            "contention": probe.contention,
            "fit_error": probe.exchange.error,
            "deciding": self._effort
            and {
                "iterations": self._effort.iterations,
                "seconds": self._effort.seconds,
                "paused_s": self._effort.paused_s,
            },
            "tried": [
                {"rules": list(t.rules), "buckets": len(t.stops), "iteration_s": t.iteration_s}
                for t in probe.timings
            ],
        }

    # -- between iterations ----------------------------------------------------------------------

    def boundary(self, seconds: float, rows: Rows | None) -> bool:
        """Count an iteration, plan when enough was measured, and detect drift."""
        self._read_file()
        deciding = not self.done
        changed = self._advance(seconds, rows)
        self._count_effort(deciding)
        return changed

    def _advance(self, seconds: float, rows: Rows | None) -> bool:
        if self._trial is not None:
            return rows is not None and self._continue_trial(self._trial, rows)
        drifted = rows is not None and self._detect_drift([row[0] for row in rows])
        self._drift.count(seconds)
        if not self._drift.due():
            return drifted
        began = time.monotonic()
        self._measure_and_plan()
        if self._effort is not None:
            self._effort.paused_s += time.monotonic() - began
        return True

    def _count_effort(self, deciding: bool) -> None:
        """Count an iteration if it was one of deciding; log the effort once it is over."""
        now = time.monotonic()
        if deciding and self._effort is not None:
            self._effort.iterations += 1
            if self.done:
                self._effort.seconds = now - self._effort.began_s
                if self._world.leads:
                    log.info(
                        "layers are merged as decided after %d iterations in %.3g s, of which "
                        "training paused %.3g s for measurements",
                        self._effort.iterations,
                        self._effort.seconds,
                        self._effort.paused_s,
                    )
        elif not self.done:
            self._effort = Effort(now)

    def row(self, seconds: float) -> Sequence[float]:
        """Return the row of a trial, or the median at the end of a window, in seconds."""
        if self._trial is not None:
            # The best plan depends on the final density.
            return self._trial.report(seconds if self._compression.settled else 0.0)
        return [self._drift.median()] if self._drift.window_ended() else []

    def _detect_drift(self, medians: Sequence[float]) -> bool:
        """Process the medians of a window; return whether measuring starts again."""
        drifted = self._drift.compare(medians, self._world.ranks)
        if drifted is None:
            self._compare(max(medians))
            return False
        if self._world.leads:
            log.info(
                "iterations take %.4g s in place of %.4g s: measuring again, to merge layers again",
                drifted[1],
                drifted[0],
            )
        self._restart_profile()
        if self.probe is not None:  # one bucket: no exchange delays backward
            self._bucketing.follow(merge.single_bucket(self._costs.workload(self.probe)))
        return True

    def _compare(self, measured_s: float) -> None:
        """Set the measured time of the plan; report a wrong prediction once."""
        plan = self.plan
        if plan is None:
            return
        first, plan.measured_s = not plan.measured_s, measured_s
        error = plan.error or 0.0
        if first and abs(error) > MISPREDICTED and self._world.leads:
            log.info(
                "iterations take %.4g ms with %d merged layers, and were predicted at %.4g ms "
                "(%+.0f%%)",
                1e3 * measured_s,
                len(plan.timeline.buckets),
                1e3 * plan.predicted_s,
                100 * error,
            )

    # -- planning --------------------------------------------------------------------------------

    def _restart_profile(self) -> None:
        self.passes.enabled = self._drift.measuring
        self.passes.reset()

    def _measure_and_plan(self) -> None:
        """Measure on all workers, combine the figures of the slowest, and follow rank 0's plan."""
        order = list(self._bucketing.ready_order)
        mine = self.passes.summary(order, self._drift.median())
        rows = self._world.exchange("backward times", mine)
        first = self._drift.first
        self._drift.planned()
        self._restart_profile()
        if all(row is None for row in rows):  # no worker had a batch of its own
            return
        ready, rest_s, span_s = combine(rows, len(order), self._world.rank, self._world.ranks)
        if first or self.probe is None:
            found = self._costs.measure(order, ready, rest_s)
            whole = merge.single_bucket(self._costs.workload(found))
            self._alone = (whole, span_s) if first else None
            found = self._without_gathers(found, whole)
        else:
            found = self._with_contention(self.probe, ready, rest_s, span_s)
        self._plan_from(found)
        if not self._drift.measuring:
            self._keep()
            self._start_trial()

    def _with_contention(
        self, alone: Probe, ready: tuple[float, ...], rest_s: float, span_s: float
    ) -> Probe:
        """Return the probe after backward was profiled with concurrent exchanges as well."""
        alone = replace(alone, rest_s=rest_s)
        if self.plan is not None:
            alone = self._without_gathers(alone, self.plan.plan)
        if self._alone is None or self.plan is None or alone.cpu is None or not span_s:
            # The delay by exchanges cannot be separated from backward.
            pairs = zip(alone.gradients, ready, strict=True)
            gradients = tuple(replace(gradient, ready_s=seconds) for gradient, seconds in pairs)
            return replace(alone, gradients=gradients)
        workload, beside = self._costs.workload(alone), (self.plan.plan, span_s)
        delay = contention(workload, alone.costs(), alone.cpu.curve, self._alone, beside)
        return replace(alone, contention=delay)

    def _without_gathers(self, found: Probe, plan: Plan) -> Probe:
        """Subtract the all-gathers of the plan in force from the rest of an iteration."""
        gathers = merge.gather_phase_s(plan, self._costs.workload(found), found.costs())
        return replace(found, rest_s=max(0.0, found.rest_s - gathers))

    def _plan_from(self, found: Probe) -> None:
        """Make plans and follow the first, the only one until backward ran under a plan.

        Only rank 0 plans, because floating point may differ between workers.
        """
        rule = "exact" if self._rule.rule == TRIED and self._drift.measuring else self._rule.rule
        workload = self._costs.workload(found)
        mine: Any = None
        if self._world.rank == 0:
            try:
                mine = [
                    [list(each.rules), merge.bucket_stops(each.plan, workload)]
                    for each in merge.candidates(rule, workload, found.costs())
                ]
            except Exception as err:
                mine = f"{self._world.me} could not merge layers: {type(err).__name__}: {err}"
        answer = self._world.exchange("merged layers", mine)[0]
        if isinstance(answer, str):
            raise PeerError(f"{self._world.me}: {answer}")
        self._candidates = checked_plans(answer, workload, self._world)
        self.probe = found
        self._follow(self._candidates[0])

    def _follow(self, candidate: Candidate, measured_s: float = 0.0) -> None:
        """Use a plan from the next backward on; ``measured_s`` is its iteration time, if known."""
        assert self.probe is not None, "plans are made from a probe"
        workload, costs = self._costs.workload(self.probe), self.probe.costs()
        timeline = merge.predict(candidate.plan, workload, costs)
        gathers = merge.gather_phase_s(candidate.plan, workload, costs)
        predicted_s = self.probe.rest_s + timeline.finish_s + gathers
        self.plan = ActivePlan(candidate.rules, candidate.plan, timeline, predicted_s, measured_s)
        self._bucketing.follow(candidate.plan)
        if self._world.leads and self._trial is None:
            log.info(
                "%d gradients merged into %d: %.4g ms an iteration expected, %.3g ms of exchange "
                "exposed",
                len(workload),
                len(timeline.buckets),
                1e3 * predicted_s,
                1e3 * timeline.exposed_s,
            )

    # -- trial -----------------------------------------------------------------------------------

    def _start_trial(self) -> None:
        if len(self._candidates) > 1:
            self._trial = plan_trial(len(self._candidates), self._world.rank, self._world.ranks)

    def _continue_trial(self, trial: Trial[int, list[float]], rows: Rows) -> bool:
        if not trial.process_rows(rows):
            return False
        if trial.result is not None:
            self._choose(trial.candidate, trial.result)
        else:
            self._follow(self._candidates[trial.candidate])
        return True

    def _choose(self, chosen: int, medians: Sequence[float]) -> None:
        assert self.probe is not None, "plans are made from a probe"
        workload = self._costs.workload(self.probe)
        timings = [
            PlanTiming(each.rules, tuple(merge.bucket_stops(each.plan, workload)), seconds)
            for each, seconds in zip(self._candidates, medians, strict=True)
        ]
        best = timings.pop(chosen)
        others = sorted(timings, key=lambda timing: timing.iteration_s)
        self.probe = replace(self.probe, timings=(best, *others))
        self._trial = None
        if self._world.leads:
            text = format_timings(self.probe.timings)
            log.info("plans tried in whole iterations: %s; the first stays", text)
        self._follow(self._candidates[chosen])
        self._compare(best.iteration_s)
        self._drift.planned(known=True)
        self._keep()

    # -- plan file -------------------------------------------------------------------------------

    def _keep(self) -> None:
        if self.probe is not None and self._world.rank == 0 and self._rule.file:
            controllers.keep(self._rule.file, self.probe, self._costs.key())

    def _read_file(self) -> None:
        """Follow the plan file of rank 0, if it exists and is for this model and cluster."""
        if self._file_read:
            return
        self._file_read = True
        file = self._rule.file

        def choose(probe: Probe) -> Any:
            try:
                workload = self._costs.workload(probe)
                for each in probe.timings:
                    merge.bucket_stops(merge.plan_from_stops(workload, each.stops), workload)
            except UsageError as err:
                raise UsageError(f"plan_file={file!r}: {err}; {REMEDY}") from None
            return to_json(probe)

        answer = controllers.known_choice(self._world, file, Probe, self._costs.key(), choose)
        if answer is None:
            return
        try:
            self.decide(from_json(Probe, answer, "probe"))
        except (UsageError, MalformedMessage) as err:
            world = self._world
            raise PeerError(f"{world.me}: {world.name(0)} sent a damaged plan: {err}") from None


def checked_plans(answer: Any, workload: Workload, world: World) -> list[Candidate]:
    """Return the plans that rank 0 sent as rules and stops; `PeerError` if they are malformed."""
    what = f"{world.me}: {world.name(0)} sent a malformed plan"
    try:
        sent = from_json(tuple[tuple[tuple[str, ...], tuple[int, ...]], ...], answer, "plans")
    except MalformedMessage as err:
        raise PeerError(f"{what}: {err}") from None
    for _, stops in sent:
        rising = stops and all(earlier < later for earlier, later in pairwise((0, *stops)))
        if not rising or stops[-1] != len(workload):
            raise PeerError(f"{what}: stops {list(stops)!r:.60} of {len(workload)} tensors")
    if not sent:
        raise PeerError(f"{what}: none")
    return [Candidate(rules, merge.plan_from_stops(workload, stops)) for rules, stops in sent]
