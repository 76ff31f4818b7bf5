"""Mailboxes, with which a thread posts messages to other processes and receives theirs."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.interfaces import interface_pairs
from wingbeat.transport.messages.frames import (
    DTYPES,
    HEADER_BYTES,
    MAX_SPANS,
    Limits,
    Message,
    Posted,
)
from wingbeat.transport.messages.peers import (
    PeerInfo,
    Route,
    Routes,
    check_same_options,
    pair_key,
)

if TYPE_CHECKING:
    from wingbeat import _native

CLOSE_TIMEOUT_S = 5.0
"""Seconds for a peer to acknowledge that this process leaves."""

_WATCH_S = 1.0  # between two calls of ``watch``
_LINGER_S = 1.0
"""Seconds for sending the last frames, after everything else has arrived."""

_NO_IDS = (0, 0, 0, 0)
_DTYPES = {name: number for number, name in enumerate(DTYPES)}


class Mailbox:
    """One process's end of the message layer, created by `open_mailbox`, which publishes ``info``.

    Any thread may use it. Frames are sent and received by the thread that waits in a method, and
    by a thread of the extension otherwise, so a process that computes does not delay its peers.
    """

    def __init__(
        self, routes: Routes, info: PeerInfo, secret: int, carrier: _native.Carrier, limits: Limits
    ) -> None:
        self._routes, self.info, self._secret = routes, info, secret
        self._carrier, self._limits = carrier, limits
        self._refused: Counter[str] = Counter()
        self._closed = False
        # Not at the exit of the interpreter, which may close the mailbox gracefully.
        weakref.finalize(self, self._carrier.abandon).atexit = False
        _mailboxes.add(self)

    @property
    def peers(self) -> tuple[int, ...]:
        """Numbers of the peers."""
        return self._routes.peers

    @property
    def largest(self) -> int:
        """Limit of a payload, in bytes."""
        return self._limits.message

    @property
    def refused(self) -> Counter[str]:
        """Number of dropped frames, by reason; see docs/developers/messages.md.

        The application may count messages that it refuses, under reasons of its own.
        """
        self._refused.update(Counter(self._carrier.refused) - self._refused)
        return self._refused

    @property
    def refused_connections(self) -> Counter[str]:
        """Number of connections refused before a frame was read, by reason."""
        return Counter(self._carrier.refused_connections)

    def interfaces(self, peer: int) -> tuple[int, ...]:
        """Numbers of this process's interfaces that reach ``peer``."""
        return self._routes.interfaces(peer)

    def room(self, peer: int, *, interface: int | None = None, urgency: int | None = None) -> int:
        """Bytes of the window that are free, so that `post` does not wait."""
        self._check_open("room")
        return self._carrier.room(*self._routes.choose(peer, interface, urgency))

    def post(
        self,
        peer: int,
        kind: int,
        payload: Any = b"",
        *,
        ids: Sequence[int] = _NO_IDS,
        dtype: str = "",
        spans: Iterable[tuple[int, int]] = (),
        interface: int | None = None,
        urgency: int | None = None,
        seconds: float | None = None,
    ) -> Posted:
        """Send a message. Blocks only while the flow's window is full.

        Args:
            peer: number of the receiver.
            kind: kind of the message, 0 to 2**32 - 1, defined by the application.
            payload: any object with a contiguous buffer. Large payloads are not copied and must not
                change until the returned `Posted` is `done`.
            ids: four numbers from 0 to 2**32 - 1, defined by the application.
            dtype: dtype of the payload, one of `DTYPES`.
            spans: (start, length) pairs, in elements, up to 255.
            interface: this process's interface; None: the first that reaches the peer.
            urgency: the class, 0 the most urgent; None: the least urgent.
            seconds: timeout of the wait for the window; None: `Limits.silence`.

        Raises:
            UsageError: a value that cannot be sent.
            PeerError: the peer is lost, has left, or did not free its window in time.
        """
        self._check_open("post")
        route = self._routes.choose(peer, interface, urgency)
        carrier = self._carrier
        if carrier.troubled:
            self._check_peer(peer, "post to it")
        number = _DTYPES.get(dtype)
        if number is None:
            raise UsageError(f"dtype={dtype!r}; allowed: {', '.join(DTYPES[1:])} or ''")
        ranges = tuple(spans)
        if len(ranges) > MAX_SPANS:
            raise UsageError(f"{len(ranges)} spans; allowed are up to {MAX_SPANS}")
        while True:
            try:
                message = carrier.post(*route, kind, payload, ids, number, ranges)
            except (TypeError, ValueError, OverflowError, BufferError) as error:
                raise self._refusal(error, kind, payload, ids, ranges) from None
            if message is not None:
                return message
            self._check_open("post")
            self._routes.choose(*route)  # another thread may have dropped the peer
            size = HEADER_BYTES + 16 * len(ranges) + memoryview(payload).nbytes
            self._wait_for_room(route, size, seconds)

    def next(self, seconds: float, *, keep: bool = False) -> Message | None:
        """Wait for the next event, and return the message if it is one.

        For a thread that only serves the mailbox. Returns None after ``seconds``, an interruption
        or another event. `lost` and `left` list peers that will not respond. ``keep`` is as in
        `poll`.
        """
        self._check_open("next")
        seen = self._carrier.changes
        return self._carrier.receive(seconds, seen, None, keep=keep, interruptible=True)

    def interrupter(self) -> Callable[[], None]:
        """Return a function for other threads that ends the current or next wait in `next`."""
        return self._carrier.interrupt

    @property
    def lost(self) -> Mapping[int, str]:
        """The silent peers, by number, each with an explanation."""
        if not self._carrier.troubled:
            return {}
        found = {}
        for peer, (interface, messages, nbytes) in self._carrier.lost.items():
            several = len(self._routes.interfaces(peer)) > 1 if peer in self.peers else False
            where = f" over {self.info.describe(interface)}" if several else ""
            found[peer] = (
                f"has been silent{where} for {self._limits.silence:g} s; {messages} messages to "
                f"it ({nbytes} bytes) may not have arrived"
            )
        return found

    @property
    def left(self) -> frozenset[int]:
        """The peers that have closed their mailboxes."""
        return frozenset(self._carrier.left) if self._carrier.troubled else frozenset()

    def unconnected(self) -> Mapping[int, float]:
        """Return the peers without connections, with the seconds since then.

        All connections of such a peer have ended, over all interfaces: its process has exited, as a
        live process renews them within moments. A slow or stopped process is not listed, because
        the detection does not depend on silence. But a connection also ends if the peer's host has
        not responded for a minute, or for `Limits.silence` if that is longer, because the network
        is cut.
        """
        self._check_open("unconnected")
        return self._carrier.unconnected()

    def drop(self, peer: int) -> None:
        """Remove a peer whose process has exited."""
        self._check_open("drop")
        self._routes.remove(peer)
        self._carrier.remove_peer(peer)

    def join(self, peer: int, info: PeerInfo) -> None:
        """Connect to a process, for example to one that replaces one that was dropped.

        A `UsageError` if its mailbox has different options.
        """
        own, found = self.info, []
        check_same_options(self._routes.me, own, self._routes.name(peer), info)
        self.drop(peer)
        self._carrier.allow(peer, info.session, pair_key(self._secret, own, info))
        for mine, other in interface_pairs(own.host, info.host):
            for urgency, port in enumerate(info.ports[other]):
                found.append(Route(peer, mine, urgency))
                address = info.host.interfaces[other].address
                self._carrier.add_route(*found[-1], address, port, other)
        self._routes.set(peer, found)

    def poll(self, *, keep: bool = False) -> Message | None:
        """Return the next message if there is one. Does not wait.

        With ``keep``, the message counts against the window of its flow until `free`.
        """
        self._check_open("poll")
        return self._carrier.poll(None, keep=keep)

    def free(self, message: Message) -> None:
        """Return the bytes of a message taken with ``keep`` to the window."""
        self._check_open("free")
        self._carrier.free(message)

    def wait_connected(self, seconds: float, watch: Callable[[], None] = lambda: None) -> None:
        """Wait until a frame of every peer has arrived on every interface and in every class.

        A `PeerError` if one has not; names the peer and the interface. ``watch`` is called every
        second, and may raise.
        """
        deadline = time.monotonic() + seconds
        left = seconds
        while not self._carrier.wait_heard(min(left, _WATCH_S)) and left > 0:
            watch()
            left = max(0.0, deadline - time.monotonic())
        unheard = self._carrier.unheard()
        if unheard is None:
            return
        peer, interface = unheard
        where = self.info.describe(interface)
        raise self._error(
            f"{self._routes.name(peer)} did not answer over {where} within {seconds:g} s: check "
            "that it runs and that no firewall blocks the connection, or name the interfaces that "
            "connect all hosts: init(interfaces=[...])"
        )

    def close(self, seconds: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until all messages have arrived, notify the peers, and close the connections.

        A `PeerError` if messages have not arrived within ``seconds``; the connections are closed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            late = self._carrier.leave(seconds)
        finally:
            self._carrier.close(_LINGER_S)
        if late:
            raise self._error(
                f"not all messages have arrived at {self._routes.names(late)} within "
                f"{seconds:g} s of close()"
            )

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Close the connections at once, without notifying the peers. Idempotent."""
        self._closed = True
        self._carrier.abandon()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise UsageError(f"{self._routes.me}: this mailbox is closed: cannot {what}")

    def _refusal(
        self, error: Exception, kind: Any, payload: Any, ids: Any, spans: Any
    ) -> UsageError:
        """Return the error that names the argument of `post` that cannot be sent."""
        try:
            nbytes = memoryview(payload).cast("B").nbytes if memoryview(payload).nbytes else 0
        except (TypeError, BufferError) as why:
            return UsageError(
                f"payload of type {type(payload).__name__}: {why}; allowed are objects with a "
                "contiguous buffer: bytes, a NumPy array, tensor.numpy()"
            )
        if nbytes > self.largest:
            return UsageError(
                f"a payload of {nbytes} bytes; allowed are {self.largest}: post it in pieces"
            )
        if not isinstance(error, TypeError | OverflowError):
            return UsageError(str(error))
        return UsageError(
            f"kind={kind!r}, ids={ids!r}, spans={spans!r:.80}: allowed are a kind and four ids "
            "from 0 to 2**32 - 1, and (start, length) pairs of numbers from 0 to 2**64 - 1"
        )

    def _wait_for_room(self, route: Route, size: int, seconds: float | None) -> None:
        seconds = self._limits.silence if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while self._carrier.room(*route) < size:
            seen = self._carrier.changes
            self._check_open("post")
            self._routes.choose(*route)
            self._check_peer(route.peer, "wait for it to take messages")
            left = deadline - time.monotonic()
            if left <= 0:
                used = self._limits.window - self._carrier.room(*route)
                raise self._error(
                    f"{self._routes.name(route.peer)} consumed nothing for {seconds:g} s: "
                    f"{used} of {self._limits.window} bytes of its window are in use"
                )
            self._carrier.wait_room(left, seen, *route, size)

    def _error(self, what: str) -> PeerError:
        return PeerError(f"{self._routes.me}: {what}")

    def _check_peer(self, peer: int, what: str) -> None:
        """Raise a `PeerError` if ``peer`` is lost or has left, so that ``what`` is impossible."""
        if peer in self.lost:
            raise self._error(f"{self._routes.name(peer)} {self.lost[peer]}")
        if peer in self.left:
            raise self._error(f"{self._routes.name(peer)} has left, so this process cannot {what}")


_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _after_fork() -> None:
    """Close a forked child's copies of the sockets: a peer would not notice the parent's end."""
    for mailbox in list(_mailboxes):
        mailbox._closed = True
        mailbox._carrier.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)
