"""How rank 0 tells the parent where it is: one marked JSON line on standard output. No torch."""

from __future__ import annotations

import json
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
    except json.JSONDecodeError:
        return None
    return message if isinstance(message, dict) and "kind" in message else None
