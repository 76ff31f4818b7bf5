"""The machine that a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import psutil


def describe() -> dict[str, Any]:
    """Processor, cores, memory in bytes, kernel, and how busy the machine was (1 minute load)."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
    }


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
