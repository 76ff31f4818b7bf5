"""Links over TCP: one authenticated connection to each peer over each interface (Linux).

Two ranks of one host connect through a Unix socket and carry the bytes in shared memory; over TCP
if that is impossible.

Every connection is authenticated in both directions before any other byte of it is used: both ends
prove with HMAC-SHA256 over two nonces that they have the job's key. The key is WINGBEAT_JOB_KEY, or
without it a secret that the ranks exchange through the rendezvous store. The listening sockets are
closed once all peers are connected. The bytes are carried by threads of the extension
(``native/src/net``), one per interface.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wingbeat import _native
from wingbeat.errors import RendezvousError, UsageError
from wingbeat.observe.log import log
from wingbeat.transport.interfaces import Interface, host_identity
from wingbeat.transport.link import BITS_BELOW

_MAGIC = b"wingbeat"
_NONCE_BYTES = _TAG_BYTES = 32
_CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
_IDENTITY = struct.Struct("<III")
"""Rank of the connecting process, rank that it connects to, and index of the interface."""
_ANSWER_BYTES = len(_MAGIC) + _IDENTITY.size + _NONCE_BYTES + _TAG_BYTES

_MAPPED = b"m"
"""Sent by the connecting process once it has mapped the shared memory."""

_HANDSHAKE_S = 10.0
"""Seconds for a connected process to prove that it has the key."""

_MAX_STRANGERS = 64
"""Unauthenticated connections in excess of the expected ones; then the oldest is closed."""

_MAX_NAME = 64
"""Characters of the name of a Unix socket."""

_RETRY_S = 0.05
_MIN_CONNECT_S = 0.1

_CLOSE_S = 1.0
"""Seconds for the peers to read what was sent last and to close their ends."""


SWITCH = "WINGBEAT_SHARED_MEMORY"


def shared_memory_enabled(env: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks of one host use shared memory; a `UsageError` if the variable is invalid."""
    switch = env.get(SWITCH, "on").lower()
    if switch not in ("on", "off"):
        raise UsageError(f"{SWITCH}={switch}: allowed are on and off")
    return switch == "on"


class TcpLink:
    """The connections of this process over one interface; as `wingbeat.transport.link.Link`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nic = _native.Nic(name)
        self._closed = False
        weakref.finalize(self, self.nic.stop)
        _links.add(self)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _native.Message:
        """As `Link.send`."""
        channel = _message_channel(tag)
        return self.nic.send(tensor, tensor.data_ptr(), tensor.nbytes, peer, channel, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> _native.Message:
        """As `Link.recv`."""
        channel = _message_channel(tag)
        return self.nic.receive(tensor, tensor.data_ptr(), tensor.nbytes, peer, channel, tag)

    def abort_waits(self, peer: int) -> None:  # noqa: ARG002
        """End all waits on this link, in any thread, and close it."""
        self.nic.fail("the wait was aborted")

    def close(self) -> None:
        """Send what is queued, then close every connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self.nic.close(_CLOSE_S)


def _message_channel(tag: int) -> int:
    """Return the native channel of single messages; the odd ones are those of lanes."""
    return 2 * (tag >> BITS_BELOW)


def lane_channel(channel: int) -> int:
    """Return the native channel in which the programs of a world's channel run."""
    return 2 * channel + 1


_links: weakref.WeakSet[TcpLink] = weakref.WeakSet()


def _after_fork() -> None:
    """Close a forked child's copies of the sockets: a peer would not notice the parent's end."""
    for link in list(_links):
        link._closed = True
        link.nic.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank listens on an interface; ``name`` of its abstract Unix socket, or empty."""

    address: str
    port: int
    name: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rank publishes; ``host`` is empty if it shares no memory."""

    secret: str
    host: str
    places: list[_Place]

    def place(self, index: int, host: str) -> _Place:
        """Return where it listens; the Unix socket is only for ranks of its own host."""
        place = self.places[index]
        return place if host == self.host else replace(place, name="")


