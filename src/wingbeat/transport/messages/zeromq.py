"""Frames over ZeroMQ: one ROUTER socket for each interface and class, one connection per peer."""

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
from wingbeat.transport.background import BackgroundThread
from wingbeat.transport.interfaces import in_brackets
from wingbeat.transport.messages.carrier import Arrival, Buffer, Place, tos_of
from wingbeat.transport.messages.endpoint import INLINE
from wingbeat.transport.messages.frames import LARGEST, MOST_UNDER_WAY


class Alarm:
    """A pipe to oneself: rung by any thread, watched by the one that polls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hears, self._rings = os.pipe()
        os.set_blocking(self._hears, False)
        self._rung = False
        self._closed = False

    def fileno(self) -> int:
        """Return what can be read from once it has rung."""
        return self._hears

    def ring(self) -> None:
        """End the wait; once, however often it rings before it is heard. Nothing when closed."""
        with self._lock:
            if not self._rung and not self._closed:
                self._rung = True
                os.write(self._rings, b"!")

    def heard(self) -> None:
        """Get ready for the next time."""
        with self._lock:
            if self._rung and not self._closed:
                self._rung = False
                os.read(self._hears, 1)

    def close(self) -> None:
        """Close the pipe. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._hears)
                os.close(self._rings)


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


class Admission:
    """Answers ZeroMQ's questions about keys, until closed.

    Attributes:
        ended: how many connections have ended.
        cut: the endpoints where the last connection has ended, as whoever has connected to them
            names them.
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
        self._end, self._told = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._told.bind(f"inproc://wingbeat-admission-{id(self)}")
        self._end.connect(f"inproc://wingbeat-admission-{id(self)}")
        self._watched: list[Any] = []
        self._thread = BackgroundThread(self._run, "wingbeat-admission")

    @property
    def refused(self) -> Counter[str]:
        """How many connections were none in the end, by the reason.

        Those that ended, or have lasted until now, without a handshake, count as "unfinished".
        """
        failed = Counter(self._failed)
        unfinished = self._begun - self._succeeded - sum(failed.values())
        return failed + Counter(unfinished=max(0, unfinished))

    def admit(self, keys: Mapping[bytes, int]) -> None:
        """Admit connections that prove one of these keys, as the peer of that number."""
        self._keys = dict(keys)
        if self._thread.ident is None:
            self._thread.start()

    @property
    def failure(self) -> str:
        """How the thread has ended by an exception, so that nobody can connect; or empty."""
        return self._thread.failure

    def watch(self, socket: Any) -> None:
        """Count the handshakes that fail on a socket, and connections that end; before `admit`."""
        events = _SUCCEEDED | _ENDED
        for event in (*_FAILED, *_BEGUN):
            events |= event
        self._watched.append(socket.get_monitor_socket(events))

    def close(self) -> None:
        """End the thread. May be called again."""
        if self._ended:
            return
        self._ended = True
        if self._thread.ident is not None:
            self._end.send(b"")
            self._thread.join()
        for socket in (self._handler, self._end, self._told, *self._watched):
            socket.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._handler, self._told, *self._watched):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._told in ready:
                return
            if self._handler in ready:
                self._answer(self._handler.recv_multipart())
            for watched in self._watched:
                if watched in ready:
                    self._count(watched)

    def _answer(self, request: list[bytes]) -> None:
        """Answer one request: who it is if the key is known, and no otherwise."""
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
            said, endpoint = watched.recv_multipart(zmq.DONTWAIT)
            event = int.from_bytes(said[:2], "little")
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
"""Bytes of a socket's buffer in the kernel: what is in there cannot be overtaken."""

QUEUED = 4 * MOST_UNDER_WAY
"""Frames that wait for one connection at most; what is sent beyond that is lost until they leave.

ZeroMQ counts frames that have left in steps of half the limit. The other half holds what a flow has
under way, and the same once more after a cut. So only a peer that has this process send without
end, and reads nothing, reaches it.
"""

SEALED = 64
"""Bytes, with some to spare, by which encryption makes a part larger: its limit counts them."""

HEARTBEAT_S = 60.0
"""Seconds without an answer after which ZeroMQ ends a connection."""

