"""Frames over ZeroMQ: one ROUTER socket for each interface and class, one connection per peer.

The process with the lower number connects, so there is one connection for each interface and class
between two processes; the other one identifies it by its first frame. Each socket sets DSCP, so
classes apply wherever the network supports them. Received memory is passed on without a copy, and
sent memory is read in place unless it is encrypted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
from zmq.backend import Socket as BareSocket
from zmq.utils import z85

from wingbeat.errors import UsageError, WingbeatError
from wingbeat.transport.interfaces import bracketed
from wingbeat.transport.messages.endpoint import MAX_INLINE_BYTES
from wingbeat.transport.messages.frames import (
    MAX_HEADER_BYTES,
    MAX_IN_FLIGHT,
    Arrival,
    Buffer,
    ConnectionId,
    tos_of,
)
from wingbeat.transport.services import BackgroundThread


class Wakeup:
    """A pipe within the process: any thread sets it, and the polling thread watches it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._is_set = False
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor, readable while it is set."""
        return self._read_fd

    def set(self) -> None:
        """End the wait. Further calls before `clear`, or after `close`, have no effect."""
        with self._lock:
            if not self._is_set and not self._closed:
                self._is_set = True
                os.write(self._write_fd, b"!")

    def clear(self) -> None:
        """Reset it for the next wait."""
        with self._lock:
            if self._is_set and not self._closed:
                self._is_set = False
                os.read(self._read_fd, 1)

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read_fd)
                os.close(self._write_fd)


_HANDLER = "inproc://zeromq.zap.01"
_VERSION = b"1.0"

_FAILED: dict[int, str] = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "key",
}
_BEGUN = (int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_CONNECTED))
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ENDED = int(zmq.EVENT_DISCONNECTED)


class ZapHandler:
    """Authenticates connections by their public keys (ZAP, RFC 27) in its own thread.

    Handshakes must proceed while the user's thread computes. The handler also counts connections
    that fail before their first frame, in ``ended`` those that have ended, and in ``cut`` the
    endpoints whose last connection has ended, as named by the connecting side.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._failed: Counter[str] = Counter()
        self._begun = self._succeeded = self.ended = 0
        self.cut: set[str] = set()
        self._keys: Mapping[bytes, int] = {}
        self._context = context
        self._ended = False
        self._handler = context.socket(zmq.ROUTER)
        self._handler.linger = 0
        self._handler.bind(_HANDLER)
        self._stop_sender, self._stop_receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop_receiver.bind(f"inproc://wingbeat-zap-{id(self)}")
        self._stop_sender.connect(f"inproc://wingbeat-zap-{id(self)}")
        self._watched: list[Any] = []
        self._thread = BackgroundThread(self._run, "wingbeat-zap")

    @property
    def refused(self) -> Counter[str]:
        """Number of failed connections, by reason.

        Connections without a complete handshake, ended or not, count as "unfinished".
        """
        failed = Counter(self._failed)
        unfinished = self._begun - self._succeeded - sum(failed.values())
        return failed + Counter(unfinished=max(0, unfinished))

    def allow(self, keys: Mapping[bytes, int]) -> None:
        """Accept connections authenticated by one of these keys, as the peer of that number."""
        self._keys = dict(keys)
        if self._thread.ident is None:
            self._thread.start()

    @property
    def failure(self) -> str:
        """The exception that ended the thread, so that no peer can connect; empty while it runs."""
        return self._thread.failure

    def watch(self, socket: Any) -> None:
        """Count failed handshakes and ended connections of a socket. Call it before `allow`."""
        events = _SUCCEEDED | _ENDED
        for event in (*_FAILED, *_BEGUN):
            events |= event
        self._watched.append(socket.get_monitor_socket(events))

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if self._thread.ident is not None:
            self._stop_sender.send(b"")
            self._thread.join()
        for socket in (self._handler, self._stop_sender, self._stop_receiver, *self._watched):
            socket.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._handler, self._stop_receiver, *self._watched):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_receiver in ready:
                return
            if self._handler in ready:
                self._answer(self._handler.recv_multipart())
            for watched in self._watched:
                if watched in ready:
                    self._count(watched)

    def _answer(self, request: list[bytes]) -> None:
        """Accept a known key and return its peer's number."""
        try:
            sender, _, version, number, _, _, _, mechanism, key = request[:9]
        except ValueError:
            return
        peer = None
        if version == _VERSION and mechanism == b"CURVE":
            peer = self._keys.get(z85.encode(key))
        verdict = (b"400", b"unknown key", b"") if peer is None else (b"200", b"OK", b"%d" % peer)
        reply = [sender, b"", _VERSION, number, *verdict, b""]
        with contextlib.suppress(zmq.ZMQError):
            self._handler.send_multipart(reply, zmq.DONTWAIT)

    def _count(self, watched: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):
            event_frame, endpoint = watched.recv_multipart(zmq.DONTWAIT)
            event = int.from_bytes(event_frame[:2], "little")
            if event == _ENDED:
                self.cut.add(endpoint.decode())
            elif event == _SUCCEEDED:
                self.cut.discard(endpoint.decode())
            self._begun += event in _BEGUN
            self._succeeded += event == _SUCCEEDED
            self.ended += event == _ENDED
            if event in _FAILED:
                self._failed[_FAILED[event]] += 1


