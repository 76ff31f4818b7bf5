"""Links over TCP: one authenticated connection to each peer over each interface (Linux).

Two ranks of one host connect through a Unix socket and carry the bytes in shared memory; over TCP
if that is impossible.

Every connection is authenticated in both directions before any other byte of it is used: both ends
prove with HMAC-SHA256 over two nonces that they have the job's key. The key is WINGBEAT_JOB_KEY, or
without it a secret that the ranks exchange through the rendezvous store. Connections between hosts
are encrypted, unless the ranks choose otherwise (``encryption.py``). The bytes are carried by
threads of the extension (``native/src/net``), one per interface.

All ranks connect in `connect`. The ports stay open: a rank that was restarted, and ranks whose
connection was lost, connect again when a group needs it.

With several interfaces, a connection outlives its socket: it continues over another interface
(``repair.py``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import itertools
import json
import os
import re
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wingbeat import _native
from wingbeat.errors import RendezvousError
from wingbeat.observe.log import log, log_event
from wingbeat.settings import is_on
from wingbeat.transport import encryption, repair
from wingbeat.transport.failures import process_has_ended, published_failure
from wingbeat.transport.handshake import (
    IDENTITY,
    MAGIC,
    PROOF_BYTES,
    check_proof,
    new_challenge,
    prove,
    sign,
)
from wingbeat.transport.interfaces import Interface, host_identity
from wingbeat.transport.link import TAG_BITS, group_prefix
from wingbeat.transport.store import Store
from wingbeat.types import Group

_MAPPED = b"m"
"""Sent by the connecting process once it has mapped the shared memory."""

_HANDSHAKE_S = 10.0
"""Seconds for a connected process to prove that it has the key."""

_MAX_STRANGERS = 64
"""Unauthenticated connections in excess of the expected ones; then one is closed."""

_SECRET = re.compile("[0-9a-f]{64}")

_NAME = re.compile("(wingbeat/[0-9a-f]{32})?")
"""The name of an abstract Unix socket; empty without one."""

_RETRY_S = 0.05
_MIN_CONNECT_S = 0.1

_ENDED_CHECK_S = 0.5
"""Seconds between two checks whether a rank that has not connected has ended."""

_AGAIN_S = 5.0
"""Seconds to connect again to a rank that a group needs."""

_CLOSE_S = 1.0
"""Seconds for the peers to read what was sent last and to close their ends."""


SWITCH = "WINGBEAT_SHARED_MEMORY"


def shared_memory_enabled(env: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks of one host use shared memory; a `UsageError` if the variable is invalid."""
    return is_on(SWITCH, env)


class _EndedRankError(RendezvousError):
    """No process listens at a rank's address, where one did."""


class _EngineLink:
    """Sends and receives single messages over connections of the extension."""

    @functools.cached_property
    def native(self) -> _native.Group:
        """The connections; those of a group are restored by the first use if they were lost."""
        return self._connect()

    def _connect(self) -> _native.Group:
        raise NotImplementedError

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _native.Message:
        """As `Link.send`; in a group ``peer`` is an index in it."""
        place = _channel_and_tag(tag)
        return self.native.send(tensor, tensor.data_ptr(), tensor.nbytes, peer, *place)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> _native.Message:
        """As `Link.recv`; in a group ``peer`` is an index in it."""
        place = _channel_and_tag(tag)
        return self.native.receive(tensor, tensor.data_ptr(), tensor.nbytes, peer, *place)


