"""Online control: one small exchange for all measurements and decisions during training.

Each worker contributes one row of numbers per iteration and receives all rows. The exchange is part
of the backward pass, in the plan's order. All workers read the same rows before the same backward,
so their settings always agree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from wingbeat.collectives import Collectives, Rows
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import UsageError
from wingbeat.parts.strategy import Strategy
from wingbeat.planning.controllers import (
    BucketSizeController,
    CompressionController,
    Prioritized,
    Scheduled,
    StrategyController,
    ThresholdController,
)
from wingbeat.planning.merging import LayerMerging
from wingbeat.planning.probe import Probe


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions of one training, for a later equal one; None where nothing was decided.

    ``merged`` is the probe from which merge plans were made, and ``rules`` name those of the chosen
    plan. ``strategy`` is the name of the chosen candidate of `wingbeat.Auto`.
    """

    coded: bool | None = None
    bucket_bytes: int | None = None
    topology: str | None = None
    merged: Probe | None = None
    buckets: int | None = None
    rules: tuple[str, ...] | None = None
    thresholds: tuple[float, ...] | None = None
    strategy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the decisions as JSON values, without those that are None."""
        found = {
            "codec": None if self.coded is None else "on" if self.coded else "off",
            "bucket_bytes": self.bucket_bytes,
            "topology": self.topology,
            "buckets": self.buckets,
            "rules": None if self.rules is None else list(self.rules),
            "thresholds": None if self.thresholds is None else list(self.thresholds),
            "strategy": self.strategy,
        }
        return {key: value for key, value in found.items() if value is not None}


class IterationTimer:
    """Measures the time from one `lap` to the next, without waiting for a device.

    The host runs ahead of a GPU, where a lap is the time between two events of the current stream
    and becomes known some laps later.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks: deque[Any] = deque()
        self._device, self._on_device = device, device.type != "cpu"
        self._seconds = 0.0

    def lap(self) -> float:
        """Begin the next lap; return the seconds of the latest known one, 0.0 if there is none."""
        self._marks.append(self._mark())
        while len(self._marks) > 1 and (not self._on_device or self._marks[1].query()):
            begin, end = self._marks.popleft(), self._marks[0]
            self._seconds = begin.elapsed_time(end) / 1e3 if self._on_device else end - begin
        return self._seconds

    def restart(self) -> None:
        """Discard earlier laps, including those that a device has not completed."""
        while len(self._marks) > 1:
            self._marks.popleft()
        self._seconds = 0.0

    def _mark(self) -> Any:
        if not self._on_device:
            return time.monotonic()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


