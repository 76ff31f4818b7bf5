"""How long to wait for a sign before it is missed: by the gaps there have been. Pure."""

from __future__ import annotations

TIMES = 8.0
"""How many times the longest usual gap may pass."""

_FADE = 0.95
"""What is left of a long gap's weight with each later sign."""


class Patience:
    """An adaptive deadline.

    Args:
        least: seconds that may always pass.
        most: seconds that may pass at most.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, max(least, most)
        self._longest = 0.0

    def passed(self, seconds: float) -> None:
        """Count the gap that a sign has ended."""
        self._longest = max(seconds, self._longest * _FADE)

    @property
    def seconds(self) -> float:
        """How long it may be silent now."""
        return min(max(self._least, TIMES * self._longest), self._most)
