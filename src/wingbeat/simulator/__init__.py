"""Training in virtual time: the same schedules and the same machine as a real run.

The adapters of the methods stand with the methods, and import this package; what they define is
loaded here on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wingbeat.simulator.cluster import SKETCH, Coding, Links, Traffic, Work, coding_of
from wingbeat.simulator.model import Model, TimedLayer
from wingbeat.simulator.run import Run, simulate

if TYPE_CHECKING:
    from wingbeat.methods.bounded_staleness.simulated import StaleRun, simulate_bounded
    from wingbeat.methods.model_averaging.simulated import GroupRun, simulate_groups
    from wingbeat.methods.model_averaging.simulated_pairs import simulate_pairs
    from wingbeat.methods.parameter_server.simulated import Thresholds

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
    "simulate_pairs",
]

_MODULE_OF = {
    "GroupRun": "model_averaging.simulated",
    "StaleRun": "bounded_staleness.simulated",
    "Thresholds": "parameter_server.simulated",
    "simulate_bounded": "bounded_staleness.simulated",
    "simulate_groups": "model_averaging.simulated",
    "simulate_pairs": "model_averaging.simulated_pairs",
}


if not TYPE_CHECKING:  # a type checker would find every name here

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'wingbeat.simulator' has no attribute {name!r}")
        module = importlib.import_module(f"wingbeat.methods.{_MODULE_OF[name]}")
        return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
