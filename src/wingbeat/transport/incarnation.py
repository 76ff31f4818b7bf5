"""Whether the process that had a rank before still runs, without a clock or a heartbeat.

Each process of a job listens at a port of its own and sends its token to all that connect. The
kernel closes the port when the process ends, however it ends, and not while it is only stopped.
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
"""Seconds that a process which is ending has, until the next one of its rank is refused."""

_ANSWER_S = 3.0
"""Seconds to connect to a process, and to hear from it."""

_LOOK_S = 0.2
_TOKEN = 32

_ASKS = 3
"""Attempts until another outcome than a refused connection shows that a process has ended."""


class Place(NamedTuple):
    """Where a process shows that it runs.

    Attributes:
        host: an address.
        port: its TCP port.
        token: what it sends.
    """

    host: str
    port: int
    token: str

    def to_text(self) -> str:
        """Return it as the store keeps it."""
        return json.dumps(self)

    @staticmethod
    def from_text(text: str) -> Place:
        """Return what `to_text` has made.

        Raises:
            ValueError: it is something else.
        """
        try:
            match json.loads(text):
                case [str(host), int(port), str(token)] if (
                    0 < port < 1 << 16 and len(token) == _TOKEN and len(host) < 256
                ):
                    return Place(host, port, token)
        except RecursionError:
            pass
        raise ValueError("no address of a process")


class Incarnation:
    """One process in the place of a rank, for as long as it takes part.

    Args:
        towards: the host of the store: the port is opened on the interface that reaches it.

    Raises:
        OSError: this host has no address that reaches it, or no port is free.
    """

    def __init__(self, towards: str) -> None:
        family, address = _own_address(towards)
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        port = self._socket.getsockname()[1]
        self.place = Place(address, port, secrets.token_hex(_TOKEN // 2))
        self._closed = False
        _open.add(self)
        threading.Thread(target=self._serve, name="wingbeat-incarnation", daemon=True).start()

    def close(self) -> None:
        """Take part no more. Safe to call twice."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # it wakes the thread, which close does not
        self._socket.close()

    def _abandon(self) -> None:
        """Close this process's copy of the socket, and leave the one of its parent open."""
        self._closed = True
        self._socket.close()

    def _serve(self) -> None:
        token = self.place.token.encode()
        while not self._closed:
            try:
                caller = self._socket.accept()[0]
            except OSError:  # closed, or no descriptor is free at the moment
                time.sleep(_LOOK_S)
                continue
            with caller, contextlib.suppress(OSError):
                caller.setblocking(False)
                caller.send(token)


_open: weakref.WeakSet[Incarnation] = weakref.WeakSet()


def _abandon_all() -> None:
    for each in list(_open):
        each._abandon()


# A process of a data loader has its parent's sockets, and may outlive it.
os.register_at_fork(after_in_child=_abandon_all)


def runs(place: Place) -> bool:
    """Whether the process still runs. One whose host cannot be reached does not."""
    return _answers(place, _ASKS) is not False


def _answers(place: Place, asks: int) -> bool | None:
    """Whether the process answers; None if it is stopped, or too busy.

    Only a refused connection, or another process's token, is certain; what else goes wrong may be
    this host's own trouble of the moment, so it is asked again, ``asks`` times in all.
    """
    for attempt in range(asks):
        if attempt:
            time.sleep(_LOOK_S)
        try:
            with socket.create_connection((place.host, place.port), _ANSWER_S) as connection:
                said = _read(connection)
        except ConnectionRefusedError as error:
            found: str | OSError = error
            break
        except OSError as error:
            found = error
            continue
        if said is None or said == place.token.encode():
            return True if said else None
        found = f"another program answers there: {said!r}"
        if len(said) == _TOKEN:
            break
    log.info("no process of this rank runs at %s (port %d): %s", place.host, place.port, found)
    return False


def _read(connection: socket.socket) -> bytes | None:
    """Return what a process says; None if it is stopped, and only its kernel has accepted."""
    said = b""
    try:
        while len(said) < _TOKEN and (more := connection.recv(_TOKEN - len(said))):
            said += more
    except TimeoutError:
        return None
    return said


def lives(store: Store, rank: int) -> bool:
    """Whether the process of ``rank`` runs and answers, as one that is stopped does not."""
    try:
        key = f"here/{rank}"
        return store.has(key) and bool(_answers(Place.from_text(store.get(key, _ANSWER_S)), 1))
    except (TimeoutError, RuntimeError, ValueError):
        return False


def register(store: TorchStore, rank: int, own: Place, seconds: float, where: str) -> bool:
    """Take a rank, unless another process has it that still runs.

    Args:
        store: the job's.
        rank: which.
        own: this process.
        seconds: how long to wait, at most, for a process that is ending.
        where: how messages call the store.

    Returns:
        Whether this process comes in the place of one that has ended.

    Raises:
        RendezvousError: the rank is taken; names the address of the process that has it.
    """
    key, text = f"here/{rank}", own.to_text()
    deadline = time.monotonic() + min(seconds, GRACE_S)
    before = found = _claim(store, rank, key, "", text)
    while found != text:
        try:
            other = Place.from_text(found)
        except ValueError:
            raise RendezvousError(
                f"rank {rank}: the store at {where} has a malformed address of this rank's "
                f"process: {found[:80]!r}; start the job again at another port"
            ) from None
        if not runs(other):
            found = _claim(store, rank, key, found, text)
        elif time.monotonic() >= deadline:
            raise RendezvousError(
                f"rank {rank} is taken: a process of the job whose store is at {where} has it, and "
                f"still runs at {other.host} (port {other.port}); end that one first, or, if this "
                "is another job, give it a MASTER_PORT of its own"
            )
        else:
            time.sleep(_LOOK_S)
            found = _claim(store, rank, key, "", text)
    return before != text


def _claim(store: TorchStore, rank: int, key: str, before: str, text: str) -> str:
    try:
        return store.replace(key, before, text)
    except TimeoutError as error:
        raise RendezvousError(f"rank {rank}: the store does not answer: {error}") from None


def _own_address(towards: str) -> tuple[socket.AddressFamily, str]:
    """Return this host's address on the interface that reaches another."""
    family, _, _, _, remote = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(remote)  # of a datagram socket: nothing is sent
        address: str = probe.getsockname()[0]
    own = nic.local().interfaces
    if _is_loopback(address) and not (towards == "localhost" or _is_loopback(towards)) and own:
        # A host's own name is often 127.0.1.1 there, which would mean another host elsewhere.
        address = own[0].address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
