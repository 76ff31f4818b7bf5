"""A worker's side of the servers: a thread that pushes slices and takes in their sums."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from wingbeat.errors import PeerError
from wingbeat.exchanges.news import printable
from wingbeat.exchanges.part import Part
from wingbeat.exchanges.request import Request
from wingbeat.observe.log import log
from wingbeat.servers.documents import Document
from wingbeat.servers.outbox import Flow, Order, Outbox
from wingbeat.servers.probes import Probes, quiet_of
from wingbeat.servers.protocol import SENT, UPDATES, Ids, Kind, interface_of, urgency_of
from wingbeat.servers.sums import Refused
from wingbeat.transport.failures import LOG_INTERVAL_S, MAX_WAIT_FACTOR
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES
from wingbeat.transport.messages.mailbox import RECONNECT_S, Mailbox

_QUICK_S = 1.0
"""Seconds that the last words may take after a failure."""

_LOOK_S = 0.1
"""Seconds between two looks at whether something is late."""

_ASKED = frozenset({Kind.PULL, Kind.TAKE, Kind.FETCH, Kind.STATE})
"""What is asked for in a message without a payload."""

_ANSWERS = {
    Kind.PUSH: Kind.SUM,
    Kind.PULL: Kind.SUM,
    Kind.TAKE: Kind.REST,
    Kind.FETCH: Kind.PARAMETERS,
    Kind.EXPECT: Kind.PARAMETERS,
    Kind.STATE: Kind.STATE,
}
"""What comes to an end of each kind of request that waits for something."""

_MOST_STATE = 1 << 32
"""Bytes that a server may say of one slice."""

_NOTHING = memoryview(b"")

_Wanted: TypeAlias = "dict[tuple[int, ...], tuple[Request, Part]]"


class Client:
    """Pushes and pulls slices for one worker, in a thread of its own once it may `serve`.

    Args:
        mailbox: joins this worker to the servers; used by that thread alone.
        servers: the numbers of their mailboxes, in the order of their own.
        me: what messages call this worker.
        name: what messages call the process of a number.
        timeout: seconds that a sum may take.
        order: in which order slices are pushed that are ready at the same time.
        watch: says which server's process has ended, and how, if one has.
        tell: has the other workers know why this one has failed.
        hear: says what another worker has told.
        blame: says which worker an exception has ended, and which, if one has said so.
        after: ends what nobody else will end, once a client that was forgotten has left.

    Attributes:
        failed: whether a server or a worker has failed.
        sent: bytes of payloads by mailbox and class; any thread may read a copy.
        received: likewise, by the class that was wished for.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        servers: Sequence[int],
        *,
        me: str,
        name: Callable[[int], str],
        timeout: float,
        order: Order = Order.READY,
        watch: Callable[[], str | None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
        hear: Callable[[], str | None] = lambda: None,
        blame: Callable[[], str | None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox = mailbox
        self._servers = tuple(servers)
        self._me, self._name = me, name
        self._timeout = timeout
        self._watch, self._tell, self._hear, self._after = watch, tell, hear, after
        self._blame = blame
        self._clock = clock
        self._new: deque[Request] = deque()
        self._outbox: Outbox[tuple[Request, Part]] = Outbox(order)
        self._wanted: _Wanted = {}
        self._storing: list[Request] = []
        self._error: PeerError | None = None
        self._probes, self._quiet = Probes(mailbox), quiet_of(timeout)
        self._looked = self._probed = 0.0
        self._heard = self._logged = clock()
        self._ending = self._quick = self._forgotten = self.failed = False
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self._interrupt = mailbox.interrupter()
        self._thread = threading.Thread(target=self._run, name="wingbeat-client", daemon=True)

    def serve(self) -> Client:
        """Start the thread."""
        self._thread.start()
        return self

    def start(
        self,
        kind: Kind,
        dtype: str,
        parts: Iterable[Part],
        what: str,
        finish: Callable[[], None] = lambda: None,
    ) -> Request:
        """Push or pull slices, or take what their sums lack; returns at once.

        Raises:
            PeerError: a server or a worker has failed before.
        """
        before = self._failure()
        if before is not None:
            raise PeerError(str(before))
        request = Request(kind, dtype, tuple(parts), what, finish)
        self._new.append(request)
        self._interrupt()
        error = self._failure()
        if error is not None:  # meanwhile: the thread may not have seen the request
            request.end(error)
        return request

    @property
    def refused(self) -> Counter[str]:
        """How many frames and connections were refused, by the reason; any thread may ask."""
        return self._mailbox.refused + self._mailbox.refused_connections

    def _failure(self) -> PeerError | None:
        return self._error

    def close(self, *, quick: bool = False) -> None:
        """Leave the servers, and end the thread; may be called again.

        What was pushed arrives before, as the others need it, unless it is to be ``quick``. The
        sums are not waited for.
        """
        self._ending, self._quick = True, quick
        self._interrupt()
        if self._thread.ident is None:  # nobody serves: there is no thread to end it
            self._end()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """Have the thread leave by itself, within a second: nobody will call `close`.

        It takes no lock: a garbage collector may call this, in whatever thread and moment.
        """
        self._forgotten = self._ending = True

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._left():
                message = self._mailbox.next(_LOOK_S if self._busy else 1.0)
                self.step(message)
        except PeerError as error:
            self._fail(error)
        except Exception as error:  # nobody hears it here: whoever waits does
            self._fail(PeerError(f"{self._me}: {type(error).__name__}: {error}"))
        finally:
            self._end()
        if self._forgotten:
            self._after()

    def _fail(self, error: PeerError) -> None:
        if (blamed := self._blame()) is not None:
            noticed = str(error).removeprefix(f"{self._me}: ")
            error = PeerError(f"{self._me}: {blamed} (noticed as: {noticed})")
        self.failed, self._error = True, error
        self._tell(str(error).removeprefix(f"{self._me}: "))

    def _left(self) -> bool:
        """Whether there is nothing left to do here: all that is under way is the mailbox's."""
        return self._ending and (self._quick or not (self._outbox.waiting or self._new))

    @property
    def _busy(self) -> bool:
        return bool(self._wanted or self._storing or self._outbox.waiting)

    def step(self, message: Message | None) -> None:
        """Do what is to be done now, with the message that has just come if one has.

        Raises:
            PeerError: a server or a worker has failed; says which.
        """
        while message is not None:
            self._take(message)
            message = self._mailbox.poll()
        while self._new:
            self._begin(self._new.popleft())
        if self._outbox.waiting:
            self._outbox.flush(self._room, self._post)
        if self._storing:
            self._see_stored()
        now = self._clock()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._look_after(now)

    def _begin(self, request: Request) -> None:
        self._heard = self._clock()
        request.missing = len(request.parts)
        if not request.parts:
            request.end()
            return
        empty = request.kind in _ASKED
        answer = _ANSWERS.get(request.kind)
        for part in request.parts:
            if answer is not None:
                key = (answer, *part.ids[:3])
                self._wanted[key] = request, part
            if request.kind is Kind.EXPECT:
                continue
            nbytes = MAX_HEADER_BYTES if empty else MAX_HEADER_BYTES + part.nbytes
            # What servers that update are told has to arrive in its order.
            link = 0 if request.kind in UPDATES else part.link
            flow = Flow(part.server, 0 if empty else part.urgency, link)
            self._outbox.add(flow, part.position, nbytes, (request, part))
        if request.kind in SENT:
            self._storing.append(request)

    def _room(self, flow: Flow) -> int:
        interface = self._interface(flow)
        return self._mailbox.room(flow.peer, interface=interface, urgency=flow.urgency)

    def _interface(self, flow: Flow) -> int:
        return interface_of(self._mailbox.interfaces(flow.peer), flow.link)

    def _post(self, flow: Flow, item: tuple[Request, Part]) -> Callable[[], bool]:
        request, part = item
        payload, dtype = part.memory, request.dtype
        if request.kind in _ASKED:
            payload, dtype = _NOTHING, ""
        elif part.form is not None:
            payload, dtype = part.form.packed(), part.form.dtype
        posted = self._mailbox.post(
            flow.peer,
            request.kind,
            payload,
            ids=part.ids,
            dtype=dtype,
            interface=self._interface(flow),
            urgency=flow.urgency,
        )
        self.sent[flow.peer, flow.urgency] += payload.nbytes
        if request.kind in SENT:
            request.posted.append(posted)
        return posted.done

    def _take(self, message: Message) -> None:
        """Put a sum where it belongs.

        Raises:
            PeerError: it is none that was asked for, or the server says why there will be none.
        """
        server = self._name(message.peer)
        if message.kind == Kind.FAILED:
            raise PeerError(f"{self._me}: {server}: {printable(bytes(message.payload))}")
        if message.kind == Kind.ALIVE:
            return
        ids = Ids(*message.ids)
        # More of the state comes after what it has begun with.
        kind = Kind.STATE if message.kind == Kind.MORE else message.kind
        key = kind, *ids[:3]
        found = self._wanted.get(key)
        if found is None:
            raise PeerError(f"{self._me}: {server} sent what was not asked for: {message!r}")
        request, part = found
        self._heard = self._clock()
        self.received[message.peer, urgency_of(part.ids.wish)] += len(message.payload)
        if kind == Kind.STATE:
            if not self._read(message, request, part):
                return
        elif not part.put(message, request.dtype):
            raise PeerError(
                f"{self._me}: {server} sent a malformed sum of slice {ids.slice}: "
                f"{len(message.payload)} bytes of {message.dtype or 'nothing'}"
            )
        request.missing -= 1
        if not request.missing:
            request.finish()
            request.end()
        del self._wanted[key]  # not before: until then whatever fails here ends the request too

    def _read(self, message: Message, request: Request, part: Part) -> bool:
        """Take a part of what a server says of its state; return whether that was all.

        Raises:
            PeerError: it is malformed.
        """
        key = part.ids[:3]
        try:
            if message.peer != part.server:
                raise Refused("another server has it")
            if message.kind == Kind.STATE:
                request.documents[key] = Document(message.payload, _MOST_STATE)
            else:
                request.documents[key].add(message.payload)
        except (Refused, KeyError) as error:
            server = self._name(message.peer)
            raise PeerError(f"{self._me}: {server} sent a malformed state: {error}") from None
        return request.documents[key].complete

    def _see_stored(self) -> None:
        for request in list(self._storing):
            if len(request.posted) == len(request.parts) and all(p.arrived for p in request.posted):
                self._storing.remove(request)
                request.end()

    def _look_after(self, now: float) -> None:
        """Find out who is gone, or late.

        Raises:
            PeerError: somebody is; names the process.
        """
        ended = self._watch()
        if ended is not None:
            raise PeerError(f"{self._me}: {ended}")
        killed = {
            server: "has ended without a word: its connections are closed"
            for server, seconds in self._mailbox.unconnected().items()
            if seconds > RECONNECT_S
        }
        for server, why in {**killed, **self._mailbox.lost}.items():
            raise PeerError(f"{self._me}: {self._name(server)} {why}")
        if not self._busy:
            return
        if now - max(self._heard, self._probed) > self._quiet:
            self._probe(now)
        left = self._mailbox.left
        while left and (message := self._mailbox.poll()) is not None:
            self._take(message)  # its last words may say why
        for server in left if self._busy else ():
            raise PeerError(
                f"{self._me}: {self._name(server)} has ended; start the job again from a checkpoint"
            )
        if now - max(self._heard, self._logged) >= LOG_INTERVAL_S:
            self._logged = now
            log.warning(
                "%s: has waited for gradients of other workers for %d s; the servers live",
                self._me, now - self._heard,
            )  # fmt: skip
        if now - self._heard > MAX_WAIT_FACTOR * self._timeout:
            late = sorted({part.server for _, part in self._wanted.values()}) or self._servers
            what = next(iter(self._wanted.values()))[0].what if self._wanted else "gradients"
            raise PeerError(
                f"{self._me}: no sum of {what} from {', '.join(map(self._name, late))} within "
                f"{MAX_WAIT_FACTOR * self._timeout:g} s: check that it and all workers run, or "
                "allow more: wingbeat.init(timeout=...)"
            )

    def _probe(self, now: float) -> None:
        """Find out why nothing comes: whether another worker knows, or a card has died.

        Raises:
            PeerError: another worker has told why.
        """
        self._probed = now
        told = self._hear()
        if told is not None:
            raise PeerError(f"{self._me}: {told}")
        for server, link in {(part.server, part.link) for _, part in self._wanted.values()}:
            self._probes.send(server, [link])

    def _end(self) -> None:
        """Let all requests fail, and leave."""
        error = self._error or PeerError(f"{self._me}: the servers were left")
        self._error = error
        pending = {id(r): r for r in self._storing}
        pending.update({id(r): r for r, _ in self._wanted.values()})
        pending.update({id(r): r for r in tuple(self._new)})  # others may still begin one
        for request in pending.values():
            request.end(error)
        with contextlib.suppress(PeerError):  # that is why it leaves
            self._mailbox.close(_QUICK_S if self.failed or self._quick else self._timeout)
