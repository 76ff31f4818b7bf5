"""Long waits in collectives: liveness checks of the peer, and comparison of the ranks' calls.

A peer that is alive may compute for long. Transfers of a world therefore have a long timeout, and a
thread aborts waits for an unresponsive peer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wingbeat.schema import printable
from wingbeat.transport.failures import (
    LOG_INTERVAL_S,
    MAX_WAIT_FACTOR,
    WaitLog,
    is_progressing,
    publish_wait,
)
from wingbeat.transport.link import Link
from wingbeat.transport.store import Store, read_value

if TYPE_CHECKING:
    from wingbeat.transport.world import World

_MAX_CALL_CHARS = 120
"""Maximum length of a call read from a peer."""


class CallTable:
    """The current calls of a world's ranks on one link, in the rendezvous store.

    The n-th collective of a link must be the same on all ranks. Only a rank that has waited for
    long publishes its calls and reads those of its peers.
    """

    def __init__(self, world: World, lane: int) -> None:
        self._store = world.store
        self._rank = world.ranks[world.rank]
        self._prefix = f"{world.path}/calls/{lane}"

    def compare(
        self, calls: Mapping[int, str], peers: Iterable[int]
    ) -> tuple[int, str, str] | None:
        """Publish this rank's ``calls`` by number and compare them with those of the peers.

        Returns the first peer with a different call of the same number, this rank's call and the
        peer's call; None if there is no difference.
        """
        mine = "\n".join(f"{number} {call}" for number, call in sorted(calls.items()))
        with contextlib.suppress(RuntimeError, TimeoutError):  # the store may have ended
            self._store.set(f"{self._prefix}/{self._rank}", mine)
            for peer in peers:
                if peer == self._rank:
                    continue
                for line in (read_value(self._store, f"{self._prefix}/{peer}") or "").splitlines():
                    number, _, theirs = printable(line[:_MAX_CALL_CHARS]).partition(" ")
                    call = calls.get(int(number)) if number.isdecimal() else None
                    if call is not None and theirs != call:
                        return peer, call, theirs
        return None


_CHECK_INTERVAL_S = 0.25
"""Seconds between checks of the waits of this process."""

_LIVENESS_INTERVAL_S = 5.0
"""Maximum seconds between liveness checks of a peer."""

_PROBED_AFTER_S = 1.0
"""Seconds of a wait before the peer's response is checked, and between two checks."""

SILENT_S = 3.0
"""Seconds without a response after which a group ends that can continue without the peer."""


class CurrentWait(NamedTuple):
    """A wait for job rank ``peer`` on ``link``, in operation ``what``."""

    peer: int
    what: object
    link: Link


class HasWait(Protocol):
    """An object with a wait in progress, such as an executor."""

    @property
    def waiting(self) -> CurrentWait | None:
        """The current wait: the same object until it ends."""


class WaitMonitor:
    """Monitors the waits of one thread, whose current wait is ``of.waiting``.

    ``store`` needs a connection on which no other call blocks. A wait ends after ``timeout``
    seconds without a sign of life from the peer; without a store after ``timeout`` seconds, and
    before if ``responds`` is false for the peer for `SILENT_S`. ``of`` is held by a weak reference.
    ``why`` is the reason for which the last wait was aborted, or empty.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        timeout: float,
        of: HasWait,
        responds: Callable[[int], bool] | None = None,
    ) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._responds = responds
        self._of = weakref.ref(of)
        self._now: CurrentWait | None = None
        self._wait = WaitLog("", "")
        self._last_alive = self._last_check = 0.0
        self._published = False
        self.why = ""

    def check(self) -> None:
        """Abort the current wait if the peer is unresponsive or blocked for too long."""
        of = self._of()
        waiting = None if of is None else of.waiting
        if waiting is not self._now:
            self._begin(waiting)
        elif waiting is not None and not self.why:
            self._continue(waiting)

    def _begin(self, waiting: CurrentWait | None) -> None:
        if self._published and self._store is not None:
            self._published = False
            publish_wait(self._store, self._rank, None)
        self._now, self.why = waiting, ""
        if waiting is not None:
            self._wait = WaitLog(f"rank {self._rank}", str(waiting.what))
            self._last_alive = self._last_check = self._wait.begun

    def _continue(self, waiting: CurrentWait) -> None:
        lasted = self._wait.seconds()
        if self._store is None:
            if lasted > self._timeout:
                self.why = f"Timed out: nothing arrived for {self._timeout:g} s"
            elif self._responds is not None and lasted >= _PROBED_AFTER_S:
                self._check_response(self._responds, waiting.peer)
        elif lasted >= min(self._timeout / 2, LOG_INTERVAL_S):
            self._check_liveness(self._store, waiting.peer, lasted)
        if self.why:
            waiting.link.abort_waits()

    def _check_response(self, responds: Callable[[int], bool], peer: int) -> None:
        begun = time.monotonic()
        if begun - self._last_check < _PROBED_AFTER_S:
            return
        if responds(peer):
            self._last_alive = begun
        # The time of a probe without an answer, which is some seconds, counts.
        self._last_check = now = time.monotonic()
        if now - self._last_alive >= SILENT_S:
            self.why = f"Timed out: no sign of life for {now - self._last_alive:.1f} s"

    def _check_liveness(self, store: Store, peer: int, lasted: float) -> None:
        if not self._published:
            self._published = True
            publish_wait(store, self._rank, peer)
        now = time.monotonic()
        if now - self._last_check >= min(self._timeout / 8, _LIVENESS_INTERVAL_S):
            self._last_check = now
            if is_progressing(store, self._rank, peer):
                self._last_alive = now
                self._wait.log_if_due(f"rank {peer}")
        if now - self._last_alive > self._timeout:
            self.why = f"Timed out: no sign of life for {self._timeout:g} s"
        elif lasted > MAX_WAIT_FACTOR * self._timeout:
            self.why = (
                f"Timed out: it is alive, but blocked elsewhere for {MAX_WAIT_FACTOR:g} times the "
                "timeout of wingbeat.init(); find the place with `py-spy dump`"
            )


_monitors: weakref.WeakSet[WaitMonitor] = weakref.WeakSet()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def start_monitoring(each: WaitMonitor) -> None:
    """Check the monitor periodically in a background thread while the monitor exists."""
    global _thread
    with _starting:
        _monitors.add(each)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="wingbeat-waits", daemon=True)
            _thread.start()


def stop_monitoring(each: WaitMonitor) -> None:
    """Stop checking the monitor. The background thread ends with the last monitor."""
    _monitors.discard(each)


def _run() -> None:
    global _thread
    while True:
        time.sleep(_CHECK_INTERVAL_S)
        with _starting:
            if not _monitors:
                _thread = None
                return
        for each in list(_monitors):
            with contextlib.suppress(RuntimeError, OSError):  # the store is being closed
                each.check()


def _after_fork() -> None:
    global _thread, _starting
    _thread, _starting = None, threading.Lock()
    _monitors.clear()


os.register_at_fork(after_in_child=_after_fork)