class TcpLink(_EngineLink):
    """The connections of this process over one interface; as `wingbeat.transport.link.Link`."""

    def __init__(self, name: str, size: int, port: _Port | None = None) -> None:
        self.name = name
        self.nic = _native.Nic(name) if port is None else port.nic
        self.port = port
        self._size = size
        self._closed = False
        weakref.finalize(self, _release, self.nic, port)
        _links.add(self)

    def _connect(self) -> _native.Group:
        return _native.Group(self.nic, _WORLD, list(range(self._size)))

    @property
    def moved(self) -> bool:
        """Whether connections of this link use another interface."""
        port = self.port
        return port is not None and any(path != port._index for path in port.paths.values())

    def abort_waits(self) -> None:
        """End all waits on this link, in any thread, and close it."""
        self.nic.fail("the wait was aborted")

    def close(self) -> None:
        """Send what is queued, then close every connection. Idempotent."""
        if not self._closed:
            self._closed = True
            if self.port is not None:
                self.port.close()
                self.port.join(_CLOSE_S)
                repairs = self.port.repairs()
                if repairs is not None and repairs.ended:
                    repairs.join(_CLOSE_S)
            self.nic.close(_CLOSE_S)


_WORLD = 0
"""The number of the world where groups have theirs."""


class GroupLink(_EngineLink):
    """The connections to the members of a group over one interface, as a `Link`.

    Its messages have windows of their own, and its end affects no other user of the connections.
    """

    def __init__(self, link: TcpLink, group: Group) -> None:
        self.name = link.name
        self._link, self._ranks = link, list(group.ranks)
        self._id, self._closed = _number_of(group), False
        self._ended: list[int] = []

    def _connect(self) -> _native.Group:
        port = self._link.port
        if port is not None and not self._closed:
            self._ended = [rank for rank in self._ranks if not port.reach(rank)]
        return _native.Group(self._link.nic, self._id, self._ranks)

    def connect(self) -> list[int]:
        """Restore connections that were lost; return the ranks without a process that listens.

        These have ended. The first message would wait for them as for a rank that is cut off.
        """
        assert self.native, "the first use connects"
        return self._ended

    def abort_waits(self) -> None:
        """End all waits of all members in this group."""
        self._closed = True
        self.native.end(True)

    def close(self) -> None:
        """End the group; the others can still receive what was sent completely. Idempotent."""
        self._closed = True
        self.native.end(False)


def _number_of(group: Group) -> int:
    """Return the number of a group on its connections: the same on all members, and only its."""
    return int.from_bytes(hashlib.sha256(group_prefix(group).encode()).digest()[:8], "little")


def _channel_and_tag(tag: int) -> tuple[int, int]:
    """Return the native channel of single messages, as the odd ones are those of lanes, and the
    tag in it.
    """
    return 2 * (tag >> TAG_BITS), tag & ((1 << TAG_BITS) - 1)


def lane_channel(channel: int) -> int:
    """Return the native channel in which the programs of a world's channel run."""
    return 2 * channel + 1


_links: weakref.WeakSet[TcpLink] = weakref.WeakSet()


def _release(nic: _native.Nic, port: _Port | None) -> None:
    if port is not None:
        port.close()
    nic.stop()


def _after_fork() -> None:
    """Close a forked child's copies of the sockets: a peer would not notice the parent's end."""
    for link in list(_links):
        link._closed = True
        link.nic.forget_after_fork()
        if link.port is not None:
            link.port.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)


def connect(
    rank: int,
    interfaces: Sequence[Interface],
    exchange: Callable[[str, Any], list[Any]],
    job_key: bytes | None,
    timeout: float,
    store: Store,
    *,
    members: Sequence[int] = (),
    encrypted: bool | None = None,
    dscp: int = 0,
    shared_memory: bool = True,
) -> tuple[TcpLink, ...]:
    """Connect this rank to all others over each interface, within ``timeout`` seconds.

    ``exchange``, ``store`` and ``members`` are those of the world, ``encrypted`` and ``dscp`` are
    as in `wingbeat.init`.
    ``shared_memory``: use it with ranks of this host that do the same; its bytes are not encrypted.
    A `RendezvousError` names the rank, address, interface and duration if a peer could not be
    reached, or did not connect.
    """
    links = _make_links(
        *(rank, interfaces, lambda own: exchange("connections", own), job_key, store),
        members=members,
        encrypted=encrypted,
        dscp=dscp,
        shared_memory=shared_memory,
    )
    deadline = time.monotonic() + timeout
    try:
        for link in links:
            assert link.port is not None
            for peer in range(rank):
                link.port.dial(peer, deadline)
        for link in links:
            assert link.port is not None
            link.port.wait_for_higher(timeout, deadline)
    except BaseException:
        for link in links:
            link.abort_waits()
            link.close()
        raise
    return links


