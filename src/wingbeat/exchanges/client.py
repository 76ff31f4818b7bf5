"""A worker's side of the servers: a thread that pushes slices and takes in their sums."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from wingbeat.collectives.callbacks import run_callback
from wingbeat.errors import PeerError
from wingbeat.servers.documents import Document
from wingbeat.servers.outbox import Flow, Order, Outbox
from wingbeat.servers.protocol import SENT, TEXT, Ids, Kind
from wingbeat.servers.sums import Refused
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.flow import Posted
from wingbeat.transport.messages.header import LARGEST
from wingbeat.transport.messages.mailbox import Mailbox

_QUICK_S = 1.0
"""Seconds that the last words may take after a failure."""

_LOOK_S = 0.1
"""Seconds between two looks at whether something is late."""

_ASKED = frozenset({Kind.PULL, Kind.FETCH, Kind.STATE})
"""What is asked for in a message without a payload."""

_ANSWERS = {
    Kind.PUSH: frozenset({Kind.SUM}),
    Kind.PULL: frozenset({Kind.SUM}),
    Kind.FETCH: frozenset({Kind.PARAMETERS}),
    Kind.EXPECT: frozenset({Kind.PARAMETERS}),
    Kind.STATE: frozenset({Kind.STATE, Kind.MORE}),
}
"""What may come to an end of each kind of request that waits for something."""

_MOST_STATE = 1 << 32
"""Bytes that a server may say of one slice."""


@dataclass(frozen=True, slots=True)
class Part:
    """A slice as one request has it.

    Attributes:
        server: the number of its mailbox.
        ids: which slice of which plan and round, and how its sum is to come.
        memory: its gradients, where the sum is put.
        urgency: the class in which the gradients are pushed, 0 the most urgent.
        position: its place in the order of forward.
    """

    server: int
    ids: Ids
    memory: memoryview
    urgency: int
    position: int


@dataclass(eq=False, slots=True)
class Request:
    """Slices that were pushed, or pulled, together: what a `Handle` is to whoever waits.

    Attributes:
        kind: push, store, pull and so on.
        dtype: of the elements.
        parts: the slices.
        documents: what servers have said of their state, by the ids of what was asked.
    """

    kind: Kind
    dtype: str
    parts: Sequence[Part]
    what: str
    missing: int = 0
    error: PeerError | None = None
    posted: list[Posted] = field(default_factory=list)
    documents: dict[tuple[int, ...], Document] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _callbacks: list[Callable[[Request], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting."""
        return self._over.is_set()

    def add_done_callback(self, callback: Callable[[Request], None]) -> None:
        """Have ``callback(request)`` called once, when it is done or has failed."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        run_callback(lambda: callback(self))

    def wait(self) -> None:
        """Block until all sums are in the buffer, or all that was stored has arrived.

        Raises:
            PeerError: a server or a worker failed; names it.
        """
        # The thread that serves has the deadlines, and ends every request.
        self._over.wait()
        if self.error is not None:
            raise PeerError(str(self.error))

    wait_received = wait

    def end(self, error: PeerError | None = None) -> None:
        """Let whoever waits go on; for the thread that serves."""
        with self._lock:
            self.error = error
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(functools.partial(callback, self))


_Wanted: TypeAlias = "dict[tuple[int, int, int], tuple[Request, Part]]"


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

    Attributes:
        failed: whether a server or a worker has failed.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox = mailbox
        self._servers = tuple(servers)
        self._me, self._name = me, name
        self._timeout = timeout
        self._watch = watch
        self._clock = clock
        self._new: deque[Request] = deque()
        self._outbox: Outbox[tuple[Request, Part]] = Outbox(order)
        self._wanted: _Wanted = {}
        self._storing: list[Request] = []
        self._error: PeerError | None = None
        self._looked = 0.0
        self._heard = clock()
        self._ending = self._quick = self.failed = False
        self._interrupt = mailbox.interrupter()
        self._thread = threading.Thread(target=self._run, name="wingbeat-client", daemon=True)

    def serve(self) -> Client:
        """Start the thread."""
        self._thread.start()
        return self

    def start(self, kind: Kind, dtype: str, parts: Iterable[Part], what: str) -> Request:
        """Push or pull slices; returns at once.

        Raises:
            PeerError: a server or a worker has failed before.
        """
        before = self._failure()
        if before is not None:
            raise PeerError(str(before))
        request = Request(kind, dtype, tuple(parts), what)
        self._new.append(request)
        self._interrupt()
        error = self._failure()
        if error is not None:  # meanwhile: the thread may not have seen the request
            request.end(error)
        return request

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
        self._end()

    def _fail(self, error: PeerError) -> None:
        self.failed, self._error = True, error

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
        pull = request.kind in _ASKED
        for part in request.parts:
            if request.kind not in SENT:
                self._wanted[part.ids[:3]] = request, part
            if request.kind is Kind.EXPECT:
                continue
            nbytes = LARGEST if pull else LARGEST + len(part.memory)
            urgency = 0 if pull else part.urgency
            self._outbox.add(Flow(part.server, urgency), part.position, nbytes, (request, part))
        if request.kind in SENT:
            self._storing.append(request)

    def _room(self, flow: Flow) -> int:
        return self._mailbox.room(flow.peer, urgency=flow.urgency)

    def _post(self, flow: Flow, item: tuple[Request, Part]) -> Callable[[], bool]:
        request, part = item
        pull = request.kind in _ASKED
        posted = self._mailbox.post(
            flow.peer,
            request.kind,
            b"" if pull else part.memory,
            ids=part.ids,
            dtype="" if pull else request.dtype,
            urgency=flow.urgency,
        )
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
            text = bytes(message.payload[:TEXT]).decode(errors="replace")
            text = "".join(c if c.isprintable() else "?" for c in text)
            raise PeerError(f"{self._me}: {server}: {text}")
        ids = Ids(*message.ids)
        found = self._wanted.get(ids[:3])
        if found is None or message.kind not in _ANSWERS[found[0].kind]:
            raise PeerError(f"{self._me}: {server} sent what was not asked for: {message!r}")
        request, part = found
        self._heard = self._clock()
        if request.kind is not Kind.STATE:
            self._put(message, request, part)
        elif not self._read(message, request, part):
            return
        del self._wanted[ids[:3]]
        request.missing -= 1
        if not request.missing:
            request.end()

    def _put(self, message: Message, request: Request, part: Part) -> None:
        """Copy a sum, or parameters, to where they belong."""
        server, ids = self._name(message.peer), Ids(*message.ids)
        if (
            part.server != message.peer
            or message.dtype != request.dtype
            or len(message.payload) != len(part.memory)
        ):
            raise PeerError(
                f"{self._me}: {server} sent a malformed sum of slice {ids.slice}: "
                f"{len(message.payload)} bytes of {message.dtype or 'nothing'}"
            )
        part.memory[:] = message.payload

    def _read(self, message: Message, request: Request, part: Part) -> bool:
        """Take a part of what a server says of its state; return whether that was all."""
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
        for server, why in self._mailbox.lost.items():
            raise PeerError(f"{self._me}: {self._name(server)} {why}")
        if not self._busy:
            return
        for server in self._mailbox.left:
            raise PeerError(f"{self._me}: {self._name(server)} has ended")
        if now - self._heard > self._timeout:
            late = sorted({part.server for _, part in self._wanted.values()}) or self._servers
            what = next(iter(self._wanted.values()))[0].what if self._wanted else "gradients"
            raise PeerError(
                f"{self._me}: no sum of {what} from {', '.join(map(self._name, late))} within "
                f"{self._timeout:g} s"
            )

    def _end(self) -> None:
        """Let all requests fail, and leave."""
        error = self._error or PeerError(f"{self._me}: the servers were left")
        self._error = error
        pending = {id(r): r for r in self._storing}
        pending.update({id(r): r for r, _ in self._wanted.values()})
        pending.update({id(r): r for r in self._new})
        for request in pending.values():
            request.end(error)
        with contextlib.suppress(PeerError):  # that is why it leaves
            self._mailbox.close(_QUICK_S if self.failed or self._quick else self._timeout)
