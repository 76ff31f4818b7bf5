"""Where a thread posts messages to other processes and receives theirs."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.messages.carrier import Carrier
from wingbeat.transport.messages.endpoint import Endpoint, Message, Route
from wingbeat.transport.messages.frames import NEVER, NO_IDS, Posted, compose, farewell

if TYPE_CHECKING:
    from wingbeat.transport.messages.connect import Card, Connector


class Routes:
    """The routes of one process.

    Args:
        routes: all that there are.
        own: this process's number.
        name: what messages call a process of that number.

    Attributes:
        me: what messages call this process.
    """

    def __init__(self, routes: Iterable[Route], own: int, name: Callable[[int], str]) -> None:
        self.name = name
        self.me = name(own)
        self.renew(routes)

    def renew(self, routes: Iterable[Route]) -> None:
        """Have these routes from now on."""
        self._by_peer: dict[int, list[Route]] = {}
        for route in routes:
            self._by_peer.setdefault(route.peer, []).append(route)
        self._usual = {peer: _usual(found) for peer, found in self._by_peer.items()}
        self._interfaces = {
            peer: tuple(dict.fromkeys(route.interface for route in found))
            for peer, found in self._by_peer.items()
        }

    @property
    def peers(self) -> tuple[int, ...]:
        """The numbers of those whom routes lead to."""
        return tuple(self._by_peer)

    def interfaces(self, peer: int) -> tuple[int, ...]:
        """The own interfaces that reach ``peer``.

        Raises:
            UsageError: no route leads there.
        """
        self.check([peer])
        return self._interfaces[peer]

    def choose(self, peer: int, interface: int | None, urgency: int | None) -> Route:
        """Return the route that a message takes; the first interface and the last class if None.

        Raises:
            UsageError: there is no such route.
        """
        usual = self._usual.get(peer) or _usual(self._to(peer))
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

    def check(self, peers: Iterable[int]) -> None:
        """Raise a `UsageError` if no route leads to one of them."""
        for peer in peers:
            self._to(peer)

    def names(self, peers: Iterable[int]) -> str:
        """Return what messages call these processes."""
        return ", ".join(self.name(peer) for peer in sorted(peers))

    def _to(self, peer: int) -> list[Route]:
        if peer not in self._by_peer:
            raise UsageError(
                f"{self.me} has no connection to {self.name(peer)}; allowed: "
                f"{self.names(self.peers) or 'none'}"
            )
        return self._by_peer[peer]


def _usual(routes: list[Route]) -> Route:
    first = routes[0].interface
    return max((r for r in routes if r.interface == first), key=lambda r: r.urgency)


class Absent:
    """The peers of one endpoint that will not answer."""

    def __init__(self, endpoint: Endpoint, routes: Routes) -> None:
        self._endpoint, self._routes = endpoint, routes
        self._reported: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._endpoint.lost or self._endpoint.left)

    def error(self, what: str) -> PeerError:
        """Return what to raise: this process's name, and ``what``."""
        return PeerError(f"{self._routes.me}: {what}")

    def check(self, peer: int, what: str) -> None:
        """Raise a `PeerError` if ``peer`` is gone, so that this process cannot do ``what``."""
        if peer in self._endpoint.lost:
            raise self.error(f"{self._routes.name(peer)} {self._endpoint.lost[peer]}")
        if peer in self._endpoint.left:
            raise self.error(f"{self._routes.name(peer)} has left, so this process cannot {what}")

    def check_waiting(self, wanted: frozenset[int] | None) -> None:
        """Raise a `PeerError` if no message can come, or once for each peer that was lost."""
        if wanted is not None:
            for peer in wanted:
                self.check(peer, "wait for a message of it")
            return
        self._reported &= self._endpoint.lost.keys()  # others were heard again
        for peer in self._endpoint.lost.keys() - self._reported:
            self._reported.add(peer)
            self.check(peer, "wait for messages")
        peers = self._routes.peers
        if self._endpoint.left.union(self._endpoint.lost).issuperset(peers):
            raise self.error(f"everyone has left: {self._routes.names(peers)}")


Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Let one thread at a time into a mailbox, and nobody once it is closed or broken.

    What is returned raises a `UsageError` then, or says again why it broke.
    """

    @functools.wraps(method)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._closed:
                raise UsageError(
                    f"{self._routes.me}: this mailbox is closed; open another to {method.__name__}"
                )
            if self._broken is not None:
                raise self._broken
            return method(self, *args, **kwargs)

    return cast("Method", inner)


BUSY_S, IDLE_S = 0.005, 0.02
"""Seconds after which the keeper looks again: while something goes on, and otherwise."""

AWAKE_S = 1.0
"""Seconds after a frame for which more are expected."""


class Kept(Protocol):
    """What a keeper looks after."""

    def go_on(self) -> float:
        """Do what is to be done now; return after how many seconds to come again."""


def start(kept: weakref.ref[Kept], ended: threading.Event) -> threading.Thread:
    """Start the thread; it ends when ``ended`` is set, or nobody else uses what it keeps."""
    thread = threading.Thread(target=_keep, args=(kept, ended), name="wingbeat-mail", daemon=True)
    thread.start()
    return thread


def forget(ended: threading.Event, carrier: Carrier) -> None:
    """End what a mailbox has started, when it is closed or collected."""
    ended.set()
    carrier.close()


def _keep(kept: weakref.ref[Kept], ended: threading.Event) -> None:
    period = BUSY_S
    while not ended.wait(period):
        own = kept()
        if own is None:
            return
        period = own.go_on()
        del own


def part(
    endpoint: Endpoint,
    carrier: Carrier,
    pump: Callable[[float], None],
    clock: Callable[[], float],
    seconds: float,
) -> set[int]:
    """Leave, within ``seconds``.

    Args:
        endpoint: the flows.
        carrier: what carries their frames.
        pump: sends and takes in what comes, until the time that it is given at the latest.
        clock: seconds.
        seconds: how long it may take.

    Returns:
        The peers at which not all has arrived.
    """
    gone = endpoint.left | set(endpoint.lost)
    flows = {r: f for r, f in endpoint.flows.items() if r.peer not in gone}
    now = clock()
    for route in flows:
        endpoint.post(route, farewell(), carrier.send, now)
    deadline = now + seconds
    # A peer that has left hears no more: that this end leaves need not arrive there.
    while any(
        not flow.empty and not (flow.ended and flow.only_leave)
        for route, flow in flows.items()
        if route.peer not in endpoint.lost
    ):
        if clock() >= deadline:
            break
        pump(deadline)
    endpoint.tell(clock())
    endpoint.flush(carrier.send, clock())
    return {route.peer for route, flow in flows.items() if not flow.only_leave}


CLOSING = 5.0
"""Seconds that a peer may take to hear that this end leaves."""

UNCONNECTED_S = 1.0
"""Seconds in which a process whose connection has ended may make it anew: a living one does."""

_LINGER_S = 1.0
"""Seconds that the last words may take to leave, after everything else has arrived."""

STOPPED_S = 1.0
"""Seconds without a turn of the keeper after which this process counts as having been stopped."""

_AT_ONCE = 64
"""Frames that are taken in before anything else is looked at: more may come without end."""


class Mailbox:
    """One process's end of the message layer. `open_mailbox` makes one.

    For one thread at a time: one that waits keeps the others out. While no method of it runs, a
    thread of its own, the keeper, tells the peers what has arrived, and sends again what was lost;
    so nobody waits for a process that computes.

    Args:
        endpoint: the flows, which this mailbox drives.
        carrier: what carries their frames.
        name: what messages call a process of that number.
        clock: seconds, for all deadlines.
        joints: makes and ends connections later on; None where all peers stay the same.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        carrier: Carrier,
        *,
        name: Callable[[int], str] = "rank {}".format,
        clock: Callable[[], float] = time.monotonic,
        joints: Connector | None = None,
    ) -> None:
        self._endpoint, self._joints = endpoint, joints
        self._carrier = carrier
        self._clock = clock
        self._closed = False
        self._broken: Exception | None = None
        self._heard = 0.0
        self._ran, self._stopped = time.monotonic(), False
        self._ended_before = 0
        self._routes = Routes(endpoint.flows, endpoint.membership.number, name)
        self._absent = Absent(endpoint, self._routes)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # The keeper must not keep alive what nobody else uses.
        self._forgotten = weakref.finalize(self, forget, self._ended, carrier)
        # Not as the interpreter ends: another thread may be using the sockets, and libzmq ends a
        # process in which that happens. The system closes them.
        self._forgotten.atexit = False
        self._keeper = start(weakref.ref(self), self._ended)

    @property
    def peers(self) -> tuple[int, ...]:
        """The numbers of those whom messages can be posted to."""
        return self._routes.peers

    @property
    def largest(self) -> int:
        """Bytes of the largest payload that can be posted."""
        return self._endpoint.limits.message

    @property
    def refused(self) -> Counter[str]:
        """How many frames were dropped, by the reason; see docs/how-to/messages.md."""
        return self._endpoint.refused

    @property
    def turned_away(self) -> Counter[str]:
        """How many connections were refused before a frame was read, by the reason."""
        return self._carrier.turned_away

    def interfaces(self, peer: int) -> tuple[int, ...]:
        """The numbers of the own interfaces that reach ``peer``."""
        return self._routes.interfaces(peer)

    @alone
    def room(self, peer: int, *, interface: int | None = None, urgency: int | None = None) -> int:
        """Bytes that can be posted without a wait."""
        return self._endpoint.flows[self._routes.choose(peer, interface, urgency)].room

    @alone
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
        """Send a message; waits only while the flow's window is full.

        Args:
            peer: whose number.
            kind: what it is, 0 to 2**32 - 1, as the users number it.
            payload: anything with a contiguous buffer. It is not copied if it is large, and must
                not change until the returned `Posted` is `done`.
            ids: four numbers from 0 to 2**32 - 1, for the users.
            dtype: what the payload consists of, of `DTYPES`.
            spans: (start, length) pairs, in elements, up to 255.
            interface: own interface to send over; the first that reaches the peer if None.
            urgency: the class, 0 the most urgent; the least urgent if None.
            seconds: how long to wait for room; as long as a peer may be silent if None.

        Raises:
            UsageError: a value that cannot be sent.
            PeerError: the peer is lost, has left, or took nothing meanwhile.
        """
        route = self._routes.choose(peer, interface, urgency)
        endpoint = self._endpoint
        if self._absent:
            self._absent.check(peer, "post to it")
        message = compose(kind, payload, ids, dtype, spans, most=endpoint.limits.message)
        if endpoint.flows[route].room < message.size:
            self._wait_for_room(route, message.size, seconds)
        endpoint.post(route, message, self._carrier.send, self._clock())
        return message

    @alone
    def receive(self, seconds: float | None = None, *, of: Iterable[int] | None = None) -> Message:
        """Wait for the next message, the most urgent first, and take it.

        Args:
            seconds: the longest wait; as long as a peer may be silent if None.
            of: whose messages count; everyone's if None.

        Raises:
            PeerError: none came in time, or who should send one is lost or has left.
        """
        wanted = None if of is None else frozenset(of)
        message = self._take(wanted)
        if message is not None:
            return message
        seconds = self._endpoint.limits.silence if seconds is None else seconds
        deadline = self._clock() + seconds
        if wanted is not None:
            self._routes.check(wanted)
        while True:
            if self._absent:
                self._absent.check_waiting(wanted)
            self._pump(deadline, until_message=wanted is None)
            message = self._take(wanted)
            if message is not None:
                return message
            if self._clock() >= deadline:
                names = self._routes.names(self.peers if wanted is None else wanted)
                raise self._absent.error(f"no message from {names} within {seconds:g} s")

    @alone
    def next(self, seconds: float, *, keep: bool = False) -> Message | None:
        """Wait for what comes next, and return a message if that is one.

        For a thread that only serves the mailbox: None after ``seconds``, after an interruption,
        or when something else has come, so that it can look what else there is to do. Of peers
        that are gone `lost` and `left` tell. With ``keep`` see `poll`.
        """
        message = self._take(None, keep)
        if message is None:
            self._pump(self._clock() + seconds, until_message=True)
            message = self._take(None, keep)
        return message

    def interrupter(self) -> Callable[[], None]:
        """Return a function that ends a wait in `next`, for other threads."""
        return self._carrier.interrupter()

    @property
    def lost(self) -> Mapping[int, str]:
        """What to say of peers that have fallen silent, by their numbers."""
        return dict(self._endpoint.lost)  # the keeper may find out about more meanwhile

    @property
    def left(self) -> frozenset[int]:
        """The peers that have closed their mailboxes."""
        return frozenset(self._endpoint.left)

    @alone
    def unconnected(self) -> Mapping[int, float]:
        """Return who is not connected any more, and for how many seconds: a process that has died.

        Or one whose connections have broken, over all interfaces, which it makes anew within
        moments. Nobody has to fall silent for that, so a process that is slow, or stopped, is not
        among them. But connections end as well of a peer that has not answered for a minute, or
        for as long as a peer may be silent if that is longer: its process is stopped, or the
        network is cut.
        """
        endpoint, ended = self._endpoint, self._carrier.ended
        if ended != self._ended_before:
            self._ended_before = ended
            endpoint.greet(self._clock())
            self._go_over(self._clock())
        now = self._clock()
        if ended:
            endpoint.look(self._carrier.cut, now)
        return endpoint.unconnected(now)

    @alone
    def drop(self, peer: int) -> None:
        """Have nothing more to do with a peer whose process has ended."""
        if self._joints is not None and peer in self.peers:
            self._joints.part(self._endpoint, peer)
            self._routes.renew(self._endpoint.flows)

    @alone
    def join(self, peer: int, card: Card) -> None:
        """Connect to a process that has come in the place of one that was dropped.

        Raises:
            UsageError: it was opened differently.
        """
        if self._joints is not None:
            self._joints.join(self._endpoint, peer, card)
            self._routes.renew(self._endpoint.flows)

    @alone
    def poll(self, *, of: Iterable[int] | None = None, keep: bool = False) -> Message | None:
        """Take the next message if one is there; does not wait.

        With ``keep`` it counts against the window of its flow until it is let `free`.
        """
        wanted = None if of is None else frozenset(of)
        message = self._take(wanted, keep)
        if message is None:
            self._pump(self._clock())
            message = self._take(wanted, keep)
        return message

    @alone
    def free(self, message: Message) -> None:
        """Let a message that was kept count no longer, as its memory is not needed any more."""
        self._endpoint.free(message, self._clock())

    @alone
    def wait(self, posted: Iterable[Posted], seconds: float | None = None) -> None:
        """Wait until these messages have arrived, so that their payloads may change.

        Raises:
            PeerError: one has not arrived in time; names whom it was for.
        """
        waiting = list(posted)
        seconds = self._endpoint.limits.silence if seconds is None else seconds
        deadline = self._clock() + seconds
        while True:
            # The last is looked at first: as long as it waits, the others need not be gone through.
            while waiting and waiting[-1].arrived:
                waiting.pop()
            if not waiting:
                return
            if self._endpoint.lost or self._endpoint.left:
                for peer in self._peers_of(waiting):
                    self._absent.check(peer, "wait for it to receive a message")
            if self._clock() >= deadline:
                late = [each for each in waiting if not each.arrived]
                raise self._absent.error(
                    f"{len(late)} messages have not arrived at "
                    f"{self._routes.names(self._peers_of(late))} within {seconds:g} s"
                )
            self._pump(deadline)

    @alone
    def meet(self, seconds: float) -> None:
        """Wait until every peer has been heard on every interface and in every class.

        Raises:
            PeerError: one was not; names it and the interface.
        """
        deadline = self._clock() + seconds
        while unmet := self._endpoint.unmet:
            if self._clock() >= deadline:
                route = unmet[0]
                raise self._absent.error(
                    f"{self._routes.name(route.peer)} did not answer over "
                    f"{self._endpoint.card(route.interface)} within {seconds:g} s: check that it "
                    "runs and that a firewall lets the two speak, or name the interfaces that join "
                    "all hosts: init(interfaces=[...])"
                )
            self._pump(deadline)

    def close(self, seconds: float = CLOSING) -> None:
        """Leave: see that all has arrived, tell the peers, and close the connections.

        Raises:
            PeerError: messages have not arrived within ``seconds``; the connections are closed.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                late = part(self._endpoint, self._carrier, self._pump, self._clock, seconds)
                if late:
                    raise self._absent.error(
                        f"not all messages have arrived at {self._routes.names(late)} within "
                        f"{seconds:g} s of close()"
                    )
            finally:
                self._carrier.close(_LINGER_S)
                self._end()
        self._keeper.join()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Close the connections as they are. The peers are not told; may be called again."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        """End keeper and connections; called with the lock."""
        self._ended.set()
        self._forgotten()

    def go_on(self) -> float:
        """Do what is to be done while the user does something else; when to look again."""
        self._note_stop()
        if not self._lock.acquire(blocking=False):
            return BUSY_S  # whoever is in here does it
        try:
            if self._closed:
                return IDLE_S
            try:
                self._pump(self._clock())
            except Exception as error:  # nobody hears it here; the user does with the next call
                self._broken = error
                self._ended.set()
            awake = self._endpoint.due() < NEVER or self._clock() < self._heard + AWAKE_S
            return BUSY_S if awake else IDLE_S
        finally:
            self._lock.release()

    def _pump(self, deadline: float, *, until_message: bool = False) -> None:
        """Send what is to be sent and take in what comes, until ``deadline`` at the latest.

        With ``until_message`` what comes after the next message is left where it is: memory that
        was just written to and is used at once is still in the processor's cache.
        """
        endpoint, carrier = self._endpoint, self._carrier
        now = self._clock()
        if endpoint.busy:
            endpoint.flush(carrier.send, now)
        arrival = carrier.receive(min(deadline, endpoint.due()) - now)
        now = self._clock()
        if arrival is not None:
            self._heard = now
            for _ in range(_AT_ONCE):
                endpoint.accept(arrival, now)
                if until_message and endpoint.waiting:
                    break
                arrival = carrier.receive(0.0)
                if arrival is None:
                    break
        self._go_over(now)

    def _note_stop(self) -> None:
        """Note whether this process was stopped (SIGSTOP, a paused machine) until just now.

        By the system's own clock, whatever the deadlines go by.
        """
        before, self._ran = self._ran, time.monotonic()
        self._stopped |= self._ran - before > STOPPED_S

    def _go_over(self, now: float) -> None:
        """Do what is due, and send what that has led to."""
        endpoint = self._endpoint
        self._note_stop()
        if self._stopped:  # peers were not silent: nobody listened
            self._stopped = False
            endpoint.resume(now)
        if now >= endpoint.due():
            endpoint.tick(now)
        if endpoint.busy:
            endpoint.flush(self._carrier.send, now)

    def _take(self, of: frozenset[int] | None, keep: bool = False) -> Message | None:
        if not self._endpoint.waiting:
            return None
        now = self._clock()
        message = self._endpoint.take(now, of, keep=keep)
        if message is not None and now >= self._endpoint.due():
            self._go_over(now)
        return message

    def _wait_for_room(self, route: Route, size: int, seconds: float | None) -> None:
        flow = self._endpoint.flows[route]
        seconds = self._endpoint.limits.silence if seconds is None else seconds
        deadline = self._clock() + seconds
        while flow.room < size:
            self._absent.check(route.peer, "wait for it to take messages")
            if self._clock() >= deadline:
                raise self._absent.error(
                    f"{self._routes.name(route.peer)} took nothing for {seconds:g} s: "
                    f"{flow.waiting_bytes} bytes wait for it; allowed are {flow.window}"
                )
            self._pump(deadline)

    def _peers_of(self, waiting: Sequence[Posted]) -> set[int]:
        return {
            route.peer
            for route, flow in self._endpoint.flows.items()
            if any(map(flow.holds, waiting))
        }
