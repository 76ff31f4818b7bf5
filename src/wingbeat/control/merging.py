"""Layers merged by what they are measured to cost (OMGS-SGD, sections III and IV).

The first iterations run with all layers in one bucket while backward is measured. Then all workers
measure the codec and the links together, rank 0 makes the plan, and everyone follows it. Backward
is measured once more under the plan, which shows how much exchanges hold it up, and planned for
again. What a plan brings is predicted; so where several may be the best, whole iterations with each
decide. Times that drift begin it all anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wingbeat import schedules
from wingbeat.collectives import Collectives
from wingbeat.control import measured_file
from wingbeat.control.drift import Drift
from wingbeat.control.merged_plan import MergedPlan
from wingbeat.control.passes import Passes, slowest
from wingbeat.control.plan_trial import PlanTrial
from wingbeat.control.planner import Planner
from wingbeat.control.rules import TRIED, Candidate
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.log import log
from wingbeat.plans import merge
from wingbeat.plans.merge.runs import plan_of, stops_of
from wingbeat.probe import saved
from wingbeat.probe.contention import contention
from wingbeat.probe.model import Probe, Tried, told
from wingbeat.types import Choices, Merging, Plan


class LayerMerging:
    """Measures, has plans made and tried, and lets a `Bucketing` follow the best.

    What an earlier run has measured, in the file on rank 0, is taken over at once.

    Attributes:
        probe: what was measured, and what came of a trial; None before.
        planned: the plan in force, and what it is predicted to bring; None before there is one.
        passes: what this worker's backward passes show.
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
        self._compression = compression
        self._bucketing = bucketing
        self._world = collectives.world
        self._planner = Planner(choices, bucketing, compression, collectives)
        # Collectives of a library for GPUs tell nobody when they are done.
        native = bucketing.device.type in collectives.world.native_on
        later = not schedules.BY_NAME[choices.schedule].whole_after_backward
        count, goes_on = len(bucketing.slots), later and not native
        self.passes = Passes(count, bucketing.device, goes_on=goes_on)
        self.probe: Probe | None = None
        self.planned: MergedPlan | None = None
        self._drift = Drift(rule.steps, rule.drift)
        self._alone: tuple[Plan, float] | None = None
        self._candidates: list[Candidate] = []
        self._trial: PlanTrial | None = None
        self._seconds = 0.0
        self._known = not rule.file
        # While it is tried whether a codec stays on, nobody knows what will travel.
        if wire_is_known:
            self._take_known()

    def active(self) -> bool:
        """Always: iterations are counted, and watched for drift, to the end of training."""
        return True

    def deciding(self) -> bool:
        """Whether the plan is still to be made, or chosen."""
        return self._drift.watching or self._trial is not None

    @property
    def chosen(self) -> tuple[str, ...] | None:
        """Names of the rules that make the plan which a trial has chosen; None without one."""
        return self.probe.tried[0].rules if self.probe is not None and self.probe.tried else None

    def decide(self, found: Probe) -> None:
        """Plan from what was measured before; on all workers at once, before training.

        Raises:
            PeerError: a worker failed meanwhile, or rank 0's plan has no meaning.
            UsageError: it is of another model, or another wire was measured.
        """
        self._known = True
        self._drift.planned(known=True)
        self._watch()
        if found.tried and self._rule.rule == TRIED:
            self.probe, best = found, found.tried[0]
            plan = plan_of(self._planner.workload(found), best.stops)
            self._follow(Candidate(best.rules, plan), measured_s=best.seconds)
        else:
            self._plan_from(replace(found, tried=()))
            self._try()

    def report(self) -> dict[str, Any] | None:
        """Return what was measured and what the plan should bring; None before there is one."""
        if self.probe is None or self.planned is None:
            return None
        return {"merge": self._rule.rule, **self.planned.report(self.probe)}

    # -- between iterations ---------------------------------------------------------------

    def boundary(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Count an iteration; plan when enough has been seen, and hear whether times drift.

        Raises:
            PeerError: a worker failed, or sent something that is no measurement.
        """
        self._take_known()
        if self._trial is not None:
            return self._turn(self._trial, seconds, rows)
        anew = rows is not None and self._hear([row[0] for row in rows])
        self._drift.lap(seconds)
        if not self._drift.due():
            return anew
        self._plan()
        return True

    def row(self) -> Sequence[float]:
        """Return what a trial has to know, or the median at the end of a window, in seconds."""
        if self._trial is not None:
            # Before the density is what it is going to be, nothing says which plan is the best.
            return self._trial.report(self._seconds if self._compression.settled else 0.0)
        return [self._drift.median()] if self._drift.reports() else []

    def _hear(self, medians: Sequence[float]) -> bool:
        """Hear all workers' medians of a window; return whether all is measured anew."""
        drifted = self._drift.take(medians)
        if drifted is None:
            self._compare(max(medians))
            return False
        if self._world.rank == 0:
            log.info(
                "iterations take %.4g s in place of %.4g s: measuring anew, to merge layers anew",
                drifted[1],
                drifted[0],
            )
        self._watch()
        if self.probe is not None:  # as at first, when no exchange holds backward up
            self._bucketing.follow(merge.one(self._planner.workload(self.probe)))
        return True

    def _compare(self, measured_s: float) -> None:
        """Say, once for each plan, if iterations do not take what was predicted."""
        if self.planned is not None and self.planned.off(measured_s) and self._world.rank == 0:
            log.info("%s", self.planned.explain())

    # -- planning -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Time passes while it is measured, from now on; forget those before."""
        self.passes.watching = self._drift.watching
        self.passes.forget()

    def _plan(self) -> None:
        """Measure together, combine by the slowest, follow rank 0's plan."""
        order = list(self._bucketing.ready_order)
        mine = self.passes.own(order, self._drift.median())
        answers = self._world.exchange("backward times", mine)
        first = self._drift.first
        self._drift.planned()
        self._watch()
        if all(row is None for row in answers):  # nobody had a batch of its own
            return
        ready, rest_s, span_s = slowest(answers, len(order), self._world.rank)
        if first or self.probe is None:
            found = self._planner.measured(order, ready, rest_s)
            whole = merge.one(self._planner.workload(found))
            self._alone = (whole, span_s) if first else None
            found = self._without_feed(found, whole)
        else:
            found = self._beside(self.probe, ready, rest_s, span_s)
        self._plan_from(found)
        if not self._drift.watching:
            self._keep()
            self._try()

    def _beside(
        self, alone: Probe, ready: tuple[float, ...], rest_s: float, span_s: float
    ) -> Probe:
        """Return what is known after backward was measured beside exchanges as well."""
        alone = replace(alone, rest_s=rest_s)
        if self.planned is not None:
            alone = self._without_feed(alone, self.planned.plan)
        if self._alone is None or self.planned is None or alone.cpu is None or not span_s:
            # What exchanges hold up cannot be told apart from backward.
            return replace(alone, ready_s=ready)
        workload, beside = self._planner.workload(alone), (self.planned.plan, span_s)
        held_up = contention(workload, alone.costs(), alone.cpu.curve, self._alone, beside)
        return replace(alone, contention=held_up)

    def _without_feed(self, found: Probe, plan: Plan) -> Probe:
        """Take out of the rest of an iteration what follows from the plan that was in force."""
        return replace(found, rest_s=max(0.0, found.rest_s - self._planner.feed_s(found, plan)))

    def _plan_from(self, found: Probe) -> None:
        """Have plans made, and follow the first of them.

        Until backward was measured under a plan there is nothing to try.
        """
        rule = "exact" if self._rule.rule == TRIED and self._drift.watching else self._rule.rule
        self._candidates = self._planner.candidates(rule, found)
        self.probe = found
        self._follow(self._candidates[0])

    def _follow(self, candidate: Candidate, measured_s: float = 0.0) -> None:
        """Merge layers so from the next backward on; iterations took ``measured_s``, if known."""
        assert self.probe is not None, "plans are made of what was measured"
        workload = self._planner.workload(self.probe)
        timeline = merge.predict(candidate.plan, workload, self.probe.costs())
        fed_s = self._planner.feed_s(self.probe, candidate.plan)
        predicted_s = self.probe.rest_s + timeline.finish_s + fed_s
        self.planned = MergedPlan(
            candidate.rules, candidate.plan, timeline, predicted_s, measured_s
        )
        self._bucketing.follow(candidate.plan)
        if self._world.rank == 0 and self._trial is None:
            log.info(
                "%d gradients merged into %d: %.4g ms an iteration expected, %.3g ms of exchange "
                "exposed",
                len(workload),
                len(timeline.rows),
                1e3 * predicted_s,
                1e3 * timeline.exposed_s,
            )

    # -- the trial ------------------------------------------------------------------------

    def _try(self) -> None:
        """Begin to time whole iterations with each plan, if there are several."""
        if len(self._candidates) > 1:
            self._trial = PlanTrial(len(self._candidates), self._world.rank, self._world.size)
            self._seconds = 0.0

    def _turn(
        self, trial: PlanTrial, seconds: float, rows: Sequence[Sequence[float]] | None
    ) -> bool:
        """Hear what all have measured in the trial; return whether the plan has changed."""
        self._seconds = seconds
        if rows is None or not trial.take(rows):
            return False
        self._seconds = 0.0
        if trial.done:
            self._choose(trial)
        else:
            self._follow(self._candidates[trial.plan])
        return True

    def _choose(self, trial: PlanTrial) -> None:
        """Keep the plan that the trial has found to be the fastest."""
        assert self.probe is not None, "what is tried was planned"
        workload, medians = self._planner.workload(self.probe), trial.medians
        tried = tuple(
            Tried(each.rules, tuple(stops_of(each.plan, workload)), seconds)
            for each, seconds in zip(self._candidates, medians, strict=True)
        )
        best = tried[trial.plan]
        others = sorted((each for each in tried if each is not best), key=lambda t: t.seconds)
        self.probe = replace(self.probe, tried=(best, *others))
        self._trial = None
        if self._world.rank == 0:
            log.info("plans tried in whole iterations: %s; the first stays", told(self.probe.tried))
        self._follow(self._candidates[trial.plan])
        self._compare(best.seconds)
        self._drift.planned(known=True)
        self._keep()

    # -- the file -------------------------------------------------------------------------

    def _keep(self) -> None:
        if self.probe is not None and self._world.rank == 0 and self._rule.file:
            measured_file.keep(self._rule.file, self.probe, self._planner.key())

    def _take_known(self) -> None:
        """Follow what the file on rank 0 says, if it is there and for this model and cluster.

        Raises:
            UsageError: rank 0 cannot use the file; on every rank.
        """
        if self._known:
            return
        self._known = True
        mine: Any = None
        if self._world.rank == 0:
            mine = measured_file.read(self._rule.file, self._planner.key(), self._planner.check)
        answer = self._world.exchange("plan file", mine)[0]
        if isinstance(answer, str):
            raise UsageError(answer)
        if answer is None:
            return
        try:
            self.decide(saved.from_json(answer))
        except UsageError as err:
            raise PeerError(f"rank {self._world.rank}: rank 0 sent a damaged plan: {err}") from None
