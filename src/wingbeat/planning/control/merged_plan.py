"""The plan of merged layers in force: what it should bring, and what it brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wingbeat.planning.plans import merge
from wingbeat.planning.probe.model import Probe
from wingbeat.types import Plan

OFF = 0.1
"""A prediction that misses what is measured by more than this share of it is worth a line."""


@dataclass
class MergedPlan:
    """A plan, its prediction, and what iterations take under it.

    Attributes:
        rules: names of the rules that make it.
        plan: which tensors share a bucket.
        timeline: what is predicted of backward.
        predicted_s: seconds of an iteration.
        measured_s: the same as measured, 0.0 before.
    """

    rules: tuple[str, ...]
    plan: Plan
    timeline: merge.Timeline
    predicted_s: float
    measured_s: float = 0.0

    @property
    def error(self) -> float | None:
        """How much the prediction is off, as a share of what was measured; None before."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None

    def off(self, measured_s: float) -> bool:
        """Hear what iterations take; return whether the prediction turns out to be off, once."""
        first = not self.measured_s
        self.measured_s = measured_s
        return first and self.error is not None and abs(self.error) > OFF

    def explain(self) -> str:
        """Say in one line what was predicted, and what is measured."""
        return (
            f"iterations take {1e3 * self.measured_s:.4g} ms with {len(self.timeline.rows)} merged "
            f"layers, and were predicted at {1e3 * self.predicted_s:.4g} ms "
            f"({100 * (self.error or 0.0):+.0f}%)"
        )

    def report(self, probe: Probe) -> dict[str, Any]:
        """Return all of it as plain values, with what it was planned from."""
        timeline = self.timeline
        return {
            "rules": list(self.rules),
            "buckets": len(timeline.rows),
            "tensors": len(probe.tensors),
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s or None,
            "prediction_error": self.error,
            "rest_s": probe.rest_s,
            "backward_s": timeline.backward_s,
            "encode_s": timeline.encode_s,
            "delay_s": timeline.delay_s,
            "exposed_s": timeline.exposed_s,
            "encode": probe.encode.to_json(),
            "exchange": probe.exchange.to_json(),
            "gather": None if probe.gather is None else probe.gather.to_json(),
            "cpu": None if probe.cpu is None else probe.cpu.to_json(),
            "contention": probe.contention,
            "fit_error": probe.exchange.error,
            "tried": [
                {"rules": list(t.rules), "buckets": len(t.stops), "iteration_s": t.seconds}
                for t in probe.tried
            ],
        }
