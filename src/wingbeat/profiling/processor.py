"""The name of this machine's processor. No torch."""

from __future__ import annotations

import platform


def processor_name() -> str:
    """Return the model of the processor, or its architecture if that is unknown."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
