"""Failure attribution and liveness: which worker failed first, and how long to wait for a peer.

When one worker is lost, its neighbours fail too, and theirs after them. Each worker publishes in
the store how it exits. A worker that fails publishes the peer that it was waiting for, before it
closes its connections. A worker that finds a closed connection reads these values.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import math
import os
import secrets
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

from wingbeat.errors import PeerError
from wingbeat.observe.log import log
from wingbeat.schema import MalformedMessage, Range, parse_json, printable
from wingbeat.transport import interfaces as nic
from wingbeat.transport.store import Store, read_value
from wingbeat.transport.text import MAX_ERROR_CHARS, describe_error, parse_number

_PROBE_TIMEOUT_S = 3.0
"""Seconds to connect to a process and to read its token."""

_RETRY_S = 0.2
_TOKEN_CHARS = 32
_MAX_HOST_CHARS = 255

_PROBES = 3
"""Attempts before an outcome other than a refused connection counts as an exited process."""


class ProcessAddress(NamedTuple):
    """Address, TCP port and token of a process that answers liveness probes."""

    host: str
    port: Annotated[int, Range(1, 1 << 16)]
    token: str

    def to_text(self) -> str:
        """Return its form in the rendezvous store."""
        return json.dumps(self)

    @staticmethod
    def from_text(text: str) -> ProcessAddress:
        """Parse the result of `to_text`; a `MalformedMessage` if it is malformed."""
        found = parse_json(ProcessAddress, text, "address")
        if len(found.token) != _TOKEN_CHARS or len(found.host) > _MAX_HOST_CHARS:
            raise MalformedMessage(f"address is {text!r:.80}")
        return found


class LivenessListener:
    """Answers liveness probes while this process holds its rank.

    It listens on the interface that reaches ``remote_host``, the host of the store. An `OSError` if
    no address of this host reaches it, or no port is free.
    """

    def __init__(self, remote_host: str) -> None:
        family, address = _own_address(remote_host)
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        port = self._socket.getsockname()[1]
        self.address = ProcessAddress(address, port, secrets.token_hex(_TOKEN_CHARS // 2))
        self._closed = False
        _listeners.add(self)
        threading.Thread(target=self._serve, name="wingbeat-incarnation", daemon=True).start()

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; close() does not
        self._socket.close()

    def _close_copy(self) -> None:
        """Close a forked child's copy of the socket; the parent's stays open."""
        self._closed = True
        self._socket.close()

    def _serve(self) -> None:
        token = self.address.token.encode()
        while not self._closed:
            try:
                caller = self._socket.accept()[0]
            except OSError:  # closed, or no free descriptor
                time.sleep(_RETRY_S)
                continue
            with caller, contextlib.suppress(OSError):
                caller.setblocking(False)
                caller.send(token)


_listeners: weakref.WeakSet[LivenessListener] = weakref.WeakSet()


def _close_copies() -> None:
    for each in list(_listeners):
        each._close_copy()


# A data loader process inherits the sockets and may outlive its parent.
os.register_at_fork(after_in_child=_close_copies)


def is_running(address: ProcessAddress) -> bool:
    """Whether the process is still running. A process on an unreachable host counts as exited."""
    return probe(address, _PROBES) is not False


def probe(address: ProcessAddress, attempts: int) -> bool | None:
    """Whether the process answers; None if it is stopped or too busy.

    Only a refused connection or another process's token is conclusive; other failures may be
    temporary and are probed again.
    """
    for attempt in range(attempts):
        if attempt:
            time.sleep(_RETRY_S)
        try:
            with socket.create_connection(
                (address.host, address.port), _PROBE_TIMEOUT_S
            ) as connection:
                reply = _read_token(connection)
        except ConnectionRefusedError as error:
            found: str | OSError = error
            break
        except OSError as error:
            found = error
            continue
        if reply is None or reply == address.token.encode():
            return True if reply else None
        found = f"another program answers there: {reply!r}"
        if len(reply) == _TOKEN_CHARS:
            break
    log.debug("no process of a rank runs at %s (port %d): %s", address.host, address.port, found)
    return False


def _read_token(connection: socket.socket) -> bytes | None:
    """Return the token of a process; None if it is stopped and only its kernel has accepted."""
    reply = b""
    try:
        while len(reply) < _TOKEN_CHARS and (more := connection.recv(_TOKEN_CHARS - len(reply))):
            reply += more
    except TimeoutError:
        return None
    return reply


def is_alive(store: Store, rank: int) -> bool:
    """Whether the process of ``rank`` is running and answers. A stopped process does not."""
    text = read_value(store, f"here/{rank}")
    try:
        return text is not None and bool(probe(ProcessAddress.from_text(text), 1))
    except ValueError:
        return False


def _own_address(remote: str) -> tuple[socket.AddressFamily, str]:
    """Return this host's address on the interface that reaches another host."""
    family, _, _, _, target = socket.getaddrinfo(remote, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # connecting a datagram socket sends nothing
        address: str = probe.getsockname()[0]
    own = nic.local().interfaces
    if _is_loopback(address) and not (remote == "localhost" or _is_loopback(remote)) and own:
        # A host's name often resolves to 127.0.1.1, which other hosts cannot reach.
        address = own[0].address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


ANSWER_TIMEOUT_S = 2.0
"""Seconds to wait for another worker to publish its own wait."""

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a graceful shutdown after SIGTERM."""

_REFUSED_S = 0.1
"""Seconds between two connections to a process that may have been killed."""

_POLL_S = 0.02
"""Seconds between two reads of the store. The store's own wait logs a warning on each timeout."""

_MAX_RANK_DIGITS = 9

_MAX_OPERATION_CHARS = 80
"""Maximum characters of the operation that a peer publishes."""

_MAX_INCARNATION_DIGITS = 9

_FINISHED, _FAILED = "finished", "failed"


def publish_incarnation(store: Store, rank: int, first: int) -> int:
    """Publish and return the number of processes that had ``rank`` before this one.

    ``first`` is the number if none had it since the store exists.
    """
    before = parse_number(read_value(store, f"incarnation/{rank}") or "", _MAX_INCARNATION_DIGITS)
    own = first if before is None else before + 1
    store.set(f"incarnation/{rank}", str(own))
    return own


def published_incarnation(store: Store, rank: int) -> int:
    """Return the number that the present or last process of ``rank`` has published; 0 without."""
    text = read_value(store, f"incarnation/{rank}") or ""
    return parse_number(text, _MAX_INCARNATION_DIGITS) or 0


def publish_exit(store: Store, rank: int, finished: bool) -> None:
    """Publish that ``rank`` exits: normally if ``finished``, else with an exception."""
    with contextlib.suppress(RuntimeError):  # the store may be unavailable with rank 0
        store.set(f"left/{rank}", _FINISHED if finished else _FAILED)


def publish_failure(store: Store, rank: int, error: BaseException) -> None:
    """Publish the exception that ends ``rank``. Call it before any connection is closed."""
    with contextlib.suppress(RuntimeError):
        store.set(f"failed/{rank}", describe_error(error))


def await_value(store: Store, key: str, rank: int, seconds: float) -> str | None:
    """Wait for a value that ``rank`` publishes before it exits.

    None if it exits or is killed without it, or if it is missing after ``seconds``.
    """
    begun = probed = time.monotonic()
    while True:
        # In this order: the value may be published meanwhile.
        now = time.monotonic()
        is_final = now >= begun + seconds or has_exited(store, rank)
        if not is_final and now >= probed + _REFUSED_S:
            probed, is_final = now, _is_refused(store, rank)
        text = read_value(store, key)
        if text is not None or is_final:
            return text
        time.sleep(_POLL_S)


def process_has_ended(store: Store, rank: int) -> bool:
    """Whether ``rank`` has published that it exits, or its host refuses connections to it."""
    return has_exited(store, rank) or _is_refused(store, rank)


def _is_refused(store: Store, rank: int) -> bool:
    """Whether the process of ``rank`` has ended for certain: its host refuses a connection."""
    try:
        address = ProcessAddress.from_text(read_value(store, f"here/{rank}") or "")
        socket.create_connection((address.host, address.port), _REFUSED_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # busy, stopped, unreachable, or of a test without processes
        pass
    return False


def published_failure(store: Store, rank: int, seconds: float = 0.0) -> str:
    """Return the exception that ended ``rank``, as it published it; empty if it did not.

    Waits up to ``seconds`` while ``rank`` has not exited.
    """
    # Any process may have written the text, and it becomes part of a one-line message.
    text = await_value(store, f"failed/{rank}", rank, seconds) or ""
    return printable(text[:MAX_ERROR_CHARS])


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
    return read_value(store, f"left/{rank}") == _FINISHED


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

    def awaited_by(self, rank: int, seconds: float = 0.0) -> int | None:
        """Return the peer for which ``rank`` waited when it failed, or None.

        Waits up to ``seconds`` while ``rank`` has not exited.
        """
        return self._parse(await_value(self._store, f"{self._prefix}waited/{rank}", rank, seconds))

    def operation(self, rank: int) -> str:
        """Return the operation in which ``rank`` was waiting when it failed; empty if unknown."""
        text = read_value(self._store, f"{self._prefix}waited/{rank}") or ""
        return printable(text.partition(" ")[2][:_MAX_OPERATION_CHARS])

    def root_cause(self, peer: int) -> int:
        """Return the rank that caused the failure of this rank, which waited for ``peer``.

        If the chain of waits is a cycle through this rank, no cause can be identified and ``peer``
        is returned. In a group the first result is stored and returned by later calls.
        """
        key = f"{self._prefix}culprit/{self._rank}"
        if self._prefix and (found := self._parse(read_value(self._store, key))) is not None:
            return found
        awaited = functools.partial(self.awaited_by, seconds=self._timeout_s)
        last, _ = _end_of_chain(self._rank, peer, awaited)
        found = peer if last == self._rank else last
        if self._prefix:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, str(found))
        return found

    def is_cycle(self, peer: int) -> bool:
        """Whether the ranks in the chain of waits of this rank for ``peer`` wait for each other."""
        awaited = functools.partial(self.awaited_by, seconds=self._timeout_s)
        return _end_of_chain(self._rank, peer, awaited)[1]

    def failure(self, rank: int) -> str:
        """As `published_failure`."""
        return published_failure(self._store, rank)

    def has_finished(self, rank: int) -> bool:
        """Whether ``rank`` has exited normally and was not waiting for a peer."""
        return has_finished(self._store, rank) and self.awaited_by(rank) is None

    def _parse(self, text: str | None) -> int | None:
        """Return the rank with which a text begins; None if there is none."""
        rank = parse_number((text or "").partition(" ")[0], _MAX_RANK_DIGITS)
        return None if rank is None or rank >= self._size else rank


def _end_of_chain(rank: int, peer: int, awaited: Callable[[int], int | None]) -> tuple[int, bool]:
    """Follow the chain of waits of ``rank`` for ``peer``; return its end and whether it is a cycle.

    ``awaited`` returns the peer for which a rank waits, or None.
    """
    seen = {rank}
    while peer not in seen:
        seen.add(peer)
        next_peer = awaited(peer)
        if next_peer is None:
            return peer, False
        peer = next_peer
    return peer, True


def publish_wait(store: Store, rank: int, peer: int | None) -> None:
    """Publish the peer for which ``rank`` is waiting; None if it is not waiting any more."""
    with contextlib.suppress(RuntimeError, TimeoutError):  # the store may be unavailable
        store.set(f"waiting/{rank}", "" if peer is None else str(peer))


def last_awaited(store: Store, rank: int, peer: int) -> int | None:
    """Return the end of the chain of waits of ``rank`` for ``peer``; None for a cycle."""

    def awaited(waiting: int) -> int | None:
        return parse_number(read_value(store, f"waiting/{waiting}") or "", _MAX_RANK_DIGITS)

    last, is_cycle = _end_of_chain(rank, peer, awaited)
    return None if is_cycle else last


def is_progressing(store: Store, rank: int, peer: int) -> bool:
    """Whether the worker at the end of the chain of waits of ``rank`` for ``peer`` is alive.

    A peer that evaluates or saves a checkpoint makes progress. Peers that wait for each other, for
    example after calls that differ between ranks, do not.
    """
    last = last_awaited(store, rank, peer)
    return last is not None and is_alive(store, last)


MAX_WAIT_FACTOR = 10.0
"""Multiple of the timeout of `init` after which a live peer counts as stuck."""

LOG_INTERVAL_S = 30.0
"""Seconds between two log lines about one wait, and before the first one."""


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
                "%s: has waited for %s of %s for %d s; it is alive, so the wait continues",
                self._me, self._what, peers, round(now - self.begun),
            )  # fmt: skip

    def check(self, peers: str, timeout: float, since_progress: float = math.inf) -> None:
        """As `log_if_due`; a `PeerError` if the live ``peers`` count as stuck.

        ``timeout`` is that of `init`, and ``since_progress`` the seconds since the last progress.
        """
        self.log_if_due(peers)
        if min(self.seconds(), since_progress) > MAX_WAIT_FACTOR * timeout:
            raise PeerError(
                f"{self._me}: {peers} is alive, but {self._what} did not come from it for "
                f"{MAX_WAIT_FACTOR * timeout:g} s ({MAX_WAIT_FACTOR:g} times the timeout of "
                "wingbeat.init()): it is blocked in another operation, such as a barrier or a "
                "deadlock; find it with `py-spy dump`, or set a longer timeout"
            )
