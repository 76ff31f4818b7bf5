"""AD-PSGD: two workers at a time average their parameters atomically, while training continues.

The algorithm is that of Lian et al. (2018), described in sections 2.3 and 2.4 of Ripples. Active
workers send requests and passive ones serve them, so there is no deadlock. `pair_machine` has the
protocol.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from wingbeat.collectives.packing import narrower_dtype
from wingbeat.errors import MismatchError, PeerError, UsageError, WingbeatError
from wingbeat.methods.model_averaging.generator import ProtocolError
from wingbeat.methods.model_averaging.group_all_reduce import GroupAllReduce
from wingbeat.methods.model_averaging.pair_machine import (
    MESSAGES,
    Apply,
    Chunk,
    Kind,
    Numbered,
    PairMachine,
    Send,
    is_active,
    partners,
)
from wingbeat.methods.model_averaging.static_client import SYNC_CALL, StaticClient, StatusTable
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.observe.meter import Cell, Section
from wingbeat.schema import MalformedMessage
from wingbeat.transport import graceful_shutdown
from wingbeat.transport.actor import Actor, fail
from wingbeat.transport.detector import Failed, Failure
from wingbeat.transport.failures import WaitLog, is_alive
from wingbeat.transport.graceful_shutdown import Departures, departures_of
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.frames import Limits, Message
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.world import World
from wingbeat.types import SERIES, Layout, Span

SILENCE_S = 10.0
"""Maximum seconds without a message after which an awaited worker is lost."""

CHUNK_BYTES = 1 << 20
"""Maximum bytes of a chunk of a model."""

_PROGRESS = frozenset({Kind.GRANT, Kind.CHUNK, Kind.AVERAGE, Kind.DONE, Kind.SYNCHRONIZE})
"""Messages that show progress, and extend the deadline of a wait."""


class PairBuffer:
    """A worker's parameters, and the memory in which an average is made.

    The average is x_i, x_j <- (x_i + x_j) / 2, chunk by chunk. The parameters do not change before
    all chunks have arrived, so a worker that dies leaves its peer's model unchanged.

    Uncompressed, the responder computes the average and returns it, so both hold the same bits.
    Models rounded to a narrower dtype would lose most steps, which are smaller than the last bit of
    most parameters. So the response is then half of the difference, rounded: one worker adds it,
    the other subtracts it. The sum of both models is unchanged; they differ by the rounding error,
    and models of AD-PSGD differ anyway.

    The buffer has all parameters: flat, contiguous, floating point, on the CPU. ``dtype`` is that
    of chunks; None, or a dtype that is no narrower, selects the buffer's.

    Attributes:
        spans: of the chunks.

    Raises:
        UsageError: parameters cannot be sent in this dtype.
    """

    def __init__(
        self, buffer: torch.Tensor, dtype: torch.dtype | None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._buffer = buffer.detach()
        narrow = narrower_dtype(dtype, buffer)
        self._compressed = narrow is not None
        sent = buffer.dtype if narrow is None else narrow
        self.spans = Span(0, buffer.numel()).cut(max(1, chunk_bytes // sent.itemsize))
        self._itemsize = sent.itemsize
        self._result = torch.empty(buffer.numel(), dtype=sent, device="cpu")
        self._result_bytes = _bytes_of(self._result)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, as they are sent."""
        return len(self._result_bytes)

    def is_valid_chunk(self, chunk: int, nbytes: int) -> bool:
        """Whether the chunk with this number has ``nbytes`` bytes."""
        return chunk < len(self.spans) and nbytes == len(self.spans[chunk]) * self._itemsize

    def model_chunk(self, chunk: int) -> memoryview:
        """Return a chunk of this worker's model to send; valid until the response arrives."""
        if not self._compressed:
            return _bytes_of(self._buffer)[self._place(chunk)]
        own, result = self._parts(chunk)
        result.copy_(own)
        return self._result_bytes[self._place(chunk)]

    def average_chunk(self, chunk: int) -> memoryview:
        """Return the response to a chunk, after `average_with`."""
        return self._result_bytes[self._place(chunk)]

    def average_with(self, chunk: int, payload: memoryview) -> None:
        """Average a valid chunk of the requester's model with this worker's."""
        self.receive_average(chunk, payload)
        own, result = self._parts(chunk)
        with torch.no_grad():
            if self._compressed:
                result.copy_((own - result.to(own.dtype)).mul_(0.5))
            else:
                result.add_(own).mul_(0.5)

    def receive_average(self, chunk: int, payload: memoryview) -> None:
        """Store the valid response to a chunk."""
        self._result_bytes[self._place(chunk)] = payload

    def apply(self, *, is_requester: bool) -> None:
        """Replace this worker's model by the complete average."""
        with torch.no_grad():
            if not self._compressed:
                self._buffer.copy_(self._result)
            elif is_requester:
                self._buffer.add_(self._result)
            else:
                self._buffer.sub_(self._result)

    def discard(self) -> None:
        """Discard an average. Unsent messages may still reference its memory."""
        self._result = torch.empty_like(self._result)
        self._result_bytes = _bytes_of(self._result)

    def _parts(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        inside = slice(self.spans[chunk].start, self.spans[chunk].stop)
        return self._buffer[inside], self._result[inside]

    def _place(self, chunk: int) -> slice:
        span = self.spans[chunk]
        return slice(span.start * self._itemsize, span.stop * self._itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view


class _Wait(NamedTuple):
    """What training waits for: until ``is_done``, then ``finish`` is called; or ``give_up``."""

    future: Future[None]
    log: WaitLog
    is_done: Callable[[], bool]
    finish: Callable[[], None]
    give_up: Callable[[], None]


class PairExchange(Actor):
    """Executes the commands of a worker's machine in a thread, while training continues.

    The mailbox's partners are numbered by rank. A live partner is awaited for `MAX_WAIT_FACTOR`
    times ``timeout`` seconds. The thread calls ``on_lost`` with each lost worker.

    Attributes:
        waits: how often training had to wait for an average.
        members: this worker, and its last partner.
        watches_all: whether all partners are checked instead of only awaited ones.
    """

    check_s = 0.5
    closed = "close() was called: the averager cannot be used any more"

    def __init__(
        self,
        machine: PairMachine,
        mailbox: Mailbox,
        buffer: PairBuffer,
        *,
        timeout: float,
        on_lost: Callable[[int], None] = lambda _: None,
        departures: Departures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        me, chunks = f"rank {machine.rank}", len(buffer.spans)
        super().__init__(mailbox, MESSAGES, me, "wingbeat-pairs", clock=clock, chunks=chunks)
        self.machine, self._buffer, self._timeout = machine, buffer, timeout
        self._on_lost, self._reported = on_lost, set[int]()
        self._departures = departures or Departures(None, me)
        self.waits = 0
        self.watches_all = False
        self.members: tuple[int, ...] = ()
        self._requested_ns = self._granted_ns = 0
        self._awaited: list[_Wait] = []
        self._progress_at = 0.0
        self._interfaces: dict[int, int] = {}  # by chunk in flight
        self._load: Counter[int] = Counter()  # chunks in flight by interface

    # -- calls of the training thread -----------------------------------------------------

    def begin(self) -> None:
        """Allow averages of the model; see `PairMachine.begin`."""
        self.ask(self.machine.begin)

    def end(self) -> Future[None]:
        """Return a future that is done once the model may change; see `PairMachine.end`."""

        def call() -> None:
            self.machine.end()
            self.waits += self.machine.pending

        return self._wait(call, lambda: not self.machine.pending, "an average")

    def synchronize(self) -> Future[None]:
        """Return a future that is done once no more models are averaged.

        See `PairMachine.synchronize`. After a PeerError or `cancel` it may be repeated, or `begin`
        called; `end` then waits for an average.
        """
        machine = self.machine
        return self._wait(
            machine.synchronize, lambda: machine.synchronized, SYNC_CALL, machine.end,
            machine.cancel_synchronization,
        )  # fmt: skip

    def cancel(self, wait: Future[None]) -> None:
        """Undo a synchronization that was interrupted, even if it has just completed."""

        def call() -> None:
            self._awaited = [each for each in self._awaited if each.future is not wait]
            if wait.cancel() or wait.exception() is None:
                self.machine.cancel_synchronization()

        with contextlib.suppress(WingbeatError):  # this thread has ended
            self.ask(call)

    def _wait(
        self,
        call: Callable[[], None],
        is_done: Callable[[], bool],
        what: str,
        finish: Callable[[], None] = lambda: None,
        give_up: Callable[[], None] = lambda: None,
    ) -> Future[None]:
        log = WaitLog(self.me, what, self.clock)
        wait = _Wait(Future(), log, is_done, finish, give_up)

        def begin() -> None:
            call()
            self._awaited.append(wait)

        return self.submit(begin, wait.future)

    # -- the thread -----------------------------------------------------------------------

    def handle(self, message: Message, record: Numbered | Chunk) -> None:
        """Handle a partner's message."""
        peer, kind, payload, chunk = message.peer, message.kind, message.payload, 0
        if isinstance(record, Chunk):
            chunk = record.chunk
            if not self._buffer.is_valid_chunk(chunk, len(payload)):
                raise ProtocolError(f"{len(payload)} bytes in chunk {chunk}")
        accepted = self.machine.receive(peer, kind, record.number, chunk)
        # A busy passive worker sends keepalives to the workers in its queue.
        if kind in _PROGRESS or (kind == Kind.KEEPALIVE and self.machine.requests):
            self._progress_at = self.clock()
        if kind == Kind.FAILED:
            self._departures.lost(peer, "has failed")
        elif accepted and kind == Kind.GRANT:
            self._granted_ns = now = time.monotonic_ns()
            group = (self.machine.rank, peer)
            stream.record("group_wait", self._requested_ns, now, lane=AVERAGES, group=group)
        elif accepted and kind == Kind.CHUNK:
            self._interfaces[chunk] = message.interface
            self._buffer.average_with(chunk, payload)
        elif accepted and kind == Kind.AVERAGE:
            self._load[self._interfaces.pop(chunk)] -= 1
            self._buffer.receive_average(chunk, payload)
        self._execute_commands()

    def refuse(self, message: Message, error: MalformedMessage) -> None:
        """Raise PeerError: an average with the sender would never end."""
        raise PeerError(f"{self.me}: rank {message.peer} violated the protocol: {error}")

    def work(self) -> None:
        """Execute commands, report lost partners, and complete what training waits for.

        Raises PeerError if no partner is left and one was lost.
        """
        machine = self.machine
        if self.closing:
            machine.leave()
        self._execute_commands()
        for peer in machine.lost - self._reported:
            self._reported.add(peer)
            self._on_lost(peer)
        if machine.lost and not machine.live_partners:
            how = ", ".join(f"rank {p} {self._departures.how(p)}" for p in sorted(machine.lost))
            raise PeerError(
                f"{self.me}: no worker is left to average parameters with: {how}; "
                "start all workers again"
            )
        for wait in [each for each in self._awaited if each.is_done()]:
            self._awaited.remove(wait)
            wait.finish()
            wait.future.set_result(None)

    def check(self, now: float) -> None:
        """Remove departed partners, probe awaited ones, and fail waits that are too long.

        Partners in the queue receive keepalives.
        """
        machine = self.machine
        for peer in machine.live_partners:
            if peer in self.gone:
                self._remove(peer, self.gone[peer])
        queued = machine.queue if machine.served is not None else ()
        checked = (*machine.waiting_for(), *queued)
        for peer in machine.live_partners if self.watches_all else checked:
            self._send(Send(peer, Kind.KEEPALIVE, 0))
        self.work()
        names = ", ".join(f"rank {peer}" for peer in machine.waiting_for())
        for wait in self._awaited[:]:
            try:
                wait.log.check(names, self._timeout, now - self._progress_at)
            except PeerError as error:
                self._awaited.remove(wait)
                wait.give_up()
                fail(wait.future, error)

    def busy(self) -> bool:
        """Whether an average runs."""
        return self.machine.in_transfer

    def leave(self) -> None:
        """Report a failure to the partners."""
        for peer in self.machine.live_partners if self.quick or self.failed else ():
            with contextlib.suppress(WingbeatError):
                self.mailbox.post(peer, Kind.FAILED, seconds=0.0)

    def _remove(self, peer: int, gone: Failed) -> None:
        lost = gone.how is not Failure.LEFT
        if lost:
            self._departures.lost(peer, gone.text)
            self.mailbox.drop(peer)
        stream.happened("left", (peer,))
        self.machine.remove(peer, lost=lost)

    def _execute_commands(self) -> None:
        commands = self.machine.commands
        while commands:
            command = commands.popleft()
            if isinstance(command, Send):
                self._send(command)
            elif isinstance(command, Apply):
                self._buffer.apply(is_requester=command.is_requester)
                self.members = (self.machine.rank, command.peer)
                stream.record(
                    "average", self._granted_ns, time.monotonic_ns(), nbytes=self._buffer.nbytes,
                    lane=AVERAGES, group=self.members,
                )  # fmt: skip
            else:
                self._buffer.discard()
                self._interfaces.clear()
                self._load.clear()

    def _send(self, command: Send) -> None:
        peer, kind, number, chunk = command
        record: Numbered | Chunk = Numbered(number)
        interface = None
        if kind == Kind.REQUEST:
            self._requested_ns = time.monotonic_ns()
            stream.happened("request", (peer,))
        elif kind == Kind.GRANT:
            self._granted_ns = time.monotonic_ns()
        elif kind == Kind.CHUNK:
            record = Chunk(number, chunk, self._buffer.model_chunk(chunk))
            # Faster interfaces return chunks sooner, and so get more of them.
            interface = min(self.mailbox.interfaces(peer), key=lambda i: self._load[i])
            self._load[interface] += 1
            self._interfaces[chunk] = interface
        elif kind == Kind.AVERAGE:
            record = Chunk(number, chunk, self._buffer.average_chunk(chunk))
            interface = self._interfaces.pop(chunk)
        _, ids, payload = MESSAGES.pack(record, kind)
        try:
            self.mailbox.post(peer, kind, payload, ids=ids, interface=interface)
        except PeerError:
            # The next step removes a lost peer, after its last messages.
            if peer not in self.mailbox.lost and peer not in self.mailbox.left:
                raise


class PairAverager:
    """Averages this worker's parameters with one other worker's at a time. An `Averager`.

    Workers of even rank are active: each `begin` requests an average from a random passive worker,
    and `end` waits for it. Passive workers serve requests, one at a time, between `begin` and
    `end`, which waits only for a running average. An average is atomic: if a partner dies, an
    active worker requests one from another partner, and a passive one keeps its model.

    All workers create one at the same time. The buffer has all parameters: flat, contiguous,
    floating point, on the CPU. ``whole`` is what `synchronize` averages, of which the buffer is a
    part; None for the buffer. ``dtype`` is that in which parameters are sent; None for their own.
    Only with their own dtype do both workers hold the same bits afterwards. An awaited worker is
    lost after ``silence`` seconds without a message.

    The constructor may raise UsageError (the buffer cannot be averaged, or not in this dtype),
    MismatchError (another worker's buffer or dtype differs), RendezvousError or PeerError.
    """

    def __init__(
        self,
        world: World,
        buffer: torch.Tensor,
        *,
        whole: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        encrypted: bool = True,
        silence: float = SILENCE_S,
    ) -> None:
        flat = buffer.dim() == 1 and buffer.is_contiguous()
        if not (flat and buffer.device.type == "cpu" and buffer.is_floating_point()):
            raise UsageError(
                f"a buffer of shape {tuple(buffer.shape)}, {buffer.dtype}, on {buffer.device}: "
                "allowed is a flat, contiguous one of floating point numbers on the CPU"
            )
        self._world, self.buffer = world, buffer
        self._whole = buffer if whole is None else whole
        pair_buffer = PairBuffer(buffer, dtype)
        _check_equal(world, [buffer.numel(), str(buffer.dtype), str(dtype)])
        self._machine = PairMachine(world.rank, world.size, len(pair_buffer.spans), seed)
        self._everyone = world.parent or world
        self._first = (self._everyone.next_series() - 1) * SERIES
        store, room, departures = world.store, f"pairs/{world.path}", departures_of(world)
        table = StatusTable(store, room, world.size, world.rank)
        self._client = StaticClient(
            world.rank, Layout.even(1, world.size), world.timeout, table, everyone=True,
            is_running=functools.partial(is_alive, store),
        )  # fmt: skip
        self._client.on_lost = departures.lost
        self._begun = self._left = False
        self._exchange: PairExchange | None = None
        if world.size > 1:
            mailbox = open_mailbox(
                world.store,
                world.rank,
                partners(world.rank, world.size),
                namespace=room,
                interfaces=("lo",) if world.threads else world.interfaces or None,
                classes=1,
                encrypted=encrypted,
                limits=Limits(silence=min(silence, world.timeout)),
                seconds=world.timeout,
            )
            self._exchange = PairExchange(
                self._machine, mailbox, pair_buffer, timeout=world.timeout,
                on_lost=table.mark_lost, departures=departures,
            )  # fmt: skip
            self._exchange.start()
            # Ends the thread of an averager that is garbage-collected without `close_world`.
            weakref.finalize(self, self._exchange.abandon).atexit = False
            close = weakref.WeakMethod(self.close)
            world.on_close(lambda: (method := close()) and method())

    @property
    def members(self) -> tuple[int, ...]:
        """This worker, and its last partner."""
        return () if self._exchange is None else self._exchange.members

    @property
    def left_out(self) -> bool:
        """Always false: a worker that was left out has ended."""
        return False

    def begin(self, part: Span, weight: float | None = None) -> None:  # noqa: ARG002
        """Allow averages of the buffer, which must not be used until `end`.

        Raises UsageError if the part is not the whole buffer, or `end` was not called.
        """
        if part != (whole := Span(0, self.buffer.numel())):
            raise UsageError(f"begin({part}): fragments are not supported, allowed is {whole}")
        if self._begun:
            raise UsageError("begin() was called twice: call end() before the model changes")
        if self._exchange is not None:
            self._exchange.begin()
        self._begun = True

    def end(self) -> None:
        """Wait until a requested or running average is done and the buffer may change."""
        try:
            if self._begun and self._exchange is not None:
                self._exchange.end().result()
        except Exception:
            self._begun = False
            raise
        self._begun = False  # not after KeyboardInterrupt: an average may still use the buffer

    def commit(self) -> None:
        """Do nothing: rounding errors are not fed back."""

    def synchronize(self, part: Span | None = None) -> None:
        """Replace the buffer, and ``whole``, by the mean over all workers; same bits.

        Passive workers serve until all active ones have called this. Running averages are
        completed. Workers that are lost or have left are left out. Raises PeerError if a worker did
        not call it in time, or the others continued without this one.
        """
        self.end()
        if self._exchange is None:
            return
        self._begun = True  # averages may use the buffer until the exchange has synchronized
        wait = self._exchange.synchronize()
        try:
            wait.result()
        except BaseException:  # also KeyboardInterrupt
            self._exchange.cancel(wait)
            raise
        self._begun = False
        self._exchange.watches_all = True
        whole = self._whole if part is None else self._whole[part.start : part.stop]
        reducer = GroupAllReduce(self._everyone, whole, first=self._first)
        try:
            with torch.no_grad():
                self._client.synchronize(reducer)
        finally:
            self._exchange.watches_all = False
            reducer.close()
        if self._client.silent:
            names = ", ".join(f"rank {rank}" for rank in sorted(self._client.silent))
            raise PeerError(
                f"rank {self._world.rank}: {names} did not synchronize within "
                f"{self._world.timeout:g} s: the mean is of the other workers; start all workers "
                "again"
            )

    def sections(self) -> Sequence[Section]:
        """Return counts and the current partner for `wingbeat top`. Takes no lock."""
        machine, exchange = self._machine, self._exchange
        average = machine.requested or machine.served
        cells: dict[str, Cell] = {
            "set": "active" if is_active(self._world.rank) else "passive",
            "averages": machine.averages,
            "waits": 0 if exchange is None else exchange.waits,
            "partner": "-" if average is None else average.peer,
            "queue": len(machine.queue),
        }
        return [Section("pairs", cells)]

    def close(self) -> None:
        """Leave. May be called again."""
        if self._exchange is not None:
            if not self._left:
                self._left = True
                self._client.leave(failed=graceful_shutdown.is_failing())
            self._exchange.close(quick=graceful_shutdown.is_failing())


def _check_equal(world: World, own: list[object]) -> None:
    for rank, theirs in enumerate(world.exchange("pairs", own)):
        if theirs != own:
            raise MismatchError(
                f"rank {world.rank} averages [elements, dtype, compression] = {json.dumps(own)}, "
                f"rank {rank} {json.dumps(theirs)[:80]}: give all workers the same model and "
                "compression"
            )