CLOSING_S = 5.0
"""Seconds that ZeroMQ may take to close its connections, in addition to the linger."""

_log = logging.getLogger(__name__)

_KNOWN = 4096
"""Connections that a socket remembers; of more it asks again whose they are."""

_PATIENCES = (1000, 100, 10, 1)
"""Milliseconds that a wait at a single socket may take; a caller who wants more calls again."""

# Joined once: an enum's operators take as long as a call.
_MORE, _LAST = int(zmq.SNDMORE | zmq.DONTWAIT), int(zmq.DONTWAIT)

# What `zmq.Socket.send` ends in, without what it does for kinds of sockets that are not used here.
_send = BareSocket.send


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair in Z85, 40 characters each."""

    public: bytes
    secret: bytes

    @staticmethod
    def make() -> Keys:
        """Draw a new pair."""
        return Keys(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a peer listens: TCP endpoints by interface and class, and its public key."""

    endpoints: tuple[tuple[str, ...], ...]
    public: bytes | None = None


class Known(NamedTuple):
    """A connection, and whose key was proved for it."""

    place: Place
    peer: int | None


class Listener:
    """One socket, for one interface and class, and the connections that have spoken on it."""

    def __init__(self, interface: int, urgency: int, socket: zmq.Socket[bytes]) -> None:
        self.interface, self.urgency, self.socket = interface, urgency, socket
        self.places: OrderedDict[bytes, Known] = OrderedDict()
        self.patience = -1

    def place(self, name: bytes, peer: int | None) -> Known:
        """Remember a connection; who connects without end makes this forget the oldest."""
        if len(self.places) >= _KNOWN:
            self.places.popitem(last=False)
        known = self.places[name] = Known(Place(self.interface, self.urgency, name), peer)
        return known


_CONTEXT, _IO_THREAD, _ADMISSION, _SOCKET, _ALARM = 3, 2, 3, 4, 2
"""File descriptors of libzmq's context, of each thread of it that reads and writes, of `Admission`,
of each socket that listens (its own two and the two of its monitor), and of `Alarm`."""

_FREES = 7
"""File descriptors of the context by which pyzmq hears that a buffer has been sent."""


def opens(sockets: int, peers: int, *, encrypted: bool) -> int:
    """Return how many file descriptors a `ZeroMQCarrier` with connections to all peers takes."""
    own = _CONTEXT + _IO_THREAD * _io_threads(encrypted) + _ADMISSION + _ALARM + _FREES
    return own + sockets * (_SOCKET + peers)


def _io_threads(encrypted: bool) -> int:
    return 2 if encrypted else 1