SEND_BUFFER = 1 << 18
"""Bytes of a socket's buffer in the kernel. Urgent frames cannot overtake its contents."""

MAX_QUEUED_FRAMES = 4 * MAX_IN_FLIGHT
"""Maximum frames queued for one connection. Further frames are lost until some have been sent.

ZeroMQ counts sent frames in steps of half the limit. The other half holds the frames in flight of a
flow twice, once more after a reconnection. Only a peer that sends requests without reading any
reply reaches the limit.
"""

ENCRYPTION_OVERHEAD = 64
"""Upper bound of the bytes that encryption adds to a part."""

HEARTBEAT_S = 60.0
"""Seconds without a reply after which ZeroMQ ends a connection."""

CLOSE_S = 5.0
"""Seconds for ZeroMQ to close its connections, after the linger time."""

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 4096
"""Connections cached for each socket. Evicted ones are identified again."""

_WAITS_MS = (1000, 100, 10, 1)
"""Milliseconds of a wait on a single socket; longer waits are several calls."""

# Stored as integers: operators of an enum cost as much as a call.
_MORE, _LAST = int(zmq.SNDMORE | zmq.DONTWAIT), int(zmq.DONTWAIT)

# The base of `zmq.Socket.send`, without its cases for socket types not used here.
_send = BareSocket.send


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair in Z85, 40 characters each."""

    public: bytes
    secret: bytes

    @staticmethod
    def make() -> Keys:
        """Generate a new pair."""
        return Keys(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """TCP endpoints of a peer by interface and class, and its public key."""

    endpoints: tuple[tuple[str, ...], ...]
    public: bytes | None = None


class _Connection(NamedTuple):
    id: ConnectionId
    peer: int | None


class _Listener:
    """The socket of one interface and class, and the connections from which it has received."""

    def __init__(self, interface: int, urgency: int, socket: zmq.Socket[bytes]) -> None:
        self.interface, self.urgency, self.socket = interface, urgency, socket
        self.connections: OrderedDict[bytes, _Connection] = OrderedDict()
        self.wait_ms = -1

    def remember(self, name: bytes, peer: int | None) -> _Connection:
        """Cache a connection; evict the oldest one if there are too many."""
        if len(self.connections) >= _MAX_CONNECTIONS:
            self.connections.popitem(last=False)
        known = self.connections[name] = _Connection(
            ConnectionId(self.interface, self.urgency, name), peer
        )
        return known


_CONTEXT, _IO_THREAD, _ZAP, _SOCKET, _WAKEUP = 3, 2, 3, 4, 2
"""Descriptors of context, I/O thread, `ZapHandler`, socket (2) with monitor (2), `Wakeup`."""

_FREE_PIPE = 7
"""File descriptors with which pyzmq detects that a zero-copy buffer has been sent."""


def descriptors_needed(sockets: int, peers: int, *, encrypted: bool) -> int:
    """Return the file descriptors of a `ZeroMQCarrier` with connections to all peers."""
    own = _CONTEXT + _IO_THREAD * _io_threads(encrypted) + _ZAP + _WAKEUP + _FREE_PIPE
    return own + sockets * (_SOCKET + peers)


def _io_threads(encrypted: bool) -> int:
    return 2 if encrypted else 1


class ZeroMQCarrier:
    """`Carrier` over ZeroMQ.

    It listens on ``addresses`` in ``classes`` traffic classes. A connection that sends a payload
    larger than ``message`` bytes is closed. ``keys`` is None without encryption. A connection ends
    after ``heartbeat`` seconds without a reply. ``address`` is the information that peers need to
    connect.
    """

    def __init__(
        self,
        number: int,
        addresses: Sequence[str],
        classes: int,
        *,
        message: int,
        keys: Keys | None,
        heartbeat: float = HEARTBEAT_S,
    ) -> None:
        self._number = number
        self._heartbeat = heartbeat
        self._classes = classes
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(
            io_threads=_io_threads(keys is not None)
        )
        self._context.max_sockets = 1024
        self._zap = ZapHandler(self._context)
        self._peers: dict[int, PeerAddress] = {}
        self._connected: dict[int, list[ConnectionId]] = {}
        self._endpoints: dict[ConnectionId, str] = {}
        self._warned_full = False
        self._sockets: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._wakeup: Wakeup | None = None
        try:
            for urgency in range(classes):
                for interface, address in enumerate(addresses):
                    socket = self._listen(address, urgency, message)
                    self._sockets[interface, urgency] = socket
                    self._poller.register(socket, zmq.POLLIN)
        except BaseException:
            self.close()
            raise
        endpoints = [
            tuple(self._sockets[i, u].get_string(zmq.LAST_ENDPOINT) for u in range(classes))
            for i in range(len(addresses))
        ]
        self.address = PeerAddress(tuple(endpoints), None if keys is None else keys.public)
        # In the order of reading: the most urgent classes first.
        self._listeners = [_Listener(i, u, socket) for (i, u), socket in self._sockets.items()]
        self._only = self._listeners[0] if len(self._listeners) == 1 else None

    @property
    def refused_connections(self) -> Counter[str]:
        """As `Carrier.refused_connections`."""
        return self._zap.refused

    @property
    def ended(self) -> int:
        """As `Carrier.ended`."""
        return self._zap.ended

    def is_disconnected(self, place: ConnectionId) -> bool:
        """As `Carrier.is_disconnected`."""
        return self._endpoints.get(place) in self._zap.cut

    def allow(self, peers: Mapping[int, PeerAddress]) -> None:
        """Set the peers that may connect, and their endpoints; initially none may."""
        self._peers = dict(peers)
        self._zap.allow({address.public: n for n, address in peers.items() if address.public})

    def disconnect(self, peer: int) -> None:
        """Disconnect a peer whose process has exited."""
        for place in self._connected.pop(peer, ()):
            self._sockets[place[:2]].disconnect(self._endpoints.pop(place))
        self.allow({n: address for n, address in self._peers.items() if n != peer})

    def allow_peer(self, peer: int, address: PeerAddress) -> None:
        """Allow a new process, which listens at ``address``, to connect."""
        self.allow({**self._peers, peer: address})

    @property
    def interfaces(self) -> frozenset[int]:
        """Numbers of the interfaces on which it listens."""
        return frozenset(interface for interface, _ in self._sockets)

    def close_other_interfaces(self, interfaces: Collection[int]) -> None:
        """Stop listening on all other interfaces, which no peer uses."""
        for listener in list(self._listeners):
            if listener.interface not in interfaces:
                self._listeners.remove(listener)
                self._poller.unregister(listener.socket)
                del self._sockets[listener.interface, listener.urgency]
                listener.socket.close(linger=0)
        alone = len(self._listeners) == 1 and self._wakeup is None
        self._only = self._listeners[0] if alone else None

    def connect(
        self, peer: int, interface: int, urgency: int, *, theirs: int
    ) -> ConnectionId | None:
        """As `Carrier.connect`."""
        if peer < self._number:
            return None
        socket, address = self._sockets[interface, urgency], self._peers[peer]
        # Random, because libzmq aborts the process if a peer claims the same routing id for its own
        # connection.
        name = secrets.token_bytes(16)
        socket.set(zmq.CONNECT_ROUTING_ID, name)
        if self._keys is not None:
            socket.curve_server = 0
            socket.curve_serverkey = address.public
        endpoint = address.endpoints[theirs][urgency]
        socket.connect(endpoint)
        made = ConnectionId(interface, urgency, name)
        self._connected.setdefault(peer, []).append(made)
        self._endpoints[made] = endpoint
        return made

    def send(self, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
        """As `Carrier.send`. A frame for a connection with a full queue is lost."""
        interface, urgency, name = place
        socket = self._sockets[interface, urgency]
        try:
            _send(socket, name, _MORE)
        except zmq.Again:
            self._warn_full(place)
            return True
        except zmq.ZMQError as err:
            if err.errno == zmq.EHOSTUNREACH:
                return False
            raise
        if len(parts) == 1:
            _send(socket, parts[0], _LAST)
        else:
            _send(socket, parts[0], _MORE)
            _send(socket, parts[1], _LAST, copy=False)
        return True

    def _warn_full(self, place: ConnectionId) -> None:
        """Warn once about a full queue, as its peer may cause this without limit."""
        if not self._warned_full:
            self._warned_full = True
            _log.warning(
                "process %d: the queue of a connection on interface %d, class %d, is full (%d "
                "frames); further frames are dropped until its peer reads them",
                self._number,
                place.interface,
                place.urgency,
                MAX_QUEUED_FRAMES,
            )

    def receive(self, seconds: float) -> Arrival | None:
        """As `Carrier.receive`; a `WingbeatError` if the authentication thread has failed."""
        if seconds <= 0:
            return self._receive_ready()
        if self._only is not None:
            return self._wait_single(self._only, seconds)
        if not self._poller.poll(int(min(seconds, 3600.0) * 1e3) + 1):
            self._check_zap()
            return None
        if self._wakeup is not None:
            self._wakeup.clear()
        return self._receive_ready()

    def interrupter(self) -> Callable[[], None]:
        """As `Carrier.interrupter`."""
        if self._wakeup is None:
            self._wakeup = Wakeup()
            self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
            self._only = None  # a wait on one socket would ignore the wakeup
        return self._wakeup.set

    def close(self, linger: float = 0.0) -> None:
        """As `Carrier.close`."""
        if self._context.closed:
            return
        self._zap.close()
        if self._wakeup is not None:
            self._wakeup.close()
        for socket in self._sockets.values():
            socket.close(linger=round(1e3 * linger))
        ending = threading.Thread(target=self._context.term, name="wingbeat-closing", daemon=True)
        ending.start()
        ending.join(linger + CLOSE_S)
        if ending.is_alive():
            _log.warning(
                "process %d: connections are not closed after %g s; their ports stay in use until "
                "it exits",
                self._number,
                linger + CLOSE_S,
            )

    def _receive_ready(self) -> Arrival | None:
        for listener in self._listeners:
            try:
                name = listener.socket.recv(_LAST)
            except zmq.Again:
                continue
            return self._read(listener, name)
        self._check_zap()
        return None

    def _check_zap(self) -> None:
        """Raise the failure of the authentication thread. Called when no frame is ready."""
        if self._zap.failure:
            raise WingbeatError(f"process {self._number}: {self._zap.failure}")

    def _wait_single(self, listener: _Listener, seconds: float) -> Arrival | None:
        """Wait on the only socket, with one call rather than two.

        The timeout is one of a few, possibly shorter than requested: setting a new one takes time.
        """
        for wait_ms in _WAITS_MS:
            if 1e3 * seconds >= wait_ms:
                break
        if wait_ms != listener.wait_ms:
            listener.socket.rcvtimeo = listener.wait_ms = wait_ms
        try:
            name = listener.socket.recv()
        except zmq.Again:
            self._check_zap()
            return None
        return self._read(listener, name)

    def _read(self, listener: _Listener, name: bytes) -> Arrival:
        receive = listener.socket.recv
        head = receive(copy=False)
        connection = listener.connections.get(name)
        if connection is None:
            connection = listener.remember(name, self._proved_peer(head))
        if not head.more:
            return Arrival(connection.id, head.buffer, None, connection.peer)
        payload, whole = receive(copy=False), True
        while payload.more:
            payload, whole = receive(copy=False), False
        return Arrival(connection.id, head.buffer, payload.buffer, connection.peer, whole)

    def _proved_peer(self, frame: Any) -> int | None:
        """Return the peer authenticated for the connection of a frame."""
        if self._keys is None:
            return None
        try:
            return int(frame.get("User-Id"))
        except (zmq.ZMQError, ValueError):
            return None  # this end connected, which authenticated the peer

    def _listen(self, address: str, urgency: int, message: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        tos = tos_of(urgency, self._classes)
        options = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.PROBE_ROUTER: 1,  # notifies a peer that its connection is renewed
            zmq.MAXMSGSIZE: max(message, MAX_HEADER_BYTES + MAX_INLINE_BYTES)
            + ENCRYPTION_OVERHEAD * (self._keys is not None),
            zmq.SNDHWM: MAX_QUEUED_FRAMES,
            zmq.RCVHWM: 1000,
            zmq.SNDBUF: SEND_BUFFER,
            zmq.TOS: tos,
            # If set, IPv4 addresses are mapped to IPv6, and their traffic class is lost.
            zmq.IPV6: int(":" in address),
            # The default is an infinite wait. A connection ended by the peer keeps the value at
            # that time, regardless of `close`, and blocks the whole context.
            zmq.LINGER: 0,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.HEARTBEAT_IVL: 10_000,
            zmq.HEARTBEAT_TIMEOUT: round(1e3 * self._heartbeat),
        }
        for option, value in options.items():
            socket.set(option, value)
        socket.copy_threshold = MAX_INLINE_BYTES  # copying a header is faster than a zero-copy send
        if self._keys is not None:
            socket.curve_secretkey = self._keys.secret
            socket.curve_publickey = self._keys.public
            socket.curve_server = 1
            socket.zap_domain = b"wingbeat"
        self._zap.watch(socket)
        try:
            socket.bind(f"tcp://{bracketed(address)}:*")
        except zmq.ZMQError as err:
            socket.close()
            raise UsageError(
                f"cannot listen on {address}: {err.strerror}; name interfaces that are up: "
                "init(interfaces=[...])"
            ) from None
        return socket
