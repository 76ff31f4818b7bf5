"""The machine that a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Any

import psutil

from wingbeat.profiling.processor import processor_name

STOLEN_MUCH = 0.03
"""Share of the processors' stolen time from which a table warns."""


def describe() -> dict[str, Any]:
    """Processor, cores, memory in bytes, kernel, and 1-minute load."""
    return {
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
    }


def stolen_seconds() -> float:
    """Stolen CPU seconds since boot: time that this machine requested and its host gave to others.

    Nothing runs during stolen time and no timer fires. 0 if the kernel does not report it.
    """
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class StolenShare:
    """Share of stolen CPU time since this object was created, from 0 to 1."""

    def __init__(self) -> None:
        self._began, self._stolen = time.monotonic(), stolen_seconds()

    def __call__(self) -> float:
        """Return the share."""
        wall = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, stolen_seconds() - self._stolen) / max(wall, 1e-9))


def disturbed(*abouts: dict[str, Any]) -> str:
    """Return a warning if stolen time has disturbed the figures; empty otherwise.

    ``abouts`` has, for each shown run, the result of `describe` and its ``stolen_share``.
    """
    share = max(about.get("stolen_share", 0.0) for about in abouts)
    if share < STOLEN_MUCH:
        return ""
    return (
        f"other machines on this host had {share:.0%} of the processors' time meanwhile: "
        "times are too long, ratios uncertain; measure again"
    )


def versions() -> dict[str, str]:
    """Versions of the packages that affect a figure, without importing them."""
    out = {"python": platform.python_version()}
    for name in ("wingbeat", "torch", "numpy"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed as a package"
    return out
