"""Incarnations: whether the process that held a rank before is still running.

Each process of a job listens on a port and sends its token to every client. The kernel closes the
port when the process exits for any reason, but not while it is only stopped. No clock and no
heartbeat is needed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.errors import RendezvousError
from wingbeat.observe.log import log
from wingbeat.transport import interfaces as nic

if TYPE_CHECKING:
    from wingbeat.transport.store import Store
    from wingbeat.transport.torch_store import TorchStore

GRACE_S = 5.0
"""Seconds for a process to exit before the next process of its rank is refused."""

_PROBE_TIMEOUT_S = 3.0
"""Seconds to connect to a process and to read its token."""

_RETRY_S = 0.2
_TOKEN_CHARS = 32

_PROBES = 3
"""Attempts before an outcome other than a refused connection counts as an exited process."""


class ProcessAddress(NamedTuple):
    """Address, TCP port and token of a process that answers liveness probes."""

    host: str
    port: int
    token: str

    def to_text(self) -> str:
        """Return its form in the rendezvous store."""
        return json.dumps(self)

    @staticmethod
    def from_text(text: str) -> ProcessAddress:
        """Parse the result of `to_text`; a `ValueError` if it is malformed."""
        try:
            match json.loads(text):
                case [str(host), int(port), str(token)] if (
                    0 < port < 1 << 16 and len(token) == _TOKEN_CHARS and len(host) < 256
                ):
                    return ProcessAddress(host, port, token)
        except RecursionError:
            pass
        raise ValueError("no address of a process")


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
    return _probe(address, _PROBES) is not False


def _probe(address: ProcessAddress, attempts: int) -> bool | None:
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
    log.info("no process of this rank runs at %s (port %d): %s", address.host, address.port, found)
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
    try:
        key = f"here/{rank}"
        if not store.has(key):
            return False
        address = ProcessAddress.from_text(store.get(key, _PROBE_TIMEOUT_S))
        return bool(_probe(address, 1))
    except (TimeoutError, RuntimeError, ValueError):
        return False


def claim_rank(
    store: TorchStore, rank: int, own: ProcessAddress, seconds: float, where: str
) -> bool:
    """Claim a rank, and return whether a former process has exited.

    Waits up to ``seconds`` for a process that is exiting. A `RendezvousError` names the address of
    a running process that holds the rank. ``where`` is the store's address for error messages.
    """
    key, text = f"here/{rank}", own.to_text()
    deadline = time.monotonic() + min(seconds, GRACE_S)
    first = found = _compare_set(store, rank, key, "", text)
    while found != text:
        try:
            other = ProcessAddress.from_text(found)
        except ValueError:
            raise RendezvousError(
                f"rank {rank}: the store at {where} has a malformed address of this rank's "
                f"process: {found[:80]!r}; start the job again at another port"
            ) from None
        if not is_running(other):
            found = _compare_set(store, rank, key, found, text)
        elif time.monotonic() >= deadline:
            raise RendezvousError(
                f"rank {rank} is taken: a process of the job whose store is at {where} has it, and "
                f"still runs at {other.host} (port {other.port}); end that one first, or, if this "
                "is another job, give it a MASTER_PORT of its own"
            )
        else:
            time.sleep(_RETRY_S)
            found = _compare_set(store, rank, key, "", text)
    return first != text


def _compare_set(store: TorchStore, rank: int, key: str, before: str, text: str) -> str:
    try:
        return store.replace(key, before, text)
    except TimeoutError as error:
        raise RendezvousError(f"rank {rank}: the store does not answer: {error}") from None


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
