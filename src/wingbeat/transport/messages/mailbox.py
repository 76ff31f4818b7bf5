"""Mailboxes, with which a thread posts messages to other processes and receives theirs."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.messages.endpoint import Endpoint, Message, Route
from wingbeat.transport.messages.frames import NEVER, NO_IDS, Carrier, Posted, compose, leave_frame

if TYPE_CHECKING:
    from wingbeat.transport.messages.peers import Connector, PeerInfo


class Routes:
    """The routes of one process; ``me`` is its name in messages, ``name`` formats other names."""

    def __init__(self, routes: Iterable[Route], own: int, name: Callable[[int], str]) -> None:
        self.name, self.me = name, name(own)
        self.renew(routes)

    def renew(self, routes: Iterable[Route]) -> None:
        """Replace the routes."""
        self._by_peer: dict[int, list[Route]] = {}
        for route in routes:
            self._by_peer.setdefault(route.peer, []).append(route)
        self.peers = tuple(self._by_peer)
        self._default = {  # the first interface and the last class
            peer: max((r for r in found if r.interface == found[0].interface), key=_urgency)
            for peer, found in self._by_peer.items()
        }
        self._interfaces = {
            peer: tuple(dict.fromkeys(route.interface for route in found))
            for peer, found in self._by_peer.items()
        }

    def to(self, peer: int) -> list[Route]:
        """Return the routes to ``peer``; a `UsageError` if there is none."""
        if peer not in self._by_peer:
            raise UsageError(
                f"{self.me} has no connection to {self.name(peer)}; allowed: "
                f"{self.names(self.peers) or 'none'}"
            )
        return self._by_peer[peer]

    def interfaces(self, peer: int) -> tuple[int, ...]:
        """Return this process's interfaces that reach ``peer``; stored, as servers ask for each
        message.
        """
        self.to(peer)
        return self._interfaces[peer]

    def choose(self, peer: int, interface: int | None, urgency: int | None) -> Route:
        """Return a route, by default the first interface and the last class; or a `UsageError`."""
        usual = self._default.get(peer) or self.to(peer)[0]
        if interface is None and urgency is None:
            return usual
        route = Route(
            peer,
            usual.interface if interface is None else interface,
            usual.urgency if urgency is None else urgency,
        )
        routes = self._by_peer[peer]
        if route not in routes:
            raise UsageError(
                f"interface={interface!r}, urgency={urgency!r} to {self.name(peer)}: allowed are "
                f"interfaces {sorted({r.interface for r in routes})} and classes "
                f"{sorted({r.urgency for r in routes})}"
            )
        return route

    def names(self, peers: Iterable[int]) -> str:
        """Return the names of these processes."""
        return ", ".join(self.name(peer) for peer in sorted(peers))


def _urgency(route: Route) -> int:
    return route.urgency


Method = TypeVar("Method", bound=Callable[..., Any])


def exclusive(method: Method) -> Method:
    """Make a mailbox method exclusive to one thread.

    It raises a `UsageError` if the mailbox is closed, and the original error if it is broken.
    """

    @functools.wraps(method)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._closed:
                raise UsageError(
                    f"{self._routes.me}: this mailbox is closed: cannot {method.__name__}"
                )
            if self._broken is not None:
                raise self._broken
            return method(self, *args, **kwargs)

    return cast("Method", inner)


BUSY_POLL_S, IDLE_POLL_S = 0.005, 0.02
"""Seconds between two turns of the background poller: while frames are expected, and otherwise."""

ACTIVE_S = 1.0
"""Seconds after a frame for which more frames are expected."""

CLOSE_TIMEOUT_S = 5.0
"""Seconds for a peer to acknowledge that this process leaves."""

RECONNECT_S = 1.0
"""Seconds for a live process to renew a lost connection."""

_LINGER_S = 1.0
"""Seconds for sending the last frames, after everything else has arrived."""

SUSPENDED_S = 1.0
"""Seconds without a turn of the poller after which this process counts as suspended."""

_MAX_FRAMES_PER_TURN = 64
"""Frames received before timers are checked, as a peer may send without pause."""


def _poll_until_ended(polled: weakref.ref[Mailbox], ended: threading.Event) -> None:
    period = BUSY_POLL_S
    while not ended.wait(period):
        own = polled()
        if own is None:
            return
        period = own._poll_in_background()
        del own


def _stop_polling(ended: threading.Event, carrier: Carrier) -> None:
    ended.set()
    carrier.close()


class Mailbox:
    """One process's end of the message layer, created by `open_mailbox`.

    Methods are serialized: a thread that waits blocks the others. While no method runs, a
    background poller sends acknowledgements and retransmissions, so a process that computes does
    not delay its peers.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        carrier: Carrier,
        *,
        name: Callable[[int], str] = "rank {}".format,
        clock: Callable[[], float] = time.monotonic,
        connector: Connector | None = None,
    ) -> None:
        self._endpoint, self._connector = endpoint, connector
        self._carrier = carrier
        self._clock = clock
        self._closed = False
        self._broken: Exception | None = None
        self._last_frame = 0.0
        self._last_turn, self._was_suspended = time.monotonic(), False
        self._ended_connections = 0
        self._routes = Routes(endpoint.flows, endpoint.membership.number, name)
        self._reported: set[int] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # The poller must not keep an unused mailbox alive.
        self._finalizer = weakref.finalize(self, _stop_polling, self._ended, carrier)
        # Not at interpreter exit: libzmq aborts the process if another thread is using the sockets.
        # The system closes them.
        self._finalizer.atexit = False
        self._poller = threading.Thread(
            target=_poll_until_ended,
            args=(weakref.ref(self), self._ended),
            name="wingbeat-mail",
            daemon=True,
        )
        self._poller.start()

    @property
    def peers(self) -> tuple[int, ...]:
        """Numbers of the peers."""
        return self._routes.peers

    @property
    def largest(self) -> int:
        """Limit of a payload, in bytes."""
        return self._endpoint.limits.message

    @property
    def refused(self) -> Counter[str]:
        """Number of dropped frames, by reason; see docs/developers/messages.md."""
        return self._endpoint.refused

    @property
    def refused_connections(self) -> Counter[str]:
        """Number of connections refused before a frame was read, by reason."""
        return self._carrier.refused_connections

    def interfaces(self, peer: int) -> tuple[int, ...]:
        """Numbers of this process's interfaces that reach ``peer``."""
        return self._routes.interfaces(peer)

    @exclusive
    def room(self, peer: int, *, interface: int | None = None, urgency: int | None = None) -> int:
        """Bytes of the window that are free, so that `post` does not wait."""
        return self._endpoint.flows[self._routes.choose(peer, interface, urgency)].room

    @exclusive
    def post(
        self,
        peer: int,
        kind: int,
        payload: Any = b"",
        *,
        ids: Sequence[int] = NO_IDS,
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
        route = self._routes.choose(peer, interface, urgency)
        endpoint = self._endpoint
        if endpoint.lost or endpoint.left:
            self._check_peer(peer, "post to it")
        message = compose(kind, payload, ids, dtype, spans, most=endpoint.limits.message)
        if endpoint.flows[route].room < message.size:
            self._wait_for_room(route, message.size, seconds)
        endpoint.post(route, message, self._carrier.send, self._clock())
        return message

    @exclusive
    def receive(self, seconds: float | None = None, *, of: Iterable[int] | None = None) -> Message:
        """Wait for the next message, the most urgent first, and return it.

        Args:
            seconds: timeout; None: `Limits.silence`.
            of: peers whose messages to return; None: all.

        Raises:
            PeerError: no message arrived in time, or an expected sender is lost or has left.
        """
        wanted = None if of is None else frozenset(of)
        message = self._take_message(wanted)
        if message is not None:
            return message
        seconds = self._endpoint.limits.silence if seconds is None else seconds
        deadline = self._clock() + seconds
        if wanted is not None:
            for peer in wanted:
                self._routes.to(peer)
        while True:
            if self._endpoint.lost or self._endpoint.left:
                self._check_senders(wanted)
            self._pump(deadline, until_message=wanted is None)
            message = self._take_message(wanted)
            if message is not None:
                return message
            if self._clock() >= deadline:
                names = self._routes.names(self.peers if wanted is None else wanted)
                raise self._error(f"no message from {names} within {seconds:g} s")

    @exclusive
    def next(self, seconds: float, *, keep: bool = False) -> Message | None:
        """Wait for the next event, and return the message if it is one.

        For a thread that only serves the mailbox. Returns None after ``seconds``, an interruption
        or another event. `lost` and `left` list peers that will not respond. ``keep`` is as in
        `poll`.
        """
        message = self._take_message(None, keep)
        if message is None:
            self._pump(self._clock() + seconds, until_message=True)
            message = self._take_message(None, keep)
        return message

    def interrupter(self) -> Callable[[], None]:
        """Return a function for other threads that ends a wait in `next`."""
        return self._carrier.interrupter()

    @property
    def lost(self) -> Mapping[int, str]:
        """The silent peers, by number, each with an explanation."""
        return dict(self._endpoint.lost)  # a copy, as the poller may add peers meanwhile

    @property
    def left(self) -> frozenset[int]:
        """The peers that have closed their mailboxes."""
        return frozenset(self._endpoint.left)

    @exclusive
    def unconnected(self) -> Mapping[int, float]:
        """Return the peers without connections, with the seconds since then.

        All connections of such a peer have ended, over all interfaces: its process has exited, as a
        live process renews them within moments. A slow or stopped process is not listed, because
        the detection does not depend on silence. But a connection also ends if its peer has not
        responded for a minute, or for `Limits.silence` if that is longer, because the process is
        stopped or the network is cut.
        """
        endpoint, ended = self._endpoint, self._carrier.ended
        if ended != self._ended_connections:
            self._ended_connections = ended
            endpoint.probe_connections(self._clock())
            self._run_timers(self._clock())
        now = self._clock()
        if ended:
            endpoint.check_connections(self._carrier.is_disconnected, now)
        return endpoint.unconnected(now)

    @exclusive
    def drop(self, peer: int) -> None:
        """Remove a peer whose process has exited."""
        if self._connector is not None and peer in self.peers:
            self._connector.disconnect(self._endpoint, peer)
            self._routes.renew(self._endpoint.flows)

    @exclusive
    def join(self, peer: int, info: PeerInfo) -> None:
        """Connect to a process that replaces one that was dropped.

        A `UsageError` if its mailbox has different options.
        """
        if self._connector is not None:
            self._connector.connect(self._endpoint, peer, info)
            self._routes.renew(self._endpoint.flows)

    @exclusive
    def poll(self, *, of: Iterable[int] | None = None, keep: bool = False) -> Message | None:
        """Return the next message if there is one. Does not wait.

        With ``keep``, the message counts against the window of its flow until `free`.
        """
        wanted = None if of is None else frozenset(of)
        message = self._take_message(wanted, keep)
        if message is None:
            self._pump(self._clock())
            message = self._take_message(wanted, keep)
        return message

    @exclusive
    def free(self, message: Message) -> None:
        """Return the bytes of a message taken with ``keep`` to the window."""
        self._endpoint.free(message, self._clock())

    @exclusive
    def wait(self, posted: Iterable[Posted], seconds: float | None = None) -> None:
        """Wait until these messages have arrived, so that their payloads may change.

        A `PeerError` if one has not arrived in time; names its receiver.
        """
        waiting = list(posted)
        seconds = self._endpoint.limits.silence if seconds is None else seconds
        deadline = self._clock() + seconds
        while True:
            # Last one first: while it is missing, the others need no check.
            while waiting and waiting[-1].arrived:
                waiting.pop()
            if not waiting:
                return
            if self._endpoint.lost or self._endpoint.left:
                for peer in self._peers_of(waiting):
                    self._check_peer(peer, "wait for it to receive a message")
            if self._clock() >= deadline:
                late = [each for each in waiting if not each.arrived]
                raise self._error(
                    f"{len(late)} messages have not arrived at "
                    f"{self._routes.names(self._peers_of(late))} within {seconds:g} s"
                )
            self._pump(deadline)

    @exclusive
    def wait_connected(self, seconds: float) -> None:
        """Wait until a frame of every peer has arrived on every interface and in every class.

        A `PeerError` if one has not; names the peer and the interface.
        """
        deadline = self._clock() + seconds
        while unheard := self._endpoint.unheard:
            if self._clock() >= deadline:
                route = unheard[0]
                interface = self._endpoint.describe_interface(route.interface)
                raise self._error(
                    f"{self._routes.name(route.peer)} did not answer over {interface} within "
                    f"{seconds:g} s: check that it runs and that no firewall blocks the "
                    "connection, or name the interfaces that connect all hosts: "
                    "init(interfaces=[...])"
                )
            self._pump(deadline)

    def close(self, seconds: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until all messages have arrived, notify the peers, and close the connections.

        A `PeerError` if messages have not arrived within ``seconds``; the connections are closed.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if late := self._leave(seconds):
                    raise self._error(
                        f"not all messages have arrived at {self._routes.names(late)} within "
                        f"{seconds:g} s of close()"
                    )
            finally:
                self._carrier.close(_LINGER_S)
                self._end()
        self._poller.join()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Close the connections at once, without notifying the peers. Idempotent."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        """Stop poller and carrier. The caller holds the lock."""
        self._ended.set()
        self._finalizer()

    def _leave(self, seconds: float) -> set[int]:
        """Notify the peers once all messages have arrived; return peers with missing messages."""
        endpoint, send = self._endpoint, self._carrier.send
        gone = endpoint.left | set(endpoint.lost)
        flows = {r: f for r, f in endpoint.flows.items() if r.peer not in gone}
        now = self._clock()
        for route in flows:
            endpoint.post(route, leave_frame(), send, now)
        deadline = now + seconds
        # The notification need not arrive at a peer that has left.
        while any(
            not flow.empty and not (flow.ended and flow.only_leave)
            for route, flow in flows.items()
            if route.peer not in endpoint.lost
        ):
            if self._clock() >= deadline:
                break
            self._pump(deadline)
        endpoint.acknowledge(self._clock())
        endpoint.flush(send, self._clock())
        return {route.peer for route, flow in flows.items() if not flow.only_leave}

    def _poll_in_background(self) -> float:
        """Process due work; return the seconds until the next turn."""
        self._detect_suspension()
        if not self._lock.acquire(blocking=False):
            return BUSY_POLL_S  # the thread that holds the lock processes it
        try:
            if self._closed:
                return IDLE_POLL_S
            try:
                self._pump(self._clock())
            except Exception as error:  # the next call raises it
                self._broken = error
                self._ended.set()
            awake = self._endpoint.due() < NEVER or self._clock() < self._last_frame + ACTIVE_S
            return BUSY_POLL_S if awake else IDLE_POLL_S
        finally:
            self._lock.release()

    def _pump(self, deadline: float, *, until_message: bool = False) -> None:
        """Send pending frames and receive until ``deadline`` at the latest.

        With ``until_message``, frames after the next message are read later: memory that was just
        written and is used at once is still in the processor's cache.
        """
        endpoint, carrier = self._endpoint, self._carrier
        now = self._clock()
        if endpoint.busy:
            endpoint.flush(carrier.send, now)
        arrival = carrier.receive(min(deadline, endpoint.due()) - now)
        now = self._clock()
        if arrival is not None:
            self._last_frame = now
            for _ in range(_MAX_FRAMES_PER_TURN):
                endpoint.accept(arrival, now)
                if until_message and endpoint.waiting:
                    break
                arrival = carrier.receive(0.0)
                if arrival is None:
                    break
        self._run_timers(now)

    def _detect_suspension(self) -> None:
        """Detect by the system's clock a suspension of this process (SIGSTOP, a paused machine)."""
        before, self._last_turn = self._last_turn, time.monotonic()
        self._was_suspended |= self._last_turn - before > SUSPENDED_S

    def _run_timers(self, now: float) -> None:
        endpoint = self._endpoint
        self._detect_suspension()
        if self._was_suspended:  # it received nothing, so peers were not silent
            self._was_suspended = False
            endpoint.resume(now)
        if now >= endpoint.due():
            endpoint.tick(now)
        if endpoint.busy:
            endpoint.flush(self._carrier.send, now)

    def _take_message(self, of: frozenset[int] | None, keep: bool = False) -> Message | None:
        if not self._endpoint.waiting:
            return None
        now = self._clock()
        message = self._endpoint.take(now, of, keep=keep)
        if message is not None and now >= self._endpoint.due():
            self._run_timers(now)
        return message

    def _wait_for_room(self, route: Route, size: int, seconds: float | None) -> None:
        flow = self._endpoint.flows[route]
        seconds = self._endpoint.limits.silence if seconds is None else seconds
        deadline = self._clock() + seconds
        while flow.room < size:
            self._check_peer(route.peer, "wait for it to take messages")
            if self._clock() >= deadline:
                raise self._error(
                    f"{self._routes.name(route.peer)} consumed nothing for {seconds:g} s: "
                    f"{flow.waiting_bytes} of {flow.window} bytes of its window are in use"
                )
            self._pump(deadline)

    def _error(self, what: str) -> PeerError:
        return PeerError(f"{self._routes.me}: {what}")

    def _check_peer(self, peer: int, what: str) -> None:
        """Raise a `PeerError` if ``peer`` is lost or has left, so that ``what`` is impossible."""
        if peer in self._endpoint.lost:
            raise self._error(f"{self._routes.name(peer)} {self._endpoint.lost[peer]}")
        if peer in self._endpoint.left:
            raise self._error(f"{self._routes.name(peer)} has left, so this process cannot {what}")

    def _check_senders(self, wanted: frozenset[int] | None) -> None:
        """Raise a `PeerError` if no message can arrive, and once for each lost peer."""
        if wanted is not None:
            for peer in wanted:
                self._check_peer(peer, "wait for a message of it")
            return
        lost, peers = self._endpoint.lost, self._routes.peers
        self._reported &= lost.keys()  # the others are reachable again
        for peer in lost.keys() - self._reported:
            self._reported.add(peer)
            self._check_peer(peer, "wait for messages")
        if self._endpoint.left.union(lost).issuperset(peers):
            raise self._error(f"all peers have left: {self._routes.names(peers)}")

    def _peers_of(self, waiting: Sequence[Posted]) -> set[int]:
        return {
            route.peer
            for route, flow in self._endpoint.flows.items()
            if any(map(flow.holds, waiting))
        }