class ZeroMQCarrier:
    """`Carrier` over ZeroMQ.

    Args:
        number: this process's.
        addresses: IPv4 addresses of the interfaces to listen on.
        classes: how many, 1 to 4.
        message: bytes of the largest payload; a connection that sends a larger one is closed.
        keys: to encrypt with and to be known by; None sends in the clear.
        heartbeat: seconds without an answer after which a connection ends.

    Attributes:
        reach: what the peers have to know.
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
        self._admission = Admission(self._context)
        self._peers: dict[int, Reach] = {}
        self._connected: dict[int, list[Place]] = {}
        self._ends: dict[Place, str] = {}
        self._said_full = False
        self._sockets: dict[tuple[int, int], zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._alarm: Alarm | None = None
        try:
            for urgency in range(classes):
                for interface, address in enumerate(addresses):
                    socket = self._listen(address, urgency, message)
                    self._sockets[interface, urgency] = socket
                    self._poller.register(socket, zmq.POLLIN)
        except BaseException:
            self.close()
            raise
        ends = [
            tuple(self._sockets[i, u].get_string(zmq.LAST_ENDPOINT) for u in range(classes))
            for i in range(len(addresses))
        ]
        self.reach = Reach(tuple(ends), None if keys is None else keys.public)
        # Looked at in this order: the urgent classes first.
        self._listeners = [Listener(i, u, socket) for (i, u), socket in self._sockets.items()]
        self._only = self._listeners[0] if len(self._listeners) == 1 else None

    @property
    def turned_away(self) -> Counter[str]:
        """How many connections were refused before a frame was read, by the reason."""
        return self._admission.refused

    @property
    def ended(self) -> int:
        """How many connections have ended by now; peers may have made new ones since."""
        return self._admission.ended

    def cut(self, place: Place) -> bool:
        """Whether a connection that this process has made there has ended, and is not made anew."""
        return self._ends.get(place) in self._admission.cut

    def admit(self, peers: Mapping[int, Reach]) -> None:
        """Say who may connect, and where they listen. Until then nobody may."""
        self._peers = dict(peers)
        self._admission.admit({reach.public: n for n, reach in peers.items() if reach.public})

    def forget(self, peer: int) -> None:
        """Let a peer whose process has ended connect no more, nor try to connect to it."""
        for place in self._connected.pop(peer, ()):
            self._sockets[place[:2]].disconnect(self._ends.pop(place))
        self.admit({n: reach for n, reach in self._peers.items() if n != peer})

    def know(self, peer: int, reach: Reach) -> None:
        """Let a new process connect, which listens there."""
        self.admit({**self._peers, peer: reach})

    @property
    def interfaces(self) -> frozenset[int]:
        """The numbers of the interfaces that it listens on."""
        return frozenset(interface for interface, _ in self._sockets)

    def keep(self, interfaces: Collection[int]) -> None:
        """Stop listening on all other interfaces: no peer is reached over them."""
        for listener in list(self._listeners):
            if listener.interface not in interfaces:
                self._listeners.remove(listener)
                self._poller.unregister(listener.socket)
                del self._sockets[listener.interface, listener.urgency]
                listener.socket.close(linger=0)
        alone = len(self._listeners) == 1 and self._alarm is None
        self._only = self._listeners[0] if alone else None

    def place(self, peer: int, interface: int, urgency: int, *, theirs: int) -> Place | None:
        """Connect to a peer's interface number ``theirs``; None if the peer connects to us."""
        if peer < self._number:
            return None
        socket, reach = self._sockets[interface, urgency], self._peers[peer]
        # libzmq ends the process if a peer has claimed the same name for a connection of its own.
        name = secrets.token_bytes(16)
        socket.set(zmq.CONNECT_ROUTING_ID, name)
        if self._keys is not None:
            socket.curve_server = 0
            socket.curve_serverkey = reach.public
        endpoint = reach.endpoints[theirs][urgency]
        socket.connect(endpoint)
        made = Place(interface, urgency, name)
        self._connected.setdefault(peer, []).append(made)
        self._ends[made] = endpoint
        return made

    def send(self, place: Place, parts: Sequence[Buffer]) -> bool:
        """As `Carrier.send`; a frame for a connection that has `QUEUED` frames is lost."""
        interface, urgency, name = place
        socket = self._sockets[interface, urgency]
        try:
            _send(socket, name, _MORE)
        except zmq.Again:
            self._say_full(place)
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

    def _say_full(self, place: Place) -> None:
        """Warn of a connection that takes nothing, once: its peer may cause this without end."""
        if not self._said_full:
            self._said_full = True
            _log.warning(
                "process %d: a connection on interface %d, class %d, takes no frames; %d wait for "
                "it, and more are dropped until its peer reads them: a peer asks and does not read",
                self._number,
                place.interface,
                place.urgency,
                QUEUED,
            )

    def receive(self, seconds: float) -> Arrival | None:
        """As `Carrier.receive`.

        Raises:
            WingbeatError: the thread that admits connections has ended by an exception.
        """
        if seconds <= 0:
            return self._look()
        if self._only is not None:
            return self._wait_at(self._only, seconds)
        if not self._poller.poll(int(min(seconds, 3600.0) * 1e3) + 1):
            self._check_admission()
            return None
        if self._alarm is not None:
            self._alarm.heard()
        return self._look()

    def interrupter(self) -> Callable[[], None]:
        """Return a function for other threads: a `receive` that waits, or waits next, ends."""
        if self._alarm is None:
            self._alarm = Alarm()
            self._poller.register(self._alarm.fileno(), zmq.POLLIN)
            self._only = None  # a wait at one socket hears nothing else
        return self._alarm.ring

    def close(self, linger: float = 0.0) -> None:
        """Close every connection, ``linger`` seconds later if frames still leave.

        May be called again.
        """
        if self._context.closed:
            return
        self._admission.close()
        if self._alarm is not None:
            self._alarm.close()
        for socket in self._sockets.values():
            socket.close(linger=round(1e3 * linger))
        ending = threading.Thread(target=self._context.term, name="wingbeat-closing", daemon=True)
        ending.start()
        ending.join(linger + CLOSING_S)
        if ending.is_alive():
            _log.warning(
                "process %d: connections are not closed after %g s; their ports stay taken until "
                "it ends",
                self._number,
                linger + CLOSING_S,
            )

    def _look(self) -> Arrival | None:
        for listener in self._listeners:
            try:
                name = listener.socket.recv(_LAST)
            except zmq.Again:
                continue
            return self._read(listener, name)
        self._check_admission()
        return None

    def _check_admission(self) -> None:
        """Raise what has ended the admission's thread; called where no frame waits to be read."""
        if self._admission.failure:
            raise WingbeatError(f"process {self._number}: {self._admission.failure}")

    def _wait_at(self, listener: Listener, seconds: float) -> Arrival | None:
        """Wait at the only socket there is, which takes one call in place of two.

        For one of a few lengths, perhaps sooner than asked: to set another takes time as well.
        """
        for patience in _PATIENCES:
            if 1e3 * seconds >= patience:
                break
        if patience != listener.patience:
            listener.socket.rcvtimeo = listener.patience = patience
        try:
            name = listener.socket.recv()
        except zmq.Again:
            self._check_admission()
            return None
        return self._read(listener, name)

    def _read(self, listener: Listener, name: bytes) -> Arrival:
        receive = listener.socket.recv
        head = receive(copy=False)
        place = listener.places.get(name)
        if place is None:
            place = listener.place(name, self._user(head))
        if not head.more:
            return Arrival(place.place, head.buffer, None, place.peer)
        payload, whole = receive(copy=False), True
        while payload.more:
            payload, whole = receive(copy=False), False
        return Arrival(place.place, head.buffer, payload.buffer, place.peer, whole)

    def _user(self, frame: Any) -> int | None:
        """Whose key was proved for the connection that a frame came on."""
        if self._keys is None:
            return None
        try:
            return int(frame.get("User-Id"))
        except (zmq.ZMQError, ValueError):
            return None  # this end has connected, and has checked the peer's key by that

    def _listen(self, address: str, urgency: int, message: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        tos = tos_of(urgency, self._classes)
        options = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.PROBE_ROUTER: 1,  # tells a peer that its connection has been made anew
            zmq.MAXMSGSIZE: max(message, LARGEST + INLINE) + SEALED * (self._keys is not None),
            zmq.SNDHWM: QUEUED,
            zmq.RCVHWM: 1000,
            zmq.SNDBUF: SEND_BUFFER,
            zmq.TOS: tos,
            # Where it is set IPv4's addresses are written as IPv6's, and their classes are lost.
            zmq.IPV6: int(":" in address),
            # The default is to wait without end. A connection that the peer has ended keeps what
            # held then, whatever `close` says later, and with it the whole context.
            zmq.LINGER: 0,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.HEARTBEAT_IVL: 10_000,
            zmq.HEARTBEAT_TIMEOUT: round(1e3 * self._heartbeat),
        }
        for option, value in options.items():
            socket.set(option, value)
        socket.copy_threshold = INLINE  # a header is copied: it costs less than to lend it
        if self._keys is not None:
            socket.curve_secretkey = self._keys.secret
            socket.curve_publickey = self._keys.public
            socket.curve_server = 1
            socket.zap_domain = b"wingbeat"
        self._admission.watch(socket)
        try:
            socket.bind(f"tcp://{in_brackets(address)}:*")
        except zmq.ZMQError as err:
            socket.close()
            raise UsageError(
                f"cannot listen on {address}: {err.strerror}; name interfaces that are up: "
                "init(interfaces=[...])"
            ) from None
        return socket
