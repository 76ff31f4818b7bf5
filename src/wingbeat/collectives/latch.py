"""What opens once and lets everyone pass from then on."""

from __future__ import annotations

import threading


class Latch:
    """As `threading.Event`, which can be cleared too and costs some ten times as much to make.

    A collective has two, and a step of many small buckets hundreds of collectives.
    """

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let everyone pass. From one thread at a time; a second call changes nothing."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Block until it is open, at most for so many ``seconds``; return whether it is."""
        if not self.is_open and self._lock.acquire(timeout=seconds):
            self._lock.release()  # each who has waited lets the next one pass
        return self.is_open