class Controller(Protocol):
    """A decision that follows from iteration times."""

    @property
    def done(self) -> bool:
        """Whether no decision is open."""

    def boundary(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Process the rows of all workers between two iterations, None without an exchange.

        Return whether earlier iteration times are invalid for the following ones.
        """

    def row(self, seconds: float) -> Sequence[float]:
        """Return this worker's numbers, as many as on every other worker; empty for none.

        ``seconds`` are those of the last iteration under the present decisions, 0.0 if unknown.
        """


class Controlled(Scheduled, Protocol):
    """What control changes: a schedule, and an exchange, which may have priority classes."""

    exchange: Any


class Control:
    """Runs one controller after the other: compression, buckets, thresholds.

    Buckets are tuned, merged, or chosen with a schedule.

    Thresholds cannot be tuned for an exchange without priority classes: a `UsageError`.
    """

    def __init__(
        self,
        strategy: Strategy,
        bucketing: Bucketing,
        compression: Compression,
        collectives: Collectives,
        runtime: Controlled,
    ) -> None:
        world = collectives.world
        self.trial: CompressionController | None = None
        self.tuning: BucketSizeController | None = None
        self.merging: LayerMerging | None = None
        self.thresholds: ThresholdController | None = None
        self.choosing: StrategyController | None = None
        exchange = runtime.exchange
        coded = compression.coded
        if coded is not None and coded.auto_disable:
            self.trial = CompressionController(compression, world.rank, world.ranks)
        tuning, merging = strategy.plan.tuning(), strategy.plan.merging()
        chosen = strategy.plan.choosing()
        if chosen is not None:
            self.choosing = StrategyController(
                chosen, strategy, bucketing, compression, collectives, runtime
            )
        if tuning is not None:
            self.tuning = BucketSizeController(tuning, strategy, bucketing, collectives)
        if merging is not None:
            self.merging = LayerMerging(
                merging, strategy, bucketing, compression, collectives, self.trial is None
            )
        if strategy.exchange.tuned:
            if not isinstance(exchange, Prioritized):
                raise UsageError(
                    f'threshold="tuned": {type(exchange).__name__} has no traffic classes; use '
                    "wingbeat.Geryon(), or leave threshold out"
                )
            self.thresholds = ThresholdController(strategy, bucketing, collectives, exchange)
        self._compression, self._collectives = compression, collectives
        self._timer = IterationTimer(bucketing.device)
        self._seconds = 0.0
        self._sent: list[tuple[Controller, int]] = []
        self._rows: Rows | None = None

    def compare(self) -> str:
        """Return what is known of an iteration with DDP's schedule, as a phrase; or nothing.

        Only `wingbeat.Auto` measures it. Predictions from the costs of merged layers missed it by
        more than a tenth, so there are none.
        """
        return "" if self.choosing is None else self.choosing.compare()

    def deciding(self) -> bool:
        """Return whether a decision is still open."""
        controllers = (self.trial, self.choosing, self.tuning, self.merging, self.thresholds)
        return any(each is not None and not each.done for each in controllers)

    def decisions(self) -> Decisions:
        """Return the decisions; final once `deciding` is False."""
        trial, tuning, merging = self.trial, self.tuning, self.merging
        plan = None if merging is None else merging.plan
        return Decisions(
            coded=None if trial is None else self._compression.on,
            bucket_bytes=None if tuning is None else tuning.bucket_bytes,
            topology=None if tuning is None else tuning.topology or None,
            merged=None if merging is None else merging.probe,
            buckets=None if plan is None else len(plan.timeline.buckets),
            rules=None if merging is None else merging.chosen,
            thresholds=None if self.thresholds is None else self.thresholds.thresholds,
            strategy=None if self.choosing is None else self.choosing.name,
        )

    def keep(self, known: Decisions) -> None:
        """Apply the decisions of an earlier training; on all workers, before training."""
        if self.trial is not None and known.coded is not None:
            self.trial.decide(known.coded)
        if self.tuning is not None and known.bucket_bytes is not None:
            self.tuning.decide(known.bucket_bytes, known.topology or self.tuning.topology)
        if self.merging is not None and known.merged is not None:
            self.merging.decide(known.merged)
        if self.choosing is not None and known.strategy is not None:
            self.choosing.decide(known.strategy)
        if self.thresholds is not None and known.thresholds is not None:
            self.thresholds.decide(known.thresholds)

    def boundary(self) -> None:
        """Process the rows of the last exchange between two iterations."""
        sent, self._sent = self._sent, []
        rows, self._rows = self._rows, None
        controllers = self._controllers()
        if not controllers and not sent:
            return
        self._seconds = seconds = self._timer.lap()
        received: dict[Controller, list[list[float]]] = {}
        if rows is not None:
            whole, start = rows.wait(), 0
            for controller, width in sent:
                received[controller] = whole[:, start : start + width].tolist()
                start += width
        for controller in controllers:
            if controller.boundary(seconds, received.get(controller)):
                # On a GPU earlier laps may be incomplete.
                self._timer.restart()
                self._seconds = 0.0

    def exchange(self) -> None:
        """Send this worker's row to all; once in each backward, on every worker."""
        row: list[float] = []
        for controller in self._controllers():
            part = controller.row(self._seconds)
            if part:
                self._sent.append((controller, len(part)))
                row += part
        if row:
            self._rows = Rows(self._collectives, row, "control")

    def _controllers(self) -> list[Controller]:
        """Return the controllers that run now.

        Decisions that change iterations run alone: drift detection would misread the changes.
        """
        if self.trial is not None and not self.trial.done:
            return [self.trial]
        tuning = self.tuning
        if self.thresholds is not None and not self.thresholds.done and (not tuning or tuning.done):
            return [self.thresholds]
        others: tuple[Controller | None, ...] = (
            None if tuning is None or tuning.single_plan else tuning, self.merging, self.choosing,
        )  # fmt: skip
        return [each for each in others if each is not None]
