"""The protocol of workers and parent: marked JSON lines on standard output, and file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARK = "@wingbeat-bench "
"""The prefix of a message; every other line is the worker's own output."""


def send_message(kind: str, **values: Any) -> None:
    """Send one message."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def parse_message(line: str) -> dict[str, Any] | None:
    """Parse a message; None for other output and for truncated lines."""
    if not line.startswith(MARK):
        return None
    try:
        message = json.loads(line[len(MARK) :])
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and "kind" in message else None


WHOLE = "whole"
"""A complete row, as opposed to ``ONLY``."""

ONLY = ("RS-only", "AG-only")
"""A row of DeAR without one half of its exchange, by the names of the paper's Fig. 8."""


def part(folder: Path, row: int, worker: int, variant: str = WHOLE) -> Path:
    """The file of one worker's events of one row, until the parent merges them."""
    return folder / f"row{row}-{variant}-worker{worker}.json"
