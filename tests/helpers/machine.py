"""What the machine under the tests has done meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

TRIES = 5
"""Of what needs a machine whose host leaves it its processors, before it is given up."""

DENIED = f"others had this machine's processors in each of {TRIES} tries"


def stolen_seconds() -> float:
    """Since boot, over all processors: time this machine wanted and its host gave to others.

    Nothing runs then, no timer fires, and no test can tell it from slowness. 0 where the kernel
    does not say.
    """
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(words[8]) / os.sysconf("SC_CLK_TCK")
