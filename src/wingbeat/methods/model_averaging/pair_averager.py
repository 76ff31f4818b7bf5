"""AD-PSGD: parameters averaged by two workers at a time, atomically, beside training.

As published by Lian et al. (2018) and described in sections 2.3 and 2.4 of Ripples: active workers
ask, passive ones answer, so nobody waits in a ring. Who may do what when is
`wingbeat.methods.model_averaging.pair_machine`'s.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wingbeat.collectives.cast import narrower
from wingbeat.errors import MismatchError, PeerError, UsageError, WingbeatError
from wingbeat.exchanges.departures import Departures, departures_of
from wingbeat.methods.model_averaging.group_average import GroupAverage
from wingbeat.methods.model_averaging.group_averager import next_serial
from wingbeat.methods.model_averaging.pair_machine import (
    Adopt,
    Drop,
    Kind,
    Say,
    Unexpected,
    Worker,
    is_active,
    partners,
)
from wingbeat.methods.model_averaging.rendezvous import Board
from wingbeat.methods.model_averaging.rules import Layout
from wingbeat.methods.model_averaging.static import CALL, Follower
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.observe.meter import Section
from wingbeat.transport import leaving
from wingbeat.transport.incarnation import lives
from wingbeat.transport.liveness import LONGEST, Wait, stuck_text
from wingbeat.transport.messages.endpoint import Limits, Message
from wingbeat.transport.messages.mailbox import CLOSING, UNCONNECTED_S, Mailbox
from wingbeat.transport.messages.meeting import open_mailbox
from wingbeat.transport.store import Store
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World
from wingbeat.types import SERIES, Span

PIECE_BYTES = 1 << 20
"""Bytes of a part that travels by itself, at most."""


class Halves:
    """One worker's buffer, and the memory that an average is made in.

    Args:
        buffer: all parameters: flat, contiguous, of floating point numbers, on the CPU.
        wire: what they travel as; as they are if None, or if that is no wider.
        piece_bytes: of a part.

    Attributes:
        spans: the parts, in elements.

    Raises:
        UsageError: parameters cannot travel in the dtype ``wire``.
    """

    def __init__(
        self, buffer: torch.Tensor, wire: torch.dtype | None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._buffer = buffer.detach()
        self._wire = narrower(wire, buffer)
        dtype = buffer.dtype if self._wire is None else self._wire
        self.spans = Span(0, buffer.numel()).cut(max(1, piece_bytes // dtype.itemsize))
        self._itemsize = dtype.itemsize
        self._fresh = torch.empty(buffer.numel(), dtype=dtype, device="cpu")
        self._bytes = _bytes_of(self._fresh)
        self._own = _bytes_of(self._buffer) if self._wire is None else self._bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, as they travel."""
        return len(self._bytes)

    def fits(self, piece: int, nbytes: int) -> bool:
        """Whether a part of that number has so many bytes."""
        return piece < len(self.spans) and nbytes == len(self.spans[piece]) * self._itemsize

    def model(self, piece: int) -> memoryview:
        """Return a part of this worker's model, to be sent; it does not change until it is back."""
        span = self.spans[piece]
        if self._wire is not None:
            self._fresh[span.start : span.stop].copy_(self._buffer[span.start : span.stop])
        return self._own[self._place(span)]

    def answer(self, piece: int) -> memoryview:
        """Return what becomes of a part that was `met`, to be sent."""
        return self._bytes[self._place(self.spans[piece])]

    def meet(self, piece: int, payload: memoryview) -> None:
        """Average a part of another worker's model, which `fits`, with this one's."""
        span = self.spans[piece]
        self._bytes[self._place(span)] = payload
        fresh = self._fresh[span.start : span.stop]
        own = self._buffer[span.start : span.stop]
        with torch.no_grad():
            if self._wire is None:
                fresh.add_(own).mul_(0.5)
            else:
                fresh.copy_((own - fresh.to(own.dtype)).mul_(0.5))

    def take(self, piece: int, payload: memoryview) -> None:
        """Take in what has become of a part of this worker's model; it `fits`."""
        self._bytes[self._place(self.spans[piece])] = payload

    def adopt(self, *, asked: bool) -> None:
        """Make the average this worker's model, which all its parts are there of.

        Args:
            asked: whether this worker has asked the other.
        """
        with torch.no_grad():
            if self._wire is None:
                self._buffer.copy_(self._fresh)
            elif asked:
                self._buffer.add_(self._fresh)
            else:
                self._buffer.sub_(self._fresh)

    def drop(self) -> None:
        """Begin anew: what is being sent to a worker that is gone may never have left."""
        self._fresh = torch.empty_like(self._fresh)
        mine, self._bytes = self._own is self._bytes, _bytes_of(self._fresh)
        if mine:
            self._own = self._bytes

    def _place(self, span: Span) -> slice:
        return slice(span.start * self._itemsize, span.stop * self._itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view


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
        timeout: seconds; a partner that lives is waited for `LONGEST` times as many.
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
        wait = Wait(self._me, what, self._clock)
        while True:
            self._check()
            if over():
                return
            # Whoever is gone, or cannot be reached, is lost before this: see `_look`.
            names = ", ".join(map(self._name, self.machine.behind()))
            if self._clock() - max(wait.begun, self._heard) > LONGEST * self._timeout:
                raise PeerError(stuck_text(self._me, names, what, self._timeout))
            wait.look(names)
            self._changed.wait(min(_LOOK_S, LONGEST * self._timeout))

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                self.step(self._mailbox.next(_LOOK_S))
            with self._changed:
                self.machine.leave()
            until = self._clock() + CLOSING
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
        self._mailbox.close(_QUICK_S if failed else CLOSING)

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
                if seconds > UNCONNECTED_S and peer in self.machine.there:
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


SILENCE_S = 10.0
"""Seconds without a sign, at most, after which a worker that is waited for is lost."""


class PairAverager:
    """Averages this worker's parameters with one other's at a time. An `Averager`.

    Workers of even rank are active: each `begin` asks a passive one, at random, and `end` waits
    for the average. The others serve one at a time between `begin` and `end`, which waits only for
    an average that is in the midst. An average is all or nothing: if a partner dies, an active
    worker asks another one, and a passive one keeps its model.

    Args:
        world: all workers, on CPUs; each makes one at the same time.
        buffer: all parameters: flat, contiguous, of floating point numbers, on the CPU.
        whole: what is averaged when all workers meet, of which the buffer is a part; the buffer if
            None.
        wire: what they travel as; as they are if None. Then both have the same bits afterwards;
            otherwise the sum of both stays, and they differ by what was rounded.
        seed: of whom active workers ask.
        encrypted: whether messages are.
        silence: seconds without a sign after which a worker that is waited for is lost.

    Attributes:
        buffer: as given.

    Raises:
        UsageError: a buffer or a wire that cannot be averaged.
        MismatchError: another worker has a buffer or a wire that differs.
        RendezvousError: a worker did not come.
        PeerError: a worker cannot be reached.
    """

    def __init__(
        self,
        world: World,
        buffer: torch.Tensor,
        *,
        whole: torch.Tensor | None = None,
        wire: torch.dtype | None = None,
        seed: int = 0,
        encrypted: bool = True,
        silence: float = SILENCE_S,
    ) -> None:
        _check(buffer)
        self._world, self.buffer = world, buffer
        self._whole = buffer if whole is None else whole
        halves = Halves(buffer, wire)
        _compare(world, [buffer.numel(), str(buffer.dtype), str(wire)])
        self._machine = Worker(world.rank, world.size, len(halves.spans), seed)
        self._everyone = world.parent or world
        self._first = (next_serial(self._everyone) - 1) * SERIES
        store = _store_of(world)
        board = Board(store, f"pairs/{world.path}", world.size)
        self._follower = Follower(
            world.rank, Layout.even(1, world.size), world.timeout, board, everyone=True,
            lives=functools.partial(lives, store),
        )  # fmt: skip
        self._follower.lost = departures_of(world).lost
        self._begun = self._left = False
        self._pairing: Pairing | None = None
        if world.size > 1:
            self._pairing = _joined(world, self._machine, halves, encrypted, silence, board.lose)
            self._pairing.serve()
            # Dropped without `close`, it takes its thread along.
            weakref.finalize(self, self._pairing.forget).atexit = False
        world.on_close(_Closing(self))

    @property
    def members(self) -> tuple[int, ...]:
        """This worker, and whom it has averaged with last."""
        return () if self._pairing is None else self._pairing.members

    def begin(self, part: Span) -> None:
        """The buffer is this worker's model now; leave it alone until `end`.

        Args:
            part: all of the buffer: models are averaged whole.

        Raises:
            UsageError: the part is not the whole buffer, or `end` was not called.
            PeerError: nobody is left to average with.
        """
        if part != Span(0, self.buffer.numel()):
            raise UsageError(
                f"begin({part}): models are averaged whole, allowed is "
                f"{Span(0, self.buffer.numel())}"
            )
        if self._begun:
            raise UsageError("begin() was called twice: call end() before the model changes")
        if self._pairing is not None:
            self._pairing.begin()
        self._begun = True

    def end(self) -> None:
        """Wait as long as the exchange asks for; then the model may change. Nothing if not begun.

        An active worker waits for its average, a passive one for an average that is in the midst.

        Raises:
            PeerError: a worker was waited for in vain; names it.
        """
        try:
            if self._begun and self._pairing is not None:
                self._pairing.end()
        except Exception:
            self._begun = False
            raise
        self._begun = False  # not so after Ctrl-C: the buffer may still be in an average

    def taken(self) -> None:
        """Nothing is lost that would have to be sent later."""

    def level(self, part: Span | None = None) -> None:
        """Make the buffer, and what it is a part of, the mean over all workers; same bits.

        Passive workers serve until no active one asks any more. What was begun is ended. Whoever
        is lost, or has left, is left out.

        Args:
            part: of what the buffer is a part of; all if None.

        Raises:
            PeerError: a worker did not call it in time; names it. Or the others went on without
                this one.
        """
        self.end()
        if self._pairing is None:
            return
        self._begun = True  # until it has ended: whom this one serves uses the buffer
        self._pairing.level()
        self._begun = False
        self._pairing.watching = True
        whole = self._whole if part is None else self._whole[part.start : part.stop]
        averages = GroupAverage(self._everyone, whole, first=self._first)
        try:
            with torch.no_grad():
                self._follower.level(averages)
        finally:
            self._pairing.watching = False
            averages.close()
        self._check_level()

    def _check_level(self) -> None:
        """Raise a `PeerError` unless all who live have the same now."""
        me, silent = self._world.rank, self._follower.silent
        if silent:
            names = ", ".join(f"rank {rank}" for rank in sorted(silent))
            raise PeerError(
                f"rank {me}: no word that it waits for the mean of all came from {names} within "
                f"{self._world.timeout:g} s: the mean is of the others; start all workers again"
            )

    def sections(self) -> Sequence[Section]:
        """Return whom this worker averages with, and how often it has; other threads ask."""
        machine, pairing = self._machine, self._pairing
        meeting = machine.asked or machine.served
        return [
            Section(
                "pairs",
                {
                    "set": "active" if is_active(self._world.rank) else "passive",
                    "averages": machine.averages,
                    "waits": 0 if pairing is None else pairing.waits,
                    "partner": "-" if meeting is None else meeting.peer,
                    "queue": len(machine.queue),
                },
            )
        ]

    def close(self) -> None:
        """Leave; nobody waits for this worker any more. May be called again."""
        if self._pairing is not None:
            if not self._left:
                self._left = True
                self._follower.leave(failed=leaving.failing())
            self._pairing.close(quick=leaving.failing())


class _Closing:
    """Has an averager leave when its world closes, and does not keep it alive."""

    def __init__(self, averager: PairAverager) -> None:
        self._of = weakref.ref(averager)

    def __call__(self) -> None:
        averager = self._of()
        if averager is not None:
            averager.close()


def _check(buffer: torch.Tensor) -> None:
    """Raise a `UsageError` if the buffer cannot be averaged."""
    flat = buffer.dim() == 1 and buffer.is_contiguous()
    if not (flat and buffer.device.type == "cpu" and buffer.is_floating_point()):
        raise UsageError(
            f"a buffer of shape {tuple(buffer.shape)}, {buffer.dtype}, on {buffer.device}: allowed "
            "is a flat, contiguous one of floating point numbers on the CPU"
        )


def _compare(world: World, own: list[object]) -> None:
    """Raise a `MismatchError` if not all workers have the same buffer and wire."""
    for rank, theirs in enumerate(world.exchange("pairs", own)):
        if theirs != own:
            raise MismatchError(
                f"rank {world.rank} averages [elements, dtype, wire] = {json.dumps(own)}, rank "
                f"{rank} {json.dumps(theirs)[:80]}: give all workers the same model and wire"
            )


def _store_of(world: World) -> Store:
    """Return a way to the store whose waits hold up nobody else."""
    return world.store if world.group_store is None else world.group_store()


def _joined(
    world: World,
    machine: Worker,
    halves: Halves,
    encrypted: bool,
    silence: float,
    gone: Callable[[int], None],
) -> Pairing:
    """Connect this worker to its partners."""
    mailbox = open_mailbox(
        _store_of(world),
        world.rank,
        partners(world.rank, world.size),
        room=f"pairs/{world.path}",
        interfaces=("lo",) if world.threads else world.interfaces or None,
        classes=1,
        encrypted=encrypted,
        limits=Limits(silence=min(silence, world.timeout)),
        seconds=world.timeout,
    )
    return Pairing(
        machine, mailbox, halves, me=f"rank {world.rank}", timeout=world.timeout, gone=gone,
        departures=departures_of(world),
    )  # fmt: skip
