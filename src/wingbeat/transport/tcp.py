"""Links over TCP: one authenticated connection to each peer over each interface (Linux).

Every connection is authenticated in both directions before any other byte of it is used: both ends
prove with HMAC-SHA256 over two nonces that they have the job's key. The key is WINGBEAT_JOB_KEY, or
without it a secret that the ranks exchange through the rendezvous store. Connections between hosts
are encrypted, unless the ranks choose otherwise (``encryption.py``). The listening sockets are
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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from wingbeat import _native
from wingbeat.errors import RendezvousError
from wingbeat.observe.log import log
from wingbeat.transport import encryption
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import BITS_BELOW

_MAGIC = b"wingbeat"
_NONCE_BYTES = _TAG_BYTES = 32
_CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
_IDENTITY = struct.Struct("<III")
"""Rank of the connecting process, rank that it connects to, and index of the interface."""
_ANSWER_BYTES = len(_MAGIC) + _IDENTITY.size + _NONCE_BYTES + _TAG_BYTES

_HANDSHAKE_S = 10.0
"""Seconds for a connected process to prove that it has the key."""

_MAX_STRANGERS = 64
"""Unauthenticated connections in excess of the expected ones; then the oldest is closed."""

_RETRY_S = 0.05
_MIN_CONNECT_S = 0.1

_CLOSE_S = 1.0
"""Seconds for the peers to read what was sent last and to close their ends."""


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


def connect(
    rank: int,
    size: int,
    interfaces: Sequence[Interface],
    exchange: Callable[[str, Any], list[Any]],
    job_key: bytes | None,
    timeout: float,
    encrypted: bool | None = None,
) -> tuple[TcpLink, ...]:
    """Connect this rank to all others over each interface, within ``timeout`` seconds.

    ``exchange`` is `World.exchange`, and ``encrypted`` is as in `wingbeat.init`. A
    `RendezvousError` names the rank, address, interface and duration if a peer could not be
    reached, or did not connect.
    """
    listeners = [_listen(rank, interface) for interface in interfaces]
    secret = secrets.token_hex(32)
    places = [list(each.getsockname()[:2]) for each in listeners]
    found = exchange("connections", [secret, encrypted, *places])
    answers = [_checked(rank, n, answer) for n, answer in enumerate(found)]
    encryption.check(
        rank,
        [each.encrypted for each in answers],
        [[address for address, _ in each.places] for each in answers],
        job_key,
    )
    texts = "/".join(each.secret for each in answers)
    key = hmac.new(job_key or b"", b"connections/" + texts.encode(), hashlib.sha256).digest()
    links = tuple(TcpLink(interface.name) for interface in interfaces)
    deadline = time.monotonic() + timeout
    acceptors = [
        _Acceptor(
            listener, rank, index, key, range(rank + 1, size), deadline, links[index], encrypted
        )
        for index, listener in enumerate(listeners)
    ]
    try:
        for acceptor in acceptors:
            acceptor.start()
        for index, interface in enumerate(interfaces):
            for peer in range(rank):
                place = answers[peer].places[index]
                connected = _dial(rank, peer, index, interface, place, key, deadline, encrypted)
                links[index].nic.add(peer, *connected)
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
        for listener in listeners:
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


class _Answer(NamedTuple):
    """What a rank publishes."""

    secret: str
    encrypted: bool | None
    places: list[tuple[str, int]]


def _checked(rank: int, peer: int, answer: Any) -> _Answer:
    match answer:
        case [str(secret), bool() | None as encrypted, *places] if all(
            isinstance(place, list)
            and len(place) == 2
            and isinstance(place[0], str)
            and type(place[1]) is int
            and 0 < place[1] < 1 << 16
            for place in places
        ):
            return _Answer(secret, encrypted, [(place[0], place[1]) for place in places])
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
    place: tuple[str, int],
    key: bytes,
    deadline: float,
    encrypted: bool | None,
) -> tuple[int, bytes]:
    """Connect to ``peer`` from the interface's address; return the descriptor and the keys."""
    begin = time.monotonic()
    while True:
        left = max(_MIN_CONNECT_S, deadline - time.monotonic())
        try:
            with socket.create_connection(place, left, (interface.address, 0)) as connection:
                connection.settimeout(min(left, _HANDSHAKE_S))
                handshake = _prove(connection, rank, peer, index, key)
                _set_options(connection)
                keys = encryption.keys(encrypted, connection, key, True, handshake)
                return connection.detach(), keys
        except OSError as error:
            if time.monotonic() >= deadline or not isinstance(
                error, TimeoutError | ConnectionError
            ):
                raise RendezvousError(
                    f"rank {rank} at {interface.address} on interface {interface.name} did not "
                    f"reach rank {peer} at {place[0]} after {time.monotonic() - begin:.1f} s: "
                    f"{error}; check that every host can reach this address, or name other "
                    "interfaces"
                ) from None
            time.sleep(_RETRY_S)


