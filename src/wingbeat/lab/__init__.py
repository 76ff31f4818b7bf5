"""An emulated cluster on one machine: hosts, switches, link rates and priorities.

::

    from wingbeat import lab
    result = lab.run("star:4@1gbit", ["python", "train.py"])
    print(result.exit_code, result.stats.hosts["h0"]["eth0"].out["all"].bytes)

Inside the lab a worker reads its own host's byte counters with ``lab.counters.read()``.
"""

from __future__ import annotations

from wingbeat.lab import counters
from wingbeat.lab.counters import ClassCounters, InterfaceCounters, LabStats, PortStats
from wingbeat.lab.features import Finding, available, examine
from wingbeat.lab.launch import Failure, RunResult, run
from wingbeat.lab.registry import RunningLab, running, stats
from wingbeat.lab.spec import LabSpec, Override

__all__ = [
    "ClassCounters",
    "Failure",
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