def connect(
    rank: int,
    size: int,
    interfaces: Sequence[Interface],
    exchange: Callable[[str, Any], list[Any]],
    job_key: bytes | None,
    timeout: float,
    *,
    shared_memory: bool = True,
) -> tuple[TcpLink, ...]:
    """Connect this rank to all others over each interface, within ``timeout`` seconds.

    ``exchange`` is `World.exchange`. ``shared_memory``: use it with ranks of this host that do the
    same. A `RendezvousError` names the rank, address, interface and duration if a peer could not be
    reached, or did not connect.
    """
    host = host_identity() if shared_memory else ""
    listeners = [_listen(rank, interface) for interface in interfaces]
    local = [_listen_locally() if shared_memory else None for _ in interfaces]
    places = [_place_of(*pair) for pair in zip(listeners, local, strict=True)]
    answers = [
        _checked(rank, n, a)
        for n, a in enumerate(exchange("connections", [secrets.token_hex(32), host, *places]))
    ]
    texts = "/".join(each.secret for each in answers)
    key = hmac.new(job_key or b"", b"connections/" + texts.encode(), hashlib.sha256).digest()
    links = tuple(TcpLink(interface.name) for interface in interfaces)
    deadline = time.monotonic() + timeout
    acceptors = [
        _Acceptor(pair, rank, index, key, range(rank + 1, size), deadline, links[index])
        for index, pair in enumerate(zip(listeners, local, strict=True))
    ]
    try:
        for acceptor in acceptors:
            acceptor.start()
        for index, interface in enumerate(interfaces):
            for peer in range(rank):
                place = answers[peer].place(index, host)
                links[index].nic.add(
                    peer, *_dial(rank, peer, index, interface, place, key, deadline)
                )
        for acceptor, interface in zip(acceptors, interfaces, strict=True):
            acceptor.join()
            if acceptor.missing:
                raise RendezvousError(
                    f"rank {rank} at {interface.address} on interface {interface.name}: rank "
                    f"{min(acceptor.missing)} did not connect within {timeout:g} s; check that "
                    "every host can reach this address, or name other interfaces"
                )
    except BaseException:
        for acceptor in acceptors:
            acceptor.cancel()
        for link in links:
            link.abort_waits(0)
            link.close()
        raise
    finally:
        for listener in filter(None, (*listeners, *local)):
            listener.close()
    return links


def _listen(rank: int, interface: Interface) -> socket.socket:
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    try:
        return socket.create_server((interface.address, 0), family=family, backlog=1024)
    except OSError as error:
        raise RendezvousError(
            f"rank {rank} cannot listen at {interface.address} on interface {interface.name}: "
            f"{error}"
        ) from None


def _listen_locally() -> socket.socket | None:
    """Listen at a new name that processes of this network namespace can reach."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0wingbeat/{secrets.token_hex(16)}")
        listener.listen(1024)
    except OSError:
        listener.close()
        return None
    return listener


def _place_of(listener: socket.socket, local: socket.socket | None) -> list[str | int]:
    name = "" if local is None else local.getsockname()[1:].decode()
    return [*listener.getsockname()[:2], name]


def _checked(rank: int, peer: int, answer: Any) -> _Answer:
    match answer:
        case [str(secret), str(host), *places] if all(
            isinstance(place, list)
            and [type(each) for each in place] == [str, int, str]
            and 0 < place[1] < 1 << 16
            and len(place[2]) < _MAX_NAME
            for place in places
        ):
            return _Answer(secret, host, [_Place(*place) for place in places])
    raise RendezvousError(
        f"rank {rank}: rank {peer} sent malformed addresses: {str(answer)[:80]!r}"
    )


def _tag(key: bytes, role: bytes, challenge: bytes, identity: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + challenge + identity + nonce, hashlib.sha256).digest()


def _dial(
    rank: int,
    peer: int,
    index: int,
    interface: Interface,
    place: _Place,
    key: bytes,
    deadline: float,
) -> tuple[int, _native.Rings | None]:
    """Connect to ``peer``; return the socket's descriptor and the shared memory, if any."""
    made = _dial_locally(rank, peer, index, place.name, key, deadline) if place.name else None
    return made or (_dial_over_tcp(rank, peer, index, interface, place, key, deadline), None)


