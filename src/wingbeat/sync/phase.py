"""Where the gradients of the last backward are, under DeAR."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the gradients of the last backward are."""

    IDLE = enum.auto()
    REDUCED = enum.auto()
    """Each worker has (or will have) the sum of its own blocks; ``step`` has not been called."""
    WHOLE = enum.auto()
    """Somebody wanted to see them, so that they have been gathered already."""
    LOST = enum.auto()
    """They were added to gradients that a sharded step had used up, and count for nothing."""
