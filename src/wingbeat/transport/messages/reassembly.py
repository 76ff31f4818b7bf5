"""Reassembly of a payload that is sent in several messages. Pure."""

from __future__ import annotations

from typing import Any


class Reassembly:
    """A buffer of ``nbytes`` bytes, filled in order; ``data`` is valid once `complete`."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self._filled = 0

    def append(self, fragment: Any) -> None:
        """Append a fragment; a `ValueError` if it is empty or exceeds the rest of the payload."""
        end = self._filled + len(fragment)
        if end > len(self.data) or not len(fragment):
            raise ValueError(
                f"received {len(fragment)} bytes where {len(self.data) - self._filled} remain"
            )
        self.data[self._filled : end] = fragment
        self._filled = end

    @property
    def complete(self) -> bool:
        """Whether all fragments have been received."""
        return self._filled == len(self.data)
