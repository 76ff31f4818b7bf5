"""Training in virtual time: the same schedules and the same machine as a real run."""

from __future__ import annotations

from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.model import Model, TimedLayer, of_profile
from wingbeat.simulator.run import Run, simulate
from wingbeat.simulator.thresholds import Thresholds

__all__ = ["Links", "Model", "Run", "Thresholds", "TimedLayer", "Work", "of_profile", "simulate"]
