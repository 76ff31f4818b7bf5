"""Where a thread posts messages to other processes and takes theirs."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wingbeat.transport.messages.absent import Absent
from wingbeat.transport.messages.alone import alone
from wingbeat.transport.messages.card import Card
from wingbeat.transport.messages.carrier import Carrier
from wingbeat.transport.messages.compose import NO_IDS, compose
from wingbeat.transport.messages.endpoint import Endpoint, Message, Route
from wingbeat.transport.messages.flow import NEVER, Posted
from wingbeat.transport.messages.joints import Joints
from wingbeat.transport.messages.keeper import AWAKE_S, BUSY_S, IDLE_S, forget, start
from wingbeat.transport.messages.parting import part
from wingbeat.transport.messages.routes import Routes

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
        joints: Joints | None = None,
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
        """How many frames were dropped, by the reason; see docs/developers/messages.md."""
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
