"""Sockets of connections that outlive them: which are lost or silent, and over what they continue.

A host's interface may fail while others work. A socket is lost when it ends, and silent when the
other host acknowledges nothing for `SILENT_S` while data is outstanding. Its connection then
continues over another interface, until its own works again. It has failed if no interface reaches
the process after its socket was lost; a silent one is only left if another interface works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from wingbeat.observe.log import log

SILENT_S = 3.0
"""Seconds without an acknowledgement of outstanding data."""

_POLL_S = 0.2
_DIAL_S = 1.0
"""Seconds for an address to answer."""

_LOST_S = 10.0
"""Seconds to continue a connection whose peer answers and refuses, as it may do so itself."""

_RETRY_S = 0.05
_FIRST_RETURN_S, _LAST_RETURN_S = 2.0, 60.0
"""Seconds between attempts to use an interface again, doubled if it fails soon afterwards."""


class EndedError(ConnectionError):
    """The peer has ended the connection, or is another process."""


class Silence:
    """When the other host has stopped to acknowledge what is sent to it. Times are in seconds."""

    def __init__(self) -> None:
        self._since = self._acknowledged = -1.0

    def update(self, now: float, outstanding: bool, acknowledged: int, silent_s: float) -> bool:
        """Whether it is silent. ``silent_s`` is the time since an acknowledgement of any kind.

        An acknowledgement without progress counts: the process may be slow or stopped.

        >>> one = Silence()
        >>> [one.update(now, True, 5, 99.0) for now in (10.0, 12.0, 13.0)]
        [False, False, True]
        """
        if not outstanding or acknowledged != self._acknowledged or silent_s < now - self._since:
            self._since, self._acknowledged = now, acknowledged
        return now - self._since >= SILENT_S


class Returns:
    """When to try the own interface of a connection that uses another one. Times are in seconds."""

    def __init__(self) -> None:
        self._pause, self._next, self._returned = _FIRST_RETURN_S, 0.0, float("-inf")

    def left(self, now: float) -> None:
        """Record that the own interface has failed.

        >>> one = Returns()
        >>> one.left(0.0); one.due(1.9), one.due(2.0)
        (False, True)
        >>> one.returned(2.0); one.left(5.0); one.due(8.9), one.due(9.0)
        (False, True)
        """
        soon = now - self._returned < _LAST_RETURN_S
        self._pause = min(2 * self._pause, _LAST_RETURN_S) if soon else _FIRST_RETURN_S
        self._next = now + self._pause

    def returned(self, now: float) -> None:
        """Record that the own interface is used again."""
        self._returned = now

    def due(self, now: float) -> bool:
        """Whether to try it now; each attempt is followed by a pause."""
        if now < self._next:
            return False
        self._next = now + self._pause
        return True


class Port(Protocol):
    """The connections of an interface; those of `wingbeat.transport.tcp`."""

    paths: dict[int, int]

    @property
    def nic(self) -> Health:
        """The connections of the interface."""

    def reserve(self, peer: int) -> AbstractContextManager[bool]:
        """Have nothing else connect to a rank; False if something does."""

    def continue_over(self, path: int, peer: int, seconds: float) -> None:
        """Continue a connection over another interface, or raise an `OSError`."""


class Health(Protocol):
    """What is known of connections by rank; those of the extension."""

    def health(self, peer: int, /) -> tuple[bool, bool, int, float] | None:
        """Return what `Silence.update` needs, after whether the socket is lost."""

    def give_up(self, peer: int, /) -> None:
        """Fail a connection that has lost its socket."""


class _Watched:
    """A connection: the one to ``peer`` of interface ``index``."""

    def __init__(self, index: int, peer: int) -> None:
        self.index, self.peer = index, peer
        self.path = index
        self.silence, self.returns = Silence(), Returns()
        self.next = 0.0
        self.thread: threading.Thread | None = None


class Repairs(threading.Thread):
    """Watches the connections of a rank, and continues those whose sockets are lost or silent."""

    def __init__(self, rank: int, ports: Sequence[Port], size: int) -> None:
        super().__init__(name="wingbeat-repair", daemon=True)
        self._rank, self._ports, self._ends = rank, ports, threading.Event()
        self._open = set(range(len(ports)))
        self._watched = [
            _Watched(index, peer)
            for index in range(len(ports))
            for peer in range(size)
            if peer != rank
        ]

    def run(self) -> None:
        """Watch until all ports have been ended."""
        while not self._ends.wait(_POLL_S):
            for each in self._watched:
                busy = each.thread is not None and each.thread.is_alive()
                if each.index in self._open and not busy:
                    self._check(each, time.monotonic())
        for each in self._watched:
            if each.thread is not None:
                each.thread.join()

    def end(self, index: int) -> None:
        """Stop watching the connections of a port; with the last one the thread ends."""
        self._open.discard(index)
        if not self._open:
            self._ends.set()

    @property
    def ended(self) -> bool:
        """Whether no port is left."""
        return self._ends.is_set()

    def _check(self, of: _Watched, now: float) -> None:
        port = self._ports[of.index]
        health = port.nic.health(of.peer)
        if health is None:
            return
        path = port.paths.get(of.peer, of.index)
        if path != of.path:
            of.path, of.silence = path, Silence()
            if path == of.index:
                of.returns.returned(now)
            else:
                of.returns.left(now)
        lost, outstanding, acknowledged, silent_s = health
        others = [n for n in range(len(self._ports)) if n != path]
        if lost:
            self._begin(of, [path, *others], lost=True)
        elif of.silence.update(now, outstanding, acknowledged, silent_s):
            if now >= of.next:
                of.next = now + 2 * _DIAL_S
                self._begin(of, others, lost=False)
        elif path != of.index and self._rank > of.peer and of.returns.due(now):
            self._begin(of, [of.index], lost=False)

    def _begin(self, of: _Watched, paths: Sequence[int], *, lost: bool) -> None:
        thread = threading.Thread(
            target=self._repair, args=(of, paths, lost), name="wingbeat-repair", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads; tried again
            log.warning("rank %d cannot repair connections: %s", self._rank, error)
        else:
            of.thread = thread

    def _repair(self, of: _Watched, paths: Sequence[int], lost: bool) -> None:
        port, deadline = self._ports[of.index], time.monotonic() + _LOST_S
        while True:
            with port.reserve(of.peer) as free:
                answered = not free or self._try(of, paths, lost)
            health = port.nic.health(of.peer)
            if not lost or health is None or not health[0] or of.index not in self._open:
                return
            if not answered or time.monotonic() >= deadline:
                port.nic.give_up(of.peer)
                return
            time.sleep(_RETRY_S)

    def _try(self, of: _Watched, paths: Sequence[int], lost: bool) -> bool:
        """Try interfaces in order; False if the process is not reached, or has ended it."""
        port, answered = self._ports[of.index], False
        for path in paths:
            health = port.nic.health(of.peer)
            if health is None or (lost and not health[0]) or of.index not in self._open:
                return True
            try:
                port.continue_over(path, of.peer, _DIAL_S)
            except EndedError:
                return False
            except ConnectionRefusedError as error:  # nothing listens there any more
                log.debug("rank %d: rank %d has ended: %s", self._rank, of.peer, error)
            except OSError as error:
                answered |= isinstance(error, ConnectionError)
                log.debug("rank %d does not reach rank %d: %s", self._rank, of.peer, error)
            else:
                return True
        return answered
