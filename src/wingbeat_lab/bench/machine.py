"""The machine that a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Any

import psutil

STOLEN_MUCH = 0.03
"""Share of the processors' time from which a table says so."""


def describe() -> dict[str, Any]:
    """Processor, cores, memory in bytes, kernel, and how busy the machine was (1 minute load)."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
    }


def stolen_seconds() -> float:
    """Since boot, over all processors: time this machine wanted and its host gave to others.

    Nothing runs then and no timer fires. 0 where the kernel does not say.
    """
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class StolenShare:
    """Share of the processors' time that others had since this was made, from 0 to 1."""

    def __init__(self) -> None:
        self._began, self._stolen = time.monotonic(), stolen_seconds()

    def __call__(self) -> float:
        """Return it."""
        wall = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, stolen_seconds() - self._stolen) / max(wall, 1e-9))


def disturbed(*abouts: dict[str, Any]) -> str:
    """Return a line about figures that others have spoiled; empty where they have not.

    Args:
        abouts: what `describe` said, and with it ``stolen_share``, of each run that is shown.
    """
    share = max(about.get("stolen_share", 0.0) for about in abouts)
    if share < STOLEN_MUCH:
        return ""
    return (
        f"other machines on this host had {share:.0%} of the processors' time meanwhile: "
        "times are too long, ratios uncertain; measure again"
    )


def versions() -> dict[str, str]:
    """Versions of what decides a figure, without importing any of it."""
    out = {"python": platform.python_version()}
    for name in ("wingbeat", "torch", "numpy"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed as a package"
    return out


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
