"""The command ``wingbeat`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def wingbeat(
    *args: str | Path,
    timeout: float = 60.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal; return its exit code and what it has written."""
    return subprocess.run(
        [sys.executable, "-m", "wingbeat", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
        cwd=cwd,
        env=env,
    )