def _dial_over_tcp(
    rank: int,
    peer: int,
    index: int,
    interface: Interface,
    place: _Place,
    key: bytes,
    deadline: float,
) -> int:
    """Connect to ``peer`` from the interface's address; return the descriptor."""
    target = place.address, place.port
    begin = time.monotonic()
    while True:
        left = max(_MIN_CONNECT_S, deadline - time.monotonic())
        try:
            with socket.create_connection(target, left, (interface.address, 0)) as connection:
                connection.settimeout(min(left, _HANDSHAKE_S))
                _prove(connection, rank, peer, index, key)
                _set_options(connection)
                return connection.detach()
        except OSError as error:
            if time.monotonic() >= deadline or not isinstance(
                error, TimeoutError | ConnectionError
            ):
                raise RendezvousError(
                    f"rank {rank} at {interface.address} on interface {interface.name} did not "
                    f"reach rank {peer} at {place.address} after {time.monotonic() - begin:.1f} s: "
                    f"{error}; check that every host can reach this address, or name other "
                    "interfaces"
                ) from None
            time.sleep(_RETRY_S)


def _dial_locally(
    rank: int, peer: int, index: int, name: str, key: bytes, deadline: float
) -> tuple[int, _native.Rings] | None:
    """Connect to ``peer`` of this host; return the socket's descriptor and the shared memory."""
    seconds = min(max(_MIN_CONNECT_S, deadline - time.monotonic()), _HANDSHAKE_S)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect("\0" + name)
            rings = _native.Rings(_prove(connection, rank, peer, index, key))
            connection.sendall(_MAPPED)
            return connection.detach(), rings
    except (OSError, RuntimeError) as error:
        _log_no_memory(rank, peer, error)
        return None


def _log_no_memory(rank: int, peer: int, error: Exception) -> None:
    log.warning(
        "rank %d shares no memory with rank %d, which is on the same host: %s; they use TCP",
        *(rank, peer, str(error)),
    )


