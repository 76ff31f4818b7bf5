"""Failure detection between workers and servers.

Only the sender sees packet loss on a network interface. A process that waits for a message
therefore pings its peers: an undelivered ping reports the interface. A failed server cannot report
itself: the worker that started it publishes the failure in the rendezvous store.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from wingbeat.errors import PeerError
from wingbeat.methods.parameter_server.protocol import MAX_REASON, Kind, interface_of
from wingbeat.transport.services import BackgroundThread
from wingbeat.transport.store import Store

if TYPE_CHECKING:
    from wingbeat.transport.messages.frames import Posted
    from wingbeat.transport.messages.mailbox import Mailbox

_PING_AFTER_S, _PING_AFTER_PART = 0.5, 0.05


def ping_delay(timeout: float) -> float:
    """Return the seconds of silence after which peers are pinged.

    An undelivered ping is then detected before any wait times out, see `server.SILENT`.

    >>> ping_delay(300.0), ping_delay(4.0)
    (0.5, 0.2)
    """
    return min(_PING_AFTER_S, _PING_AFTER_PART * timeout)


class Pinger:
    """Pings peers, with at most one ping in flight per peer and interface."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._in_flight: dict[tuple[int, int], Posted] = {}

    def ping(self, peer: int, links: Iterable[int]) -> None:
        """Ping a peer over each of these links, unless the previous ping is still in flight."""
        reachable = self._mailbox.interfaces(peer)
        for interface in sorted({interface_of(reachable, link) for link in links}):
            last = self._in_flight.get((peer, interface))
            if last is not None and not last.arrived:
                continue
            # The mailbox itself reports a lost peer or a full window.
            with contextlib.suppress(PeerError):
                self._in_flight[peer, interface] = self._mailbox.post(
                    peer, Kind.PING, interface=interface, urgency=0, seconds=0.0
                )


def printable(text: bytes) -> str:
    """Return a received reason as one printable line."""
    reason = text[:MAX_REASON].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in reason)


class FailureNotice:
    """Publishes this worker's reason for a failure, and reads the reasons of other workers.

    The store may be slow or unreachable when a host has failed, so a separate thread accesses it.
    The first reason under the key is kept.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._requested = threading.Event()
        self._reason: str | None = None
        self._unpublished: str | None = None
        self._closed = False
        self._thread = BackgroundThread(self._run, "wingbeat-failures")

    def publish(self, reason: str) -> None:
        """Publish a reason without blocking."""
        self._unpublished = reason
        self._request()

    def poll(self) -> str | None:
        """Return the published reason as of the last access to the store; start another access."""
        if self._reason is None:
            self._request()
        return self._reason

    @property
    def failure(self) -> str:
        """The exception that ended the thread; empty if there is none."""
        return self._thread.failure

    def close(self, seconds: float) -> None:
        """Stop once the reason is published, or after ``seconds``."""
        self._closed = True
        self._requested.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _request(self) -> None:
        if not self._closed:
            if self._thread.ident is None:
                self._thread.start()
            self._requested.set()

    def _run(self) -> None:
        while not self._closed or self._unpublished is not None:
            self._requested.wait()
            self._requested.clear()
            # Without the store, workers detect a failed server by its silence.
            with contextlib.suppress(RuntimeError, OSError, TimeoutError):
                self._access()

    def _access(self) -> None:
        reason, self._unpublished = self._unpublished, None
        if self._store.has(self._key):
            self._reason = printable(self._store.get(self._key, 1.0).encode())
        elif reason is not None:
            self._store.set(self._key, reason)
