"""What workers and parent agree on: marked JSON lines on standard output, and files' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARK = "@wingbeat-bench "
"""What a message starts with; every other line is the worker's own output."""


def say(kind: str, **values: Any) -> None:
    """Send one message."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def hear(line: str) -> dict[str, Any] | None:
    """Read a message, or None if the line is none (a worker's output, or cut short)."""
    if not line.startswith(MARK):
        return None
    try:
        message = json.loads(line[len(MARK) :])
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and "kind" in message else None


WHOLE = "whole"
"""A row as it is, as opposed to ``ONLY``."""

ONLY = ("RS-only", "AG-only")
"""A row of DeAR with one half of its exchange left out, by the names of the paper's Fig. 8."""


def part(folder: Path, row: int, worker: int, variant: str = WHOLE) -> Path:
    """Where one worker's events of one row are kept until the parent merges them."""
    return folder / f"row{row}-{variant}-worker{worker}.json"