def _prove(connection: socket.socket, rank: int, peer: int, index: int, key: bytes) -> list[int]:
    """Run the connecting side of the handshake; an `OSError` if the peer lacks the key.

    Returns the descriptors that came with the answer.
    """
    challenge = _read_exactly(connection, _CHALLENGE_BYTES)
    if not challenge.startswith(_MAGIC):
        raise ConnectionError("another program answers there")
    identity, nonce = _IDENTITY.pack(rank, peer, index), secrets.token_bytes(_NONCE_BYTES)
    tag = _tag(key, b"connect", challenge, identity, nonce)
    connection.sendall(_MAGIC + identity + nonce + tag)
    expected = _tag(key, b"accept", challenge, identity, nonce)
    answer, descriptors, _, _ = socket.recv_fds(
        connection, _TAG_BYTES, _native.Rings.DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    try:
        answer += _read_exactly(connection, _TAG_BYTES - len(answer))
        if not hmac.compare_digest(answer, expected):
            raise ConnectionError("the peer does not have this job's key")
    except BaseException:
        for each in descriptors:
            os.close(each)
        raise
    return descriptors


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the peer closed the connection")
        data += more
    return data


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class _Acceptor(threading.Thread):
    """Accepts the connections of ``expected`` ranks over one interface, in a thread.

    Connections of other programs are closed after a time limit, or earlier if there are many.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket | None],
        rank: int,
        index: int,
        key: bytes,
        expected: Sequence[int],
        deadline: float,
        link: TcpLink,
    ) -> None:
        super().__init__(name="wingbeat-accept", daemon=True)
        self._listeners = [each for each in listeners if each is not None]
        self._rank, self._index, self._key = rank, index, key
        self._deadline, self._link = deadline, link
        self.missing = set(expected)
        self._most = len(self.missing) + _MAX_STRANGERS
        self._cancelled = False
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, _Newcomer] = {}

    def cancel(self) -> None:
        """Stop accepting."""
        self._cancelled = True

    def run(self) -> None:
        """Accept connections until all expected ranks are connected, or the time is over."""
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        try:
            while self.missing and not self._cancelled and time.monotonic() < self._deadline:
                for key, _ in self._selector.select(_RETRY_S):
                    found = key.fileobj
                    assert isinstance(found, socket.socket)
                    if found in self._listeners:
                        self._accept(found)
                    else:
                        self._read(found)
                self._expire()
        finally:
            for connection in list(self._pending):
                self._drop(connection)
            self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left
            if self._pending:
                self._drop(next(iter(self._pending)))
            else:
                time.sleep(_RETRY_S)
            return
        while len(self._pending) >= self._most:
            self._drop(next(iter(self._pending)))
        connection.setblocking(False)
        challenge = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
        with contextlib.suppress(OSError):
            connection.send(challenge)  # fits into the empty send buffer
        until = time.monotonic() + _HANDSHAKE_S
        where = str(address[0]) if address else "this host"
        self._pending[connection] = _Newcomer(where, challenge, until)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        newcomer = self._pending.get(connection)
        if newcomer is None:
            return
        awaited = _ANSWER_BYTES if newcomer.rings is None else _ANSWER_BYTES + len(_MAPPED)
        try:
            data = connection.recv(awaited - len(newcomer.data))
        except OSError:
            data = b""
        newcomer.data += data
        if not data:
            self._drop(connection)
        elif len(newcomer.data) == awaited:
            if newcomer.rings is None:
                self._admit(connection, newcomer)
            else:
                self._add(connection, newcomer)

    def _admit(self, connection: socket.socket, newcomer: _Newcomer) -> None:
        magic, identity, nonce, tag = struct.unpack(
            f"<{len(_MAGIC)}s{_IDENTITY.size}s{_NONCE_BYTES}s{_TAG_BYTES}s", newcomer.data
        )
        peer, target, index = _IDENTITY.unpack(identity)
        expected = _tag(self._key, b"connect", newcomer.challenge, identity, nonce)
        known = magic == _MAGIC and hmac.compare_digest(tag, expected)
        if not known or (target, index) != (self._rank, self._index) or peer not in self.missing:
            log.warning(
                "rank %d: a connection from %s on interface %s is refused: it %s",
                *(self._rank, newcomer.address, self._link.name),
                "is not expected" if known else "does not have this job's key",
            )
            self._drop(connection)
            return
        newcomer.peer = peer
        reply = _tag(self._key, b"accept", newcomer.challenge, identity, nonce)
        try:
            if connection.family == socket.AF_UNIX:
                newcomer.rings = _native.Rings()
                socket.send_fds(connection, [reply], newcomer.rings.descriptors)
                return  # the peer confirms that it has mapped the memory
            connection.send(reply)
            _set_options(connection)
        except (OSError, RuntimeError) as error:
            if connection.family == socket.AF_UNIX:
                _log_no_memory(self._rank, peer, error)
            self._drop(connection)
            return
        self._add(connection, newcomer)

    def _add(self, connection: socket.socket, newcomer: _Newcomer) -> None:
        self._selector.unregister(connection)
        del self._pending[connection]
        self._link.nic.add(newcomer.peer, connection.detach(), newcomer.rings)
        self.missing.discard(newcomer.peer)

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in [each for each, of in self._pending.items() if of.until < now]:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.close()


class _Newcomer:
    """A connection that has not proved that it has the key, or has not mapped the memory."""

    def __init__(self, address: str, challenge: bytes, until: float) -> None:
        self.address, self.challenge, self.until = address, challenge, until
        self.data = b""
        self.peer = 0
        self.rings: _native.Rings | None = None