def rejoin(
    rank: int,
    interfaces: Sequence[Interface],
    answers: list[Any],
    job_key: bytes | None,
    store: Store,
    *,
    members: Sequence[int] = (),
    encrypted: bool | None = None,
    dscp: int = 0,
    shared_memory: bool = True,
) -> tuple[TcpLink, ...]:
    """Return links of a rank that was restarted; it connects to the others when groups need it.

    ``answers`` are those of the exchange in which its former process took part.
    """

    def publish(own: Any) -> list[Any]:
        store.set(f"connections/{rank}", json.dumps(own))
        return answers

    return _make_links(
        *(rank, interfaces, publish, job_key, store),
        members=members,
        encrypted=encrypted,
        dscp=dscp,
        shared_memory=shared_memory,
    )


def _make_links(
    rank: int,
    interfaces: Sequence[Interface],
    publish: Callable[[Any], list[Any]],
    job_key: bytes | None,
    store: Store,
    *,
    members: Sequence[int],
    encrypted: bool | None,
    dscp: int,
    shared_memory: bool,
) -> tuple[TcpLink, ...]:
    """Publish this rank's addresses, and accept connections of ranks that have the key."""
    host, secret = host_identity() if shared_memory else "", secrets.token_hex(32)
    listeners = [
        (_listen(rank, each), _listen_locally() if shared_memory else None) for each in interfaces
    ]
    try:
        places = [_place_of(*pair) for pair in listeners]
        answers = publish([secret, host, encrypted, *places])
        first = [_checked(rank, n, a, len(interfaces)) for n, a in enumerate(answers)]
        encryption.check(
            rank,
            [encrypted if n == rank else each.encrypted for n, each in enumerate(first)],
            [[place.address for place in each.places] for each in first],
            job_key,
        )
        ranks = _Ranks(rank, first, secret, host, store, members or range(len(first)))
    except BaseException:
        for listener in filter(None, itertools.chain(*listeners)):
            listener.close()
        raise
    texts = "/".join(each.secret for each in ranks.first)
    key = hmac.new(job_key or b"", b"connections/" + texts.encode(), hashlib.sha256).digest()
    ports = [
        _Port(pair, ranks, index, interface, key, encrypted, dscp)
        for index, (pair, interface) in enumerate(zip(listeners, interfaces, strict=True))
    ]
    for port in ports:
        port.siblings = [weakref.ref(each) for each in ports]
        port.start()
    if len(ports) > 1:
        repairs = repair.Repairs(rank, ports, len(answers))
        repairs.start()
        for port in ports:
            port.repairs = weakref.ref(repairs)
    return tuple(TcpLink(port.interface.name, len(answers), port) for port in ports)


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
    encrypted: bool | None
    places: list[_Place]

    @property
    def incarnation(self) -> bytes:
        """What distinguishes the process from a former one of its rank."""
        return _incarnation(self.secret)

    def place(self, index: int, host: str) -> _Place:
        """Return where it listens; the Unix socket is only for ranks of its own host."""
        place = self.places[index]
        return place if host == self.host else replace(place, name="")


