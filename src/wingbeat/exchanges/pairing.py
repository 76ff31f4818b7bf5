"""Carries the averages of two workers each, in a thread beside training (AD-PSGD).

The machine (`wingbeat.pairs.worker`) and the buffer are used under one lock by two threads: this
one, and training between two steps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.departures import Departures
from wingbeat.exchanges.halves import Halves
from wingbeat.groups.follower import CALL
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.pairs.protocol import Kind, Unexpected
from wingbeat.pairs.worker import Adopt, Drop, Say, Worker
from wingbeat.transport.failures import MAX_WAIT_FACTOR, WaitLog, stuck_peer_text
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S, RECONNECT_S, Mailbox
from wingbeat.transport.text import first_line

_LOOK_S = 0.5
"""Seconds between two looks at whether those that are waited for live."""

_PROGRESS = frozenset({Kind.GRANT, Kind.PIECE, Kind.MEAN, Kind.DONE, Kind.LEVEL})
"""What shows that it is worth while to wait on."""

_QUICK_S = 1.0
"""Seconds that the last words may take after a failure."""


class Pairing:
    """Joins a worker's machine to the others'.

    Args:
        machine: this worker's.
        mailbox: joins it to its partners, whose numbers are their ranks; used by the thread alone.
        halves: the model.
        me: what messages call this worker.
        timeout: seconds; a partner that lives is waited for `MAX_WAIT_FACTOR` times as many.
        gone: called with each worker that is lost, in this thread.
        departures: logs who is lost.
        name: what messages call the worker of a rank.
        clock: seconds.

    Attributes:
        waits: how often training had to wait for an average.
        members: this worker, and whom it has averaged with last.
        watching: whether all partners are looked after, and not only who is waited for.
    """

    def __init__(
        self,
        machine: Worker,
        mailbox: Mailbox,
        halves: Halves,
        *,
        me: str,
        timeout: float,
        gone: Callable[[int], None] = lambda _: None,
        departures: Departures | None = None,
        name: Callable[[int], str] = "rank {}".format,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine, self._mailbox, self._halves = machine, mailbox, halves
        self._me, self._name, self._timeout, self._clock = me, name, timeout, clock
        self._gone, self._missed = gone, set[int]()
        self._departures = departures or Departures(None, me, name=name)
        self.waits = 0
        self.watching = False
        self.members: tuple[int, ...] = ()
        self._asked_ns = self._begun_ns = 0
        self._changed = threading.Condition()
        self._interrupt = mailbox.interrupter()
        self._error: PeerError | None = None
        self._ending = self._quick = False
        self._heard = self._looked = 0.0
        self._over: dict[int, int] = {}  # of each part that is under way, the interface
        self._load: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, name="wingbeat-pairs", daemon=True)

    # -- what training calls --------------------------------------------------------------

    def serve(self) -> None:
        """Start the thread."""
        self._thread.start()

    def begin(self) -> None:
        """Let the model be averaged; see `Worker.begin`.

        Raises:
            PeerError: nothing can be averaged any more; says why.
        """
        with self._changed:
            self._check()
            self.machine.begin()
        self._interrupt()

    def end(self) -> None:
        """Wait until the model may change; see `Worker.shut`.

        Raises:
            PeerError: nobody is left to average with, or who is waited for says nothing.
        """
        with self._changed:
            self._check()
            self.machine.shut()
            self.waits += self.machine.pending
            self._until(lambda: not self.machine.pending, "an average")

    def level(self) -> None:
        """Wait until no two models are averaged any more; see `Worker.level`.

        Raises:
            PeerError: a worker did not call it; names it. It may be called again, or `begin`; `end`
                waits for what is in the midst then.
        """
        with self._changed:
            self._check()
            self.machine.level()
        self._interrupt()
        with self._changed:
            try:
                self._until(lambda: self.machine.levelled, CALL)
            except BaseException:  # Ctrl-C, too
                self.machine.unlevel()
                raise
            self.machine.shut()

    def close(self, *, quick: bool = False) -> None:
        """Leave, when what is under way has ended; may be called again.

        Args:
            quick: whether the others have to do without that, as after a failure.
        """
        self._quick = self._quick or quick
        self._ending = True
        self._interrupt()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """Have the thread leave by itself, soon: nobody will call `close`.

        It takes no lock: a garbage collector may call this, in whatever thread and moment.
        """
        self._ending = True

    def _check(self) -> None:
        if self._ending:
            raise UsageError(f"{self._me}: close() was called; nothing is averaged after that")
        if self._error is not None:
            raise PeerError(str(self._error))
        lost = self.machine.lost
        if lost and not self.machine.there:
            how = ", ".join(f"{self._name(p)} {self._departures.how(p)}" for p in sorted(lost))
            raise PeerError(
                f"{self._me}: nobody is left to average parameters with: {how}; "
                "start all workers again"
            )

    def _until(self, over: Callable[[], bool], what: str) -> None:
        """Wait; called with the lock."""
        wait = WaitLog(self._me, what, self._clock)
        while True:
            self._check()
            if over():
                return
            # Whoever is gone, or cannot be reached, is lost before this: see `_look`.
            names = ", ".join(map(self._name, self.machine.behind()))
            if self._clock() - max(wait.begun, self._heard) > MAX_WAIT_FACTOR * self._timeout:
                raise PeerError(stuck_peer_text(self._me, names, what, self._timeout))
            wait.log_if_due(names)
            self._changed.wait(min(_LOOK_S, MAX_WAIT_FACTOR * self._timeout))

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                self.step(self._mailbox.next(_LOOK_S))
            with self._changed:
                self.machine.leave()
            until = self._clock() + CLOSE_TIMEOUT_S
            while self.machine.amid and not self._quick and self._clock() < until:
                self.step(self._mailbox.next(_LOOK_S))
        except PeerError as error:
            self._fail(error)
        except Exception as error:  # nobody hears it here: training does
            self._fail(PeerError(f"{self._me}: {type(error).__name__}: {first_line(error)}"))
        with contextlib.suppress(WingbeatError):
            self._part()

    def _fail(self, error: PeerError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _part(self) -> None:
        """Tell the others that this worker leaves, or has failed."""
        failed = self._quick or self._error is not None
        for peer in self.machine.there if failed else ():
            with contextlib.suppress(PeerError):
                self._mailbox.post(peer, Kind.FAILED, seconds=0.0)
        self._mailbox.close(_QUICK_S if failed else CLOSE_TIMEOUT_S)

    def step(self, message: Message | None) -> None:
        """Do what is to be done now, with the message that has just come if one has.

        Raises:
            PeerError: a worker has sent what none of this job does; names it.
        """
        # What they have said before they were gone counts: it is taken after this is read.
        left, lost = self._mailbox.left, self._mailbox.lost
        while message is not None or (message := self._mailbox.poll()) is not None:
            with self._changed:
                self._take(message)
                self._carry()
                self._changed.notify_all()
            message = None
        with self._changed:
            for peer in self.machine.there:
                if peer in lost:
                    self._lose(peer, lost[peer])
                elif peer in left:
                    stream.happened("left", (peer,))
                    self.machine.gone(peer, lost=False)
            self._look()
            self._carry()
            self._changed.notify_all()
            missed = self.machine.lost - self._missed
        self._missed |= missed
        for peer in missed:
            self._gone(peer)

    def _take(self, message: Message) -> None:
        peer, kind, payload = message.peer, message.kind, message.payload
        number, piece = message.ids[:2]
        carries = kind in (Kind.PIECE, Kind.MEAN)
        try:
            if not (self._halves.fits(piece, len(payload)) if carries else not payload):
                raise Unexpected(f"{len(payload)} bytes in part {piece}, of kind {kind}")
            counts = self.machine.heard(peer, kind, number, piece)
        except Unexpected as error:
            raise PeerError(
                f"{self._me}: {self._name(peer)} sent what it never sends: {error}"
            ) from None
        # A worker that serves others says so to those in its queue.
        if kind in _PROGRESS or (kind == Kind.ALIVE and self.machine.asks):
            self._heard = self._clock()
        if counts and kind == Kind.GRANT:
            self._begun_ns = now = time.monotonic_ns()
            group = (self.machine.rank, peer)
            stream.record("group_wait", self._asked_ns, now, lane=AVERAGES, group=group)
        if not counts or not carries:
            if kind == Kind.FAILED:
                self._departures.lost(peer, "has failed")
        elif kind == Kind.PIECE:
            self._over[piece] = message.route.interface
            self._halves.meet(piece, payload)
        else:
            self._load[self._over.pop(piece)] -= 1
            self._halves.take(piece, payload)

    def _lose(self, peer: int, how: str) -> None:
        self._departures.lost(peer, how)
        self._mailbox.drop(peer)
        stream.happened("left", (peer,))
        self.machine.gone(peer, lost=True)

    def _carry(self) -> None:
        """Do what the machine says."""
        orders = self.machine.orders
        while orders:
            order = orders.popleft()
            if isinstance(order, Say):
                self._record_begin(order.kind, order.peer)
                self._say(order)
            elif isinstance(order, Adopt):
                self._halves.adopt(asked=order.asked)
                self._record_end(order.peer)
            else:
                assert isinstance(order, Drop)
                self._halves.drop()
                self._over.clear()
                self._load.clear()

    def _record_begin(self, kind: Kind, peer: int) -> None:
        """Note that an average is asked for, or begins; for the event stream."""
        now = time.monotonic_ns()
        if kind == Kind.ASK:
            self._asked_ns = now
            stream.happened("request", (peer,))
        elif kind == Kind.GRANT:
            self._begun_ns = now

    def _record_end(self, peer: int) -> None:
        self.members = (self.machine.rank, peer)
        stream.record(
            "average", self._begun_ns, time.monotonic_ns(), nbytes=self._halves.nbytes,
            lane=AVERAGES, group=self.members,
        )  # fmt: skip

    def _say(self, order: Say) -> None:
        payload: Any = b""
        interface = None
        if order.kind == Kind.PIECE:
            payload = self._halves.model(order.piece)
            # A faster interface has its parts back sooner, and gets more of them.
            interface = min(self._mailbox.interfaces(order.peer), key=lambda i: self._load[i])
            self._load[interface] += 1
            self._over[order.piece] = interface
        elif order.kind == Kind.MEAN:
            payload, interface = self._halves.answer(order.piece), self._over.pop(order.piece)
        self._post(order.peer, order.kind, payload, (order.number, order.piece, 0, 0), interface)

    def _post(
        self,
        peer: int,
        kind: Kind,
        payload: Any = b"",
        ids: tuple[int, int, int, int] = (0, 0, 0, 0),
        interface: int | None = None,
    ) -> None:
        try:
            self._mailbox.post(peer, kind, payload, ids=ids, interface=interface)
        except PeerError:
            # If it is gone the next step sees that, after its last words.
            if peer not in self._mailbox.lost and peer not in self._mailbox.left:
                raise

    def _look(self) -> None:
        """See now and then who is gone without a word."""
        now = self._clock()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._carry()
            for peer, seconds in self._mailbox.unconnected().items():
                if seconds > RECONNECT_S and peer in self.machine.there:
                    self._lose(peer, "has ended without a word")
            self._probe()

    def _probe(self) -> None:
        """Send something to those who are waited for: if they are dead, it does not arrive.

        And to those who wait for their turn, while it is another's.
        """
        behind, queue = self.machine.behind(), self.machine.queue
        waiting = queue if self.machine.served is not None else ()
        for peer in self.machine.there if self.watching else (*behind, *waiting):
            self._post(peer, Kind.ALIVE)
