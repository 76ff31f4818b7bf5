"""An emulated cluster on one machine: hosts, switches, link rates and priorities.

::

    from wingbeat_lab import lab
    result = lab.run("star:4@1gbit", ["python", "train.py"])
    print(result.exit_code, result.stats.hosts["h0"]["eth0"].out["all"].bytes)

Inside the lab, ``lab.counters.read()`` returns the byte counters of a worker's own host.
"""

from __future__ import annotations

from wingbeat_lab.lab import counters
from wingbeat_lab.lab.counters import ClassCounters, InterfaceCounters, LabStats, PortStats
from wingbeat_lab.lab.features import Finding, available, examine
from wingbeat_lab.lab.launch import (
    Failure,
    FaultInjector,
    RunningLab,
    RunResult,
    run,
    running,
    stats,
)
from wingbeat_lab.lab.spec import LabSpec, Override

__all__ = [
    "ClassCounters",
    "Failure",
    "FaultInjector",
    "Finding",
    "InterfaceCounters",
    "LabSpec",
    "LabStats",
    "Override",
    "PortStats",
    "RunResult",
    "RunningLab",
    "available",
    "counters",
    "examine",
    "run",
    "running",
    "stats",
]
