"""Training in virtual time: the same schedules and the same machine as a real run.

The adapters of the methods stand with the methods, and import this package. What imports an adapter
here is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.coding import SKETCH, Coding, coding_of
from wingbeat.simulator.groups import GroupRun, simulate_groups
from wingbeat.simulator.model import Model, TimedLayer
from wingbeat.simulator.run import Run, simulate
from wingbeat.simulator.thresholds import Thresholds
from wingbeat.simulator.traffic import Traffic

if TYPE_CHECKING:
    from wingbeat.methods.bounded_staleness.simulated import StaleRun
    from wingbeat.simulator.bounded import simulate_bounded

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


def __getattr__(name: str) -> Any:
    if name not in ("StaleRun", "simulate_bounded"):
        raise AttributeError(f"module 'wingbeat.simulator' has no attribute {name!r}")
    return getattr(importlib.import_module("wingbeat.simulator.bounded"), name)
