"""Slices that a worker has pushed or pulled together, and who waits for them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wingbeat.collectives.threads import run_callback
from wingbeat.errors import PeerError
from wingbeat.exchanges.part import Part
from wingbeat.servers.documents import Document
from wingbeat.servers.protocol import Kind
from wingbeat.transport.messages.frames import Posted


@dataclass(eq=False, slots=True)
class Request:
    """Slices that were pushed, or pulled, together: what a `Handle` is to whoever waits.

    Attributes:
        kind: push, store, pull and so on.
        dtype: of the elements.
        parts: the slices.
        what: what messages call all of them.
        finish: called by the thread that serves when all sums have come, before anybody hears so.
        documents: what servers have said of their state, by the ids of what was asked.
    """

    kind: Kind
    dtype: str
    parts: Sequence[Part]
    what: str
    finish: Callable[[], None] = lambda: None
    missing: int = 0
    error: PeerError | None = None
    posted: list[Posted] = field(default_factory=list)
    documents: dict[tuple[int, ...], Document] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _callbacks: list[Callable[[Request], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting."""
        return self._over.is_set()

    def add_done_callback(self, callback: Callable[[Request], None]) -> None:
        """Have ``callback(request)`` called once, when it is done or has failed."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        run_callback(lambda: callback(self))

    def wait(self) -> None:
        """Block until all sums are in the buffer, or all that was stored has arrived.

        Raises:
            PeerError: a server or a worker failed; names it.
        """
        # The thread that serves has the deadlines, and ends every request.
        self._over.wait()
        if self.error is not None:
            raise PeerError(str(self.error))

    wait_received = wait

    def end(self, error: PeerError | None = None) -> None:
        """Let whoever waits go on; for the thread that serves."""
        with self._lock:
            self.error = error
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(functools.partial(callback, self))
