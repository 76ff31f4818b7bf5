"""How much may be under way on an interface, so that a slow one has no long queue. Pure."""

from __future__ import annotations

TARGET_S = 0.25
"""Seconds that a part may take to arrive: signs of life wait behind it."""

START, LEAST, MOST = 1 << 16, 1 << 15, 1 << 26
"""Bytes at first, at least and at most."""


class Window:
    """Grows while parts arrive soon, and shrinks where they wait, as LEDBAT's does (RFC 6817).

    Links that are slow or shared are found out by how long parts take: to the next worker's hands,
    so another's traffic on the way counts as well.

    Attributes:
        nbytes: that may be under way.
    """

    def __init__(self) -> None:
        self.nbytes = START
        self._shrunk = float("-inf")

    def arrived(self, nbytes: int, seconds: float, now: float, *, full: bool) -> None:
        """Learn from what has arrived.

        Args:
            nbytes: how much that was.
            seconds: how long it took.
            now: by the clock.
            full: whether as much was under way as may be; else nothing is learnt of growing.
        """
        if seconds < TARGET_S:
            if full:
                self.nbytes = min(MOST, self.nbytes + nbytes)
        elif seconds > 2 * TARGET_S and now - self._shrunk > seconds:
            self.nbytes = max(LEAST, int(self.nbytes * TARGET_S / seconds))
            self._shrunk = now

    @property
    def part(self) -> int:
        """Bytes that a part should have at most: several are to be under way."""
        return max(1 << 14, self.nbytes // 4)
