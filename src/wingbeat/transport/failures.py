"""Failure attribution and liveness: which worker failed first, and how long to wait for a peer.

When one worker is lost, its neighbours fail too, and theirs after them. Each worker publishes in
the store how it exits. A worker that fails publishes the peer that it was waiting for, before it
closes its connections. A worker that finds a closed connection reads these values.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from wingbeat.observe.log import log
from wingbeat.transport.incarnation import is_alive
from wingbeat.transport.text import MAX_ERROR_CHARS, describe_error, parse_number, printable

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

ANSWER_TIMEOUT_S = 2.0
"""Seconds to wait for another worker to publish its own wait."""

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a graceful shutdown after SIGTERM."""

_POLL_S = 0.02
"""Seconds between two reads of the store. The store's own wait logs a warning on each timeout."""

_MAX_OPERATION_CHARS = 80
"""Maximum characters of the operation that a peer publishes."""

_FINISHED, _FAILED = "finished", "failed"
_ABORTED = "given up"


def publish_exit(store: Store, rank: int, finished: bool) -> None:
    """Publish that ``rank`` exits: normally if ``finished``, else with an exception."""
    with contextlib.suppress(RuntimeError):  # the store may be unavailable with rank 0
        store.set(f"left/{rank}", _FINISHED if finished else _FAILED)


def publish_failure(store: Store, rank: int, error: BaseException) -> None:
    """Publish the exception that ends ``rank``. Call it before any connection is closed."""
    with contextlib.suppress(RuntimeError):
        store.set(f"failed/{rank}", describe_error(error))


def published_failure(store: Store, rank: int) -> str:
    """Return the exception that ended ``rank``, as it published it; empty if it did not."""
    if not store.has(f"failed/{rank}"):
        return ""
    try:
        # Any process may have written the text, and it becomes part of a one-line message.
        return printable(store.get(f"failed/{rank}", ANSWER_TIMEOUT_S), MAX_ERROR_CHARS)
    except TimeoutError:
        return ""


def first_failed(store: Store, ranks: Iterable[int]) -> tuple[int, str] | None:
    """Return the first of ``ranks`` that failed by itself, with its exception, or None.

    A worker that exited with a `PeerError` was waiting for another one.
    """
    failures = ((rank, published_failure(store, rank)) for rank in ranks)
    own = (each for each in failures if each[1] and not each[1].startswith("PeerError"))
    return next(own, None)


def has_exited(store: Store, rank: int) -> bool:
    """Whether ``rank`` has published that it exits, normally or not."""
    return store.has(f"left/{rank}")


def has_finished(store: Store, rank: int) -> bool:
    """Whether ``rank`` has exited normally."""
    if not has_exited(store, rank):
        return False
    try:
        return store.get(f"left/{rank}", ANSWER_TIMEOUT_S) == _FINISHED
    except TimeoutError:
        return False


def finished_peer_text(rank: int, finished: int, waiting_in: str) -> str:
    """Return the error text of ``rank``, which waits for a peer that has finished."""
    return (
        f"rank {rank}: rank {finished} has finished (its script ended, or called sys.exit() or "
        f"wingbeat.shutdown()) while this rank still trains and waits for it in {waiting_in}: "
        f"see what rank {finished} wrote last; if it had fewer batches, give each worker as many, "
        "or train inside `with model.join():`"
    )


