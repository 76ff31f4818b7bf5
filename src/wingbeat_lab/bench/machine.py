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
OTHERS_MUCH = 0.1
"""Share of other processes' time from which a table warns; the system's own daemons have 1%."""


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


def others_seconds() -> float:
    """CPU seconds since boot of all processes but this one and those that it has waited for."""
    whole, own = psutil.cpu_times(), os.times()
    return float(whole.user + whole.nice + whole.system) - sum(own[:4])


class Disturbances:
    """Shares of the processors that others had since this object was created, from 0 to 1."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._stolen, self._others = stolen_seconds(), others_seconds()

    def __call__(self) -> dict[str, float]:
        """Return ``stolen_share``, of other machines, and ``others_share``, of other processes.

        The processes whose figures count must have ended, and this process have waited for them.
        """
        wall = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        found = {
            "stolen_share": stolen_seconds() - self._stolen,
            "others_share": others_seconds() - self._others,
        }
        return {name: min(1.0, max(0.0, it) / max(wall, 1e-9)) for name, it in found.items()}


def disturbed(*abouts: dict[str, Any]) -> list[str]:
    """Return a warning for each kind of disturbance of the figures.

    ``abouts`` has, for each shown run, the result of `describe` and `Disturbances`.
    """
    stolen, others = (
        max(about.get(name, 0.0) for about in abouts) for name in ("stolen_share", "others_share")
    )
    found = []
    if stolen >= STOLEN_MUCH:
        found.append(f"other machines on this host had {stolen:.0%}")
    if others >= OTHERS_MUCH:
        found.append(f"other processes on this machine had {others:.0%}")
    return [
        f"{each} of the processors' time meanwhile: times are too long, ratios uncertain; "
        "measure again"
        for each in found
    ]


def versions() -> dict[str, str]:
    """Versions of the packages that affect a figure, without importing them."""
    out = {"python": platform.python_version()}
    for name in ("wingbeat", "torch", "numpy"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed as a package"
    return out
