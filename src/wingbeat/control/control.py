"""All that is measured and decided while training goes on, with one small exchange for it.

Each worker gives one row of numbers an iteration, and gets everyone's. The exchange is part of the
backward pass, in the plan's order, so all workers read the same rows before the same next
backward: none can disagree about what is in force, and nobody is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wingbeat.collectives import Collectives, Rows
from wingbeat.control.codec import CodecTrial
from wingbeat.control.decisions import Decisions
from wingbeat.control.merging import LayerMerging
from wingbeat.control.stopwatch import Stopwatch
from wingbeat.control.thresholds import Prioritised, ThresholdTuning
from wingbeat.control.tuning import SizeTuning
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import UsageError
from wingbeat.types import Choices


class Controller(Protocol):
    """Something that is decided by what iterations take."""

    def active(self) -> bool:
        """Whether it counts iterations, and may have something to say."""

    def boundary(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Between two iterations: hear what all workers have said, and act on it.

        Args:
            seconds: what the latest known iteration took, 0 if none is known.
            rows: each worker's row, by rank; None where nothing was said.

        Returns:
            Whether iterations before this moment say nothing about those that follow.
        """

    def row(self) -> Sequence[float]:
        """Return what this worker has to say of the iteration; empty for nothing.

        As many numbers as on every other worker.
        """


class Control:
    """Lets one controller after the other decide: first whether the codec stays on.

    Attributes:
        trial: whether the codec makes iterations shorter; None where it is not asked.
        tuning: how large buckets are; None where that is given.
        merging: which layers are merged; None where that is given.
        thresholds: what divides the classes of flows; None where that is given.

    Raises:
        UsageError: thresholds are to be tuned, and the exchange has no traffic classes.
    """

    def __init__(
        self,
        choices: Choices,
        bucketing: Bucketing,
        compression: Compression,
        collectives: Collectives,
        exchange: object,
    ) -> None:
        world = collectives.world
        self.trial: CodecTrial | None = None
        self.tuning: SizeTuning | None = None
        self.merging: LayerMerging | None = None
        self.thresholds: ThresholdTuning | None = None
        coded = compression.coded
        if coded is not None and coded.auto_disable:
            self.trial = CodecTrial(compression, world.rank, world.size)
        if choices.tuning is not None:
            self.tuning = SizeTuning(choices.tuning, choices, bucketing, collectives)
        if choices.merging is not None:
            self.merging = LayerMerging(
                choices.merging, choices, bucketing, compression, collectives, self.trial is None
            )
        if choices.servers is not None and choices.servers.tuning is not None:
            if not isinstance(exchange, Prioritised):
                raise UsageError(
                    f'threshold="tuned": {type(exchange).__name__} has no traffic classes; use '
                    "wingbeat.Geryon(), or leave threshold out"
                )
            self.thresholds = ThresholdTuning(choices, bucketing, collectives, exchange)
        self._collectives = collectives
        self._stopwatch = Stopwatch(bucketing.device)
        self._said: list[tuple[Controller, int]] = []
        self._rows: Rows | None = None

    def deciding(self) -> bool:
        """Whether it is still being found out how to train."""
        trying = self.trial is not None and self.trial.active()
        if self.merging is not None and self.merging.deciding():
            return True
        trying = trying or (self.thresholds is not None and self.thresholds.active())
        return trying or (self.tuning is not None and not self.tuning.done)

    def decisions(self) -> Decisions:
        """Return what has been found out, once it is no longer `deciding`."""
        trial, tuning, merging = self.trial, self.tuning, self.merging
        planned = None if merging is None else merging.planned
        return Decisions(
            coded=None if trial is None else trial.coded,
            bucket_bytes=None if tuning is None else tuning.bucket_bytes,
            topology=None if tuning is None else tuning.topology or None,
            merged=None if merging is None else merging.probe,
            buckets=None if planned is None else len(planned.timeline.rows),
            rules=None if merging is None else merging.chosen,
            thresholds=None if self.thresholds is None else self.thresholds.thresholds,
        )

    def keep(self, known: Decisions) -> None:
        """Train as an earlier one that was alike has decided; on all workers, before training.

        Raises:
            PeerError: a worker failed meanwhile, or rank 0's plan has no meaning.
        """
        if self.trial is not None and known.coded is not None:
            self.trial.decide(known.coded)
        if self.tuning is not None and known.bucket_bytes is not None:
            self.tuning.decide(known.bucket_bytes, known.topology or self.tuning.topology)
        if self.merging is not None and known.merged is not None:
            self.merging.decide(known.merged)
        if self.thresholds is not None and known.thresholds is not None:
            self.thresholds.decide(known.thresholds)

    def boundary(self) -> None:
        """Between two iterations: hear what was said, and let everyone act on it.

        Raises:
            PeerError: a worker failed, or sent something that has no meaning.
        """
        said, self._said = self._said, []
        rows, self._rows = self._rows, None
        controllers = self._controllers()
        if not controllers and not said:
            return
        seconds = self._stopwatch.lap()
        heard: dict[Controller, list[list[float]]] = {}
        if rows is not None:
            whole, start = rows.wait(), 0
            for controller, width in said:
                heard[controller] = whole[:, start : start + width].tolist()
                start += width
        for controller in controllers:
            if controller.boundary(seconds, heard.get(controller)):
                # On a GPU laps from before may still be under way.
                self._stopwatch.restart()

    def exchange(self) -> None:
        """Give everyone this worker's row; once in each backward, on every worker."""
        row: list[float] = []
        for controller in self._controllers():
            part = controller.row()
            if part:
                self._said.append((controller, len(part)))
                row += part
        if row:
            self._rows = Rows(self._collectives, row, "control")

    def _controllers(self) -> list[Controller]:
        """Return who counts at present: what changes iterations is tried alone.

        First whether a codec stays, then the size of buckets, which thresholds divide. While these
        are tried, iterations change for another reason than drift.
        """
        if self.trial is not None and self.trial.active():
            return [self.trial]
        sized = self.tuning is None or self.tuning.done
        if sized and self.thresholds is not None and self.thresholds.active():
            return [self.thresholds]
        others: tuple[Controller | None, ...] = (self.tuning, self.merging)
        return [each for each in others if each is not None and each.active()]