def _prove(connection: socket.socket, rank: int, peer: int, index: int, key: bytes) -> bytes:
    """Run the connecting side of the handshake, and return what it was about.

    Raises an `OSError` if the peer lacks the key.
    """
    challenge = _read_exactly(connection, _CHALLENGE_BYTES)
    if not challenge.startswith(_MAGIC):
        raise ConnectionError("another program answers there")
    identity, nonce = _IDENTITY.pack(rank, peer, index), secrets.token_bytes(_NONCE_BYTES)
    tag = _tag(key, b"connect", challenge, identity, nonce)
    connection.sendall(_MAGIC + identity + nonce + tag)
    expected = _tag(key, b"accept", challenge, identity, nonce)
    if not hmac.compare_digest(_read_exactly(connection, _TAG_BYTES), expected):
        raise ConnectionError("the peer does not have this job's key")
    return challenge + identity + nonce


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
        listener: socket.socket,
        rank: int,
        index: int,
        key: bytes,
        expected: Sequence[int],
        deadline: float,
        link: TcpLink,
        encrypted: bool | None,
    ) -> None:
        super().__init__(name="wingbeat-accept", daemon=True)
        self._listener, self._rank, self._index, self._key = listener, rank, index, key
        self._deadline, self._link, self._encrypted = deadline, link, encrypted
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
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while self.missing and not self._cancelled and time.monotonic() < self._deadline:
                for key, _ in self._selector.select(_RETRY_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.fileobj)  # type: ignore[arg-type]
                self._expire()
        finally:
            for connection in list(self._pending):
                self._drop(connection)
            self._selector.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
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
        self._pending[connection] = _Newcomer(str(address[0]), challenge, until)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        newcomer = self._pending.get(connection)
        if newcomer is None:
            return
        try:
            data = connection.recv(_ANSWER_BYTES - len(newcomer.data))
        except OSError:
            data = b""
        newcomer.data += data
        if not data:
            self._drop(connection)
        elif len(newcomer.data) == _ANSWER_BYTES:
            self._admit(connection, newcomer)

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
        reply = _tag(self._key, b"accept", newcomer.challenge, identity, nonce)
        handshake = newcomer.challenge + identity + nonce
        try:
            keys = encryption.keys(self._encrypted, connection, self._key, False, handshake)
            connection.send(reply)
            _set_options(connection)
        except OSError:
            self._drop(connection)
            return
        self._selector.unregister(connection)
        del self._pending[connection]
        self._link.nic.add(peer, connection.detach(), keys)
        self.missing.discard(peer)

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in [each for each, of in self._pending.items() if of.until < now]:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.close()


class _Newcomer:
    """A connection that has not proved that it has the key."""

    def __init__(self, address: str, challenge: bytes, until: float) -> None:
        self.address, self.challenge, self.until = address, challenge, until
        self.data = b""
