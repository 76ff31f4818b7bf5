"""What one thread rings, and another hears while it waits for sockets."""

from __future__ import annotations

import os
import threading


class Alarm:
    """A pipe to oneself: rung by any thread, watched by the one that polls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hears, self._rings = os.pipe()
        os.set_blocking(self._hears, False)
        self._rung = False
        self._closed = False

    def fileno(self) -> int:
        """Return what can be read from once it has rung."""
        return self._hears

    def ring(self) -> None:
        """End the wait; once, however often it rings before it is heard. Nothing when closed."""
        with self._lock:
            if not self._rung and not self._closed:
                self._rung = True
                os.write(self._rings, b"!")

    def heard(self) -> None:
        """Get ready for the next time."""
        with self._lock:
            if self._rung and not self._closed:
                self._rung = False
                os.read(self._hears, 1)

    def close(self) -> None:
        """Close the pipe. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._hears)
                os.close(self._rings)