def _incarnation(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()[:8]


class _Ranks:
    """The addresses of all ranks: those of their first processes, and of restarted ones."""

    def __init__(
        self,
        own: int,
        first: list[_Answer],
        secret: str,
        host: str,
        store: Store,
        members: Sequence[int],
    ) -> None:
        self.own, self.first, self.host, self.members = own, first, host, members
        self.incarnation = _incarnation(secret)
        self._store = store

    def how_ended(self, peer: int) -> str:
        """Return how the process of a rank has ended; empty if it is running, or not known."""
        rank = self.members[peer]
        if not process_has_ended(self._store, rank):
            return ""
        failure = published_failure(self._store, rank)
        return f"it failed with {failure}" if failure else "its process has ended"

    def find(self, peer: int) -> _Answer:
        """Return the present address of a rank."""
        key, first = f"connections/{peer}", self.first[peer]
        try:
            if self._store.has(key):
                answer = json.loads(self._store.get(key, _AGAIN_S))
                return _checked(self.own, peer, answer, len(first.places))
        except (TimeoutError, ValueError, RecursionError, RendezvousError) as error:
            log.warning(
                "rank %d: the new address of rank %d is not used: %s", self.own, peer, error
            )
        return first


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


def _is_place(found: Any) -> bool:
    return (
        isinstance(found, list)
        and [type(each) for each in found] == [str, int, str]
        and _is_address(found[0])
        and 0 < found[1] < 1 << 16
        and _NAME.fullmatch(found[2]) is not None
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # a scope has no meaning on another host


def _checked(rank: int, peer: int, answer: Any, interfaces: int) -> _Answer:
    match answer:
        case [str(secret), str(host), bool() | None as encrypted, *places] if (
            _SECRET.fullmatch(secret) is not None
            and len(places) == interfaces
            and all(map(_is_place, places))
        ):
            return _Answer(secret, host, encrypted, [_Place(*place) for place in places])
    raise RendezvousError(
        f"rank {rank}: rank {peer} sent malformed addresses: {str(answer)[:80]!r}"
    )


def _log_no_memory(rank: int, peer: int, error: Exception) -> None:
    log.warning(
        "rank %d shares no memory with rank %d, which is on the same host: %s; they use TCP",
        *(rank, peer, str(error)),
    )


def _set_options(connection: socket.socket, dscp: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connection.family == socket.AF_INET6:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    else:
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


class _Port(threading.Thread):
    """The port of this rank on one interface: accepts connections in a thread, and makes them.

    Connections of other programs are closed after a time limit, or earlier if there are many.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket | None],
        ranks: _Ranks,
        index: int,
        interface: Interface,
        key: bytes,
        encrypted: bool | None,
        dscp: int,
    ) -> None:
        super().__init__(name="wingbeat-accept", daemon=True)
        self.nic, self.interface = _native.Nic(interface.name), interface
        self._listeners = [each for each in listeners if each is not None]
        self._ranks, self._index, self._key, self._encrypted = ranks, index, key, encrypted
        self._dscp = dscp
        self._rank, size = ranks.own, len(ranks.first)
        self._changed = threading.Condition()
        self._missing = set(range(self._rank + 1, size))
        self._dialing: set[int] = set()
        self._admitted: set[_Newcomer] = set()  # answered, and not yet usable
        self._incarnations: dict[int, bytes] = {}
        self.siblings = [weakref.ref(self)]  # this one included, by interface
        self.repairs: Callable[[], repair.Repairs | None] = lambda: None
        self.paths: dict[int, int] = {}  # of peers whose connection uses another interface
        self._most = size + _MAX_STRANGERS
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, _Newcomer] = {}
        self._warned: set[str] = set()

    def close(self) -> None:
        """Stop accepting, and replacing sockets. Idempotent."""
        self._closed = True
        if (repairs := self.repairs()) is not None:
            repairs.end(self._index)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def forget_after_fork(self) -> None:
        """Close the copies of the sockets in a forked child, where the thread does not exist."""
        for each in (*self._listeners, *self._pending):
            each.close()

    def wait_for_higher(self, timeout: float, deadline: float) -> None:
        """Wait until all higher ranks have connected; a `RendezvousError` at the deadline."""
        me = self._ranks.members[self._rank]
        for turn in itertools.count():
            with self._changed:
                left = max(0.0, min(_ENDED_CHECK_S, deadline - time.monotonic()))
                if self._changed.wait_for(lambda: not self._missing, left):
                    return
                missing = sorted(self._missing)
            where = f"rank {me} at {self.interface.address} on interface {self.interface.name}"
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"{where}: rank {self._ranks.members[missing[0]]} did not connect within "
                    f"{timeout:g} s; check that every host can reach this address, or name other "
                    "interfaces"
                )
            peer = missing[turn % len(missing)]
            if how := self._ranks.how_ended(peer):
                raise RendezvousError(
                    f"{where}: rank {self._ranks.members[peer]} did not connect: {how}; read its "
                    "output"
                )

    def reach(self, peer: int) -> bool:
        """Connect to a rank if there is no connection; log why if that is impossible.

        Return False if no process listens at its address: it has ended.
        """
        if peer == self._rank or self.nic.connected(peer):
            return True
        with self._changed:
            if not self._changed.wait_for(lambda: not self._connecting(peer), _AGAIN_S):
                return True
            if self.nic.connected(peer):
                return True
            self._dialing.add(peer)
        try:
            self.dial(peer, time.monotonic() + _AGAIN_S)
        except RendezvousError as error:
            log.warning("%s", error)
            return not isinstance(error, _EndedRankError)
        finally:
            with self._changed:
                self._dialing.discard(peer)
                self._changed.notify_all()
        return True

    def _connecting(self, peer: int) -> bool:
        return peer in self._dialing or any(each.peer == peer for each in self._admitted)

    def dial(self, peer: int, deadline: float) -> None:
        """Connect to a rank from the interface's address, unless it connects to this one first."""
        begin, own, again = time.monotonic(), self.interface, peer in self._dialing
        checked = begin
        identity = IDENTITY.pack(self._rank, peer, self._index, 0, self._ranks.incarnation)
        locally = True
        while True:
            answer = self._ranks.find(peer) if again else self._ranks.first[peer]
            place = answer.place(self._index, self._ranks.host)
            left = max(_MIN_CONNECT_S, deadline - time.monotonic())
            try:
                made: tuple[int, bytes, _native.Rings | None] | None = None
                if locally and place.name:
                    locally, made = False, self._dial_locally(peer, place.name, identity, left)
                if made is None and not self.nic.connected(peer):
                    made = (
                        *self._dial_over_tcp(place, identity, left, min(left, _HANDSHAKE_S)),
                        None,
                    )
                if made is not None:
                    self._incarnations[peer] = answer.incarnation
                    self.paths.pop(peer, None)
                    self.nic.add(peer, *made, len(self.siblings) > 1)
                return
            except OSError as error:
                if self.nic.connected(peer):
                    return
                gone = again and isinstance(error, ConnectionRefusedError)
                temporary = isinstance(error, TimeoutError | ConnectionError) and not gone
                how, now = "", time.monotonic()
                due = not temporary or now >= min(checked + _ENDED_CHECK_S, deadline)
                if due and not again:
                    checked, how = now, self._ranks.how_ended(peer)
                if how or now >= deadline or not temporary:
                    me, other = (self._ranks.members[each] for each in (self._rank, peer))
                    raise (_EndedRankError if gone else RendezvousError)(
                        f"rank {me} at {own.address} on interface {own.name} did not reach "
                        f"rank {other} at {place.address} after {time.monotonic() - begin:.1f} s: "
                        f"{how or error}; check that every host can reach this address, or name "
                        "other interfaces"
                    ) from None
                time.sleep(_RETRY_S)

    @contextlib.contextmanager
    def reserve(self, peer: int) -> Iterator[bool]:
        """Have no other thread, and no lower rank, connect to a rank; False if one does so now."""
        with self._changed:
            free = not self._connecting(peer)
            if free:
                self._dialing.add(peer)
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._dialing.discard(peer)
                    self._changed.notify_all()

    def continue_over(self, path: int, peer: int, seconds: float) -> None:
        """Continue the connection to a rank over the interface ``path``, an index.

        An `EndedError` if the rank has ended it, another `OSError` if it was not reached.
        """
        known, answer = self._incarnations[peer], self._ranks.first[peer]
        if answer.incarnation != known:  # it was restarted
            answer = self._ranks.find(peer)
            if answer.incarnation != known:
                raise repair.EndedError("the peer was restarted")
        identity = IDENTITY.pack(self._rank, peer, self._index, 1, self._ranks.incarnation)
        place = answer.places[path]
        made = self._sibling(path)._dial_over_tcp(place, identity, seconds, _AGAIN_S)
        self._continue(peer, path, *made)

    def _sibling(self, index: int) -> _Port:
        found = self.siblings[index]()
        if found is None:
            raise repair.EndedError("the interface is closed")
        return found

    def _continue(self, peer: int, path: int, descriptor: int, keys: bytes) -> None:
        if self.nic.resume(peer, descriptor, keys):
            before, self.paths[peer] = self.paths.get(peer, self._index), path
            if before != path:
                me, other = (self._ranks.members[each] for each in (self._rank, peer))
                log_event(
                    "path-restored" if path == self._index else "path-cut",
                    f"rank {me}: the connection of interface {self.interface.name} to rank {other} "
                    f"continues over {self._sibling(path).interface.name}",
                    rank=me,
                )

    def _dial_over_tcp(
        self, place: _Place, identity: bytes, seconds: float, answer_s: float = _HANDSHAKE_S
    ) -> tuple[int, bytes]:
        """Connect from the interface's address; return the descriptor and the keys."""
        target = place.address, place.port
        with socket.create_connection(target, seconds, (self.interface.address, 0)) as connection:
            connection.settimeout(answer_s)
            try:
                handshake, _ = prove(connection, identity, self._key)
            except TimeoutError:
                raise ConnectionError("the process there does not answer") from None
            _set_options(connection, self._dscp)
            keys = encryption.keys(self._encrypted, connection, self._key, True, handshake)
            return connection.detach(), keys

    def _dial_locally(
        self, peer: int, name: str, identity: bytes, seconds: float
    ) -> tuple[int, bytes, _native.Rings] | None:
        """Connect to a rank of this host; return the socket's descriptor and the shared memory."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(min(seconds, _HANDSHAKE_S))
                connection.connect("\0" + name)
                _, descriptors = prove(connection, identity, self._key)
                rings = _native.Rings(descriptors)
                connection.sendall(_MAPPED)
                return connection.detach(), b"", rings
        except (OSError, RuntimeError) as error:
            if peer not in self._dialing:  # else it may connect to this rank at the same time
                _log_no_memory(self._rank, peer, error)
            return None

    def run(self) -> None:
        """Accept connections until the port is closed."""
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        try:
            while not self._closed:
                for key, _ in self._selector.select(_RETRY_S if self._pending else None):
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
            for listener in self._listeners:
                listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left
            if self._closed:
                return
            if self._pending:
                self._drop_stranger()
            else:
                time.sleep(_RETRY_S)
            return
        while len(self._pending) >= self._most:
            self._drop_stranger()
        connection.setblocking(False)
        challenge = new_challenge()
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
        awaited = PROOF_BYTES if newcomer.rings is None else PROOF_BYTES + len(_MAPPED)
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
        proof = check_proof(newcomer.challenge, newcomer.data, self._key)
        peer, target, index, continues, incarnation = IDENTITY.unpack(proof.identity)
        handshake, known = proof.handshake, proof.valid
        others = peer != self._rank and peer < len(self._ranks.first)
        expected_here = index < len(self.siblings) if continues else index == self._index
        if not known or target != self._rank or not expected_here or not others:
            self._warn(newcomer.address, known)
            self._drop(connection)
            return
        if continues:
            self._admit_again(connection, newcomer, self._sibling(index), peer, handshake)
            return
        # Both ranks may connect at the same time; then the higher one's connection is used. If it
        # has answered the lower one, it does not begin to connect.
        newcomer.peer, newcomer.incarnation = peer, incarnation
        with self._changed:
            dialing = peer in self._dialing and self._rank > peer
            again = self._incarnations.get(peer) == incarnation and self.nic.connected(peer)
            if not (dialing or again):
                self._admitted.add(newcomer)
        if dialing or again:
            self._drop(connection)
            return
        reply = sign(self._key, b"accept", handshake)
        try:
            if connection.family == socket.AF_UNIX:
                newcomer.rings = _native.Rings()
                socket.send_fds(connection, [reply], newcomer.rings.descriptors)
                return  # the peer confirms that it has mapped the memory
            newcomer.keys = encryption.keys(
                self._encrypted, connection, self._key, False, handshake
            )
            connection.send(reply)
            _set_options(connection, self._dscp)
        except (OSError, RuntimeError) as error:
            if connection.family == socket.AF_UNIX:
                _log_no_memory(self._rank, peer, error)
            self._drop(connection)
            return
        self._add(connection, newcomer)

    def _admit_again(
        self,
        connection: socket.socket,
        newcomer: _Newcomer,
        port: _Port,
        peer: int,
        handshake: bytes,
    ) -> None:
        """Continue a connection of the interface of ``port`` over this one."""
        incarnation = IDENTITY.unpack_from(newcomer.data, len(MAGIC))[-1]
        usable = port._incarnations.get(peer) == incarnation and port.nic.health(peer) is not None
        with port._changed:
            dialing = peer in port._dialing and self._rank > peer
        if dialing:
            self._drop(connection)
            return
        try:
            connection.send(sign(self._key, b"accept" if usable else b"ended", handshake))
            if usable:
                _set_options(connection, self._dscp)
                keys = encryption.keys(self._encrypted, connection, self._key, False, handshake)
        except OSError:
            usable = False
        if not usable:
            self._drop(connection)
            return
        self._forget(connection)
        port._continue(peer, self._index, connection.detach(), keys)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._pending[connection]

    def _add(self, connection: socket.socket, newcomer: _Newcomer) -> None:
        self._forget(connection)
        self._incarnations[newcomer.peer] = newcomer.incarnation
        self.paths.pop(newcomer.peer, None)
        self.nic.add(
            *(newcomer.peer, connection.detach(), newcomer.keys, newcomer.rings),
            len(self.siblings) > 1,
        )
        with self._changed:
            self._admitted.discard(newcomer)
            self._missing.discard(newcomer.peer)
            self._changed.notify_all()

    def _warn(self, address: str, known: bool) -> None:
        if address in self._warned or len(self._warned) == _MAX_STRANGERS:
            return
        self._warned.add(address)
        log.warning(
            "rank %d: connections from %s on interface %s are refused: %s",
            *(self._ranks.members[self._rank], address, self.interface.name),
            "they are not expected" if known else "they do not have this job's key",
        )

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in [each for each, of in self._pending.items() if of.until < now]:
            self._drop(connection)

    def _drop_stranger(self) -> None:
        """Close the oldest of the address that has the most: a flood closes only its own."""
        counts = Counter(each.address for each in self._pending.values())
        self._drop(max(self._pending, key=lambda each: counts[self._pending[each].address]))

    def _drop(self, connection: socket.socket) -> None:
        newcomer = self._pending.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        with self._changed:
            self._admitted.discard(newcomer)
            self._changed.notify_all()


class _Newcomer:
    """A connection that has not proved that it has the key, or has not mapped the memory."""

    def __init__(self, address: str, challenge: bytes, until: float) -> None:
        self.address, self.challenge, self.until = address, challenge, until
        self.data = b""
        self.peer = 0
        self.keys = b""
        self.rings: _native.Rings | None = None
        self.incarnation = b""
