"""CPU time of a worker and of the processes that it has started."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """CPU seconds of this process, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def children_cpu_s() -> float:
    """CPU seconds of the current children of this process, to about a hundredth."""
    return sum(_cpu_s(fields) for fields in _stats() if int(fields[1]) == os.getpid())


def _stats() -> list[list[str]]:
    """The fields of ``/proc/PID/stat`` after the name, for each process: state, parent, ..."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = each.read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has just ended
            continue
        found.append(text.rpartition(")")[2].split())
    return found


def _cpu_s(fields: list[str]) -> float:
    user, kernel = fields[11:13]
    return (int(user) + int(kernel)) / _TICKS
