"""What one worker has found out about the servers, for all others: by the rendezvous store.

Who has started a server sees at once that its process has ended; the others would learn of it only
by its silence, and a server that is gone can tell nobody.
"""

from __future__ import annotations

import contextlib
import threading

from wingbeat.methods.parameter_server.protocol import TEXT
from wingbeat.transport.background import BackgroundThread
from wingbeat.transport.store import Store


def printable(text: bytes) -> str:
    """Return what somebody has sent as a reason, fit for a line."""
    said = text[:TEXT].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in said)


class News:
    """Tells the other workers why there are no more sums, and hears it from them.

    The store may be gone, and its answer late, with whom the news is about: so it is asked in a
    thread of its own, and nobody waits for that.

    Args:
        store: where all workers look.
        key: under which it is said; the first that says something is heard.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._asked = threading.Event()
        self._text: str | None = None
        self._mine: str | None = None
        self._closed = False
        self._thread = BackgroundThread(self._run, "wingbeat-news")

    def tell(self, text: str) -> None:
        """Let the others know; returns at once."""
        self._mine = text
        self._ask()

    def hear(self) -> str | None:
        """Return what somebody has told, as far as is known; have it looked after."""
        if self._text is None:
            self._ask()
        return self._text

    @property
    def failure(self) -> str:
        """How the thread has ended by an exception; empty if it has not."""
        return self._thread.failure

    def close(self, seconds: float) -> None:
        """End it, when what was to be told is; or after ``seconds``."""
        self._closed = True
        self._asked.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _ask(self) -> None:
        if not self._closed:
            if self._thread.ident is None:
                self._thread.start()
            self._asked.set()

    def _run(self) -> None:
        while not self._closed or self._mine is not None:
            self._asked.wait()
            self._asked.clear()
            # A store that is gone: whoever waits finds out by the servers' silence.
            with contextlib.suppress(RuntimeError, OSError, TimeoutError):
                self._look()

    def _look(self) -> None:
        mine, self._mine = self._mine, None
        if self._store.has(self._key):
            self._text = printable(self._store.get(self._key, 1.0).encode())
        elif mine is not None:
            self._store.set(self._key, mine)
