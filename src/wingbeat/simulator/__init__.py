"""Training in virtual time: the same schedules and the same machine as a real run."""

from __future__ import annotations

from wingbeat.simulator.bounded import simulate_bounded
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.colayers import SKETCH, Coding, coding_of
from wingbeat.simulator.groups import GroupRun, simulate_groups
from wingbeat.simulator.model import Model, TimedLayer
from wingbeat.simulator.run import Run, simulate
from wingbeat.simulator.staleness import StaleRun
from wingbeat.simulator.thresholds import Thresholds
from wingbeat.simulator.traffic import Traffic

__all__ = [
    "SKETCH",
    "Coding",
    "GroupRun",
    "Links",
    "Model",
    "Run",
    "StaleRun",
    "Thresholds",
    "TimedLayer",
    "Traffic",
    "Work",
    "coding_of",
    "simulate",
    "simulate_bounded",
    "simulate_groups",
]