class FailureAttribution:
    """Finds the root cause of a failure: the worker at the end of the chain of waits.

    Each worker that fails publishes the peer that it was waiting for. A worker that was itself
    waiting is not the cause; the first worker in the chain that published nothing is. All ranks are
    ranks in the world of ``size`` workers. ``timeout`` is the upper limit of each wait here, in
    seconds. ``prefix`` is the prefix of a group's keys.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, prefix: str = ""
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = min(ANSWER_TIMEOUT_S, timeout)
        self._prefix = prefix

    def publish_wait(self, peer: int, operation: str = "") -> None:
        """Publish that this rank failed while it waited for ``peer`` in ``operation``."""
        with contextlib.suppress(RuntimeError):  # the store may be unavailable
            self._store.set(f"{self._prefix}waited/{self._rank}", f"{peer} {operation}")
            if self._prefix:
                self.abort()

    def abort(self) -> None:
        """Publish that this group cannot complete any further collective."""
        with contextlib.suppress(RuntimeError):
            if not self._store.has(f"{self._prefix}{_ABORTED}"):
                self._store.set(f"{self._prefix}{_ABORTED}", str(self._rank))

    def aborted_by(self) -> int | None:
        """Return the rank that aborted this group first, or None."""
        if not self._store.has(f"{self._prefix}{_ABORTED}"):
            return None
        try:
            rank = int(self._store.get(f"{self._prefix}{_ABORTED}", self._timeout_s))
        except (TimeoutError, ValueError):
            return None
        return rank if 0 <= rank < self._size else None

    def awaited_by(self, rank: int) -> int | None:
        """Return the peer for which ``rank`` waited when it failed, or None."""
        return self._read("waited", rank)

    def has_exited(self, rank: int) -> bool:
        """As `has_exited`."""
        return has_exited(self._store, rank)

    def operation(self, rank: int) -> str:
        """Return the operation in which ``rank`` was waiting when it failed; empty if unknown."""
        if not self._store.has(f"{self._prefix}waited/{rank}"):
            return ""
        try:
            text = self._store.get(f"{self._prefix}waited/{rank}", self._timeout_s)
            return printable(text.partition(" ")[2], _MAX_OPERATION_CHARS)
        except TimeoutError:
            return ""

    def root_cause(self, peer: int) -> int:
        """Return the rank that caused the failure of this rank, which waited for ``peer``.

        If the chain of waits is a cycle through this rank, no cause can be identified and ``peer``
        is returned. In a group the first result is stored and returned by later calls.
        """
        if self._prefix and (found := self._read("culprit", self._rank)) is not None:
            return found
        found = self._end_of_chain(peer)
        if self._prefix:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._prefix}culprit/{self._rank}", str(found))
        return found

    def _end_of_chain(self, peer: int) -> int:
        first, seen = peer, {self._rank}
        while peer not in seen:
            seen.add(peer)
            next_peer = self._poll_awaited(peer)
            if next_peer is None:
                return peer
            peer = next_peer
        return first if peer == self._rank else peer

    def failure(self, rank: int) -> str:
        """As `published_failure`."""
        return published_failure(self._store, rank)

    def has_finished(self, rank: int) -> bool:
        """Whether ``rank`` has exited normally and was not waiting for a peer."""
        return has_finished(self._store, rank) and self.awaited_by(rank) is None

    def _poll_awaited(self, peer: int) -> int | None:
        """Return the peer for which ``peer`` was waiting; None if it publishes none in time."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            # In this order: a worker publishes its wait before it exits.
            is_final = has_exited(self._store, peer) or time.monotonic() >= deadline
            if self._store.has(f"{self._prefix}waited/{peer}"):
                return self._read("waited", peer)
            if is_final:
                return None
            time.sleep(_POLL_S)

    def _read(self, what: str, peer: int) -> int | None:
        """Return the rank that ``peer`` published under a name; None if missing or invalid."""
        key = f"{self._prefix}{what}/{peer}"
        if not self._store.has(key):
            return None
        try:
            text = self._store.get(key, self._timeout_s)
            next_peer = int(text.partition(" ")[0])
        except (TimeoutError, ValueError):
            return None
        return next_peer if 0 <= next_peer < self._size else None


_READ_TIMEOUT_S = 2.0
"""Seconds for the store to return a value that exists."""


def publish_wait(store: Store, rank: int, peer: int | None) -> None:
    """Publish the peer for which ``rank`` is waiting; None if it is not waiting any more."""
    with contextlib.suppress(RuntimeError, TimeoutError):  # the store may be unavailable
        store.set(f"waiting/{rank}", "" if peer is None else str(peer))


def last_awaited(store: Store, rank: int, peer: int) -> int | None:
    """Return the end of the chain of waits of ``rank`` for ``peer``; None for a cycle."""
    seen = {rank}
    while peer not in seen:
        seen.add(peer)
        next_peer = _read_awaited(store, peer)
        if next_peer is None:
            return peer
        peer = next_peer
    return None


def is_progressing(store: Store, rank: int, peer: int) -> bool:
    """Whether the worker at the end of the chain of waits of ``rank`` for ``peer`` is alive.

    A peer that evaluates or saves a checkpoint makes progress. Peers that wait for each other, for
    example after calls that differ between ranks, do not.
    """
    last = last_awaited(store, rank, peer)
    return last is not None and is_alive(store, last)


def _read_awaited(store: Store, rank: int) -> int | None:
    key = f"waiting/{rank}"
    with contextlib.suppress(RuntimeError, TimeoutError):
        text = store.get(key, _READ_TIMEOUT_S) if store.has(key) else ""
        return parse_number(text, 9)
    return None


MAX_WAIT_FACTOR = 10.0
"""Multiple of the timeout of `init` after which a live peer counts as stuck."""

LOG_INTERVAL_S = 30.0
"""Seconds between two log lines about one wait, and before the first one."""


def stuck_peer_text(me: str, peer: str, what: str, timeout: float) -> str:
    """Return the error text of a wait for a peer that is alive and does not respond."""
    return (
        f"{me}: {peer} is alive, but {what} did not come from it for "
        f"{MAX_WAIT_FACTOR * timeout:g} s ({MAX_WAIT_FACTOR:g} times the timeout of "
        "wingbeat.init()): it is blocked in another operation, such as a barrier or a deadlock; "
        "find it with `py-spy dump`, or set a longer timeout"
    )


class WaitLog:
    """Logs a long wait of ``me`` for ``what`` every 30 s.

    A peer that evaluates, saves or compiles sends nothing for long and is alive. A wait ends after
    the timeout of `init` only if the peer's process has exited or its host is unreachable.
    """

    def __init__(self, me: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._me, self._what, self._clock = me, what, clock
        self.begun = clock()
        self._logged = self.begun

    def seconds(self) -> float:
        """Return the duration of the wait."""
        return self._clock() - self.begun

    def log_if_due(self, peers: str) -> None:
        """Log the wait for ``peers`` if the interval has passed."""
        now = self._clock()
        if now - self._logged >= LOG_INTERVAL_S:
            self._logged = now
            log.warning(
                "%s: has waited for %s of %s for %d s; it is alive, so the wait goes on",
                self._me, self._what, peers, round(now - self.begun),
            )  # fmt: skip
