"""Programs of collectives, and the machine that schedules them, without threads, clocks or I/O.

Rounds of hops are compiled into one linear program for each link. Hops are cut into chunks, and a
chunk may be sent as soon as the chunk it depends on has arrived, so that rounds overlap.

The machine is a generator that yields commands, and its driver performs each before it requests the
next. An `Executor` drives it over links, a simulator over modelled links, a test over a dictionary.

1. The next collective begins as soon as the previous one has sent its last chunk to the link.
   Earlier, its chunks would precede those chunks in the socket; later, the link would idle for a
   round trip.
2. A collective whose result is complete does not delay the next one while its last chunks are sent.
3. Receives are posted ahead, because a link may send only chunks that the peer expects.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Generic, NamedTuple, TypeVar

from wingbeat import _native
from wingbeat.topologies import Hierarchical, Mesh, Topology, in_few_rounds
from wingbeat.types import Hop, Round, Send, Span, blocks_of, split

MIN_CHUNK_BYTES = 128 << 10
MAX_CHUNK_BYTES = 1024 << 10
CHUNKS_PER_BLOCK = 4

NATIVE_CHUNK_BYTES = 32 << 10, 256 << 10
"""Minimum and maximum bytes of a message in the extension: its CPU time is a few microseconds, and
a chunk that is added when it has arrived should still be in the processor's cache.
"""

DIRECT_BYTES = 64 << 10
"""Bytes of a buffer up to which ranks that are connected over TCP exchange it in single rounds, in
which each sends to all others; of all ranks' buffers together for an all-reduce. Ranks that share
the links of a host count together: up to so many bytes for each round a host receives, and more
take longer than the sums inside hosts that avoid them (2 x 4 workers, 1 Gbit/s, two cores: 64 KB
took 2.1 to 2.3 ms directly and 1.2 to 1.4 in two levels, 16 KB 1.2 to 1.6 in either way).
"""

DIRECT_RANKS = 16
"""Ranks up to which single rounds are used: each sends as many messages."""

SMALL_GATHER_BYTES = 80 << 10
"""Total payload size below which a gather uses doubling (Thakur, Rabenseifner and Gropp 2005,
section 4.1; with 16 workers at 7.3 Mbit/s both took the same time at 64 KB).
"""

MESSAGE_S = 1e-3
"""Minimum seconds on the link per message, whose CPU time is about 0.1 ms."""

MAX_LEAST_BYTES = 4 << 20
"""Messages above 4 MB exceed the caches and are no faster on fast links."""

SPANNING_CHUNKS = 128
"""Approximate number of chunks that a program over several links receives: at most the number of
posted receives, as a link without a posted receive idles. With chunks of 512 KB, 100 MB took 1.1
times as long in a BCube(3, 2).
"""

MAX_SPANNING_BYTES = 4 << 20


def sharing_links(topology: Topology) -> int:
    """Return the largest number of workers on a host, which share its links."""
    return max(map(len, topology.layout.hosts)) if isinstance(topology, Hierarchical) else 1


def small_sum(topology: Topology, nbytes: int) -> Topology:
    """Return the topology of a buffer of up to `DIRECT_BYTES` in a ring of up to `DIRECT_RANKS`.

    Each owner receives its block from all others at once, or from one worker of each other host.
    """
    shared = sharing_links(topology) * nbytes
    return Mesh() if shared <= DIRECT_BYTES else in_few_rounds(topology)


def sums_in_one_round(topology: Topology, workers: int, nbytes: int) -> bool:
    """Whether all ranks of such a ring send the whole buffer to all others."""
    each = sharing_links(topology)
    return workers * nbytes <= DIRECT_BYTES and workers * each * nbytes <= 2 * DIRECT_BYTES


class Transfer(NamedTuple):
    """One chunk to or from ``peer`` over link number ``link``, with one ``tag`` on both sides."""

    peer: int
    span: Span
    tag: int
    reduce: bool = False
    link: int = 0
    near: bool = False

    @property
    def fields(self) -> tuple[int, int, int, int, bool, int, bool]:
        """The fields of the extension's transfers."""
        span = self.span
        return self.peer, span.start, span.stop, self.tag, self.reduce, self.link, self.near


@dataclass(frozen=True)
class Program:
    """One worker's part of a collective, on one or several links.

    ``first`` can be sent immediately, and ``unlocks[i]`` after ``receives[i]`` has been applied.
    """

    first: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    unlocks: tuple[tuple[Transfer, ...], ...]

    @cached_property
    def native(self) -> _native.Program:
        """The program in the form that the extension runs."""
        return _native.Program(
            [each.fields for each in self.first],
            [each.fields for each in self.receives],
            [[each.fields for each in unlocked] for unlocked in self.unlocks],
        )

    def transfers(self) -> Iterator[Transfer]:
        """Yield all transfers, in no particular order."""
        return itertools.chain(self.first, self.receives, *self.unlocks)

    @cached_property
    def tiles(self) -> tuple[Span, ...]:
        """The chunks of the buffer and the gaps between them, in order; empty if chunks overlap.

        Splitting the buffer once costs a fraction of slicing each chunk when needed.
        """
        out: list[Span] = []
        end = 0
        for span in sorted({t.span for t in self.transfers()}, key=lambda s: (s.start, s.stop)):
            if span.start < end:
                return ()
            if span.start > end:
                out.append(Span(end, span.start))
            out.append(span)
            end = span.stop
        return tuple(out)


def least_message(speeds: Sequence[float]) -> int:
    """Return the minimum size of a message in bytes, given the links' bytes per second.

    It is a power of two, so that small differences of measured speeds have no effect.

    >>> [least_message([gbit * 1.25e8]) >> 10 for gbit in (0.1, 1, 2, 4, 10, 100)]
    [128, 128, 128, 256, 1024, 4096]
    """
    wanted = min(speeds, default=0.0) * MESSAGE_S
    least = MIN_CHUNK_BYTES
    while 2 * least <= min(wanted, MAX_LEAST_BYTES):
        least *= 2
    return least


def chunk_elements(
    block_elements: int,
    itemsize: float,
    least: int = MIN_CHUNK_BYTES,
    most: int = MAX_CHUNK_BYTES,
) -> int:
    """Choose the number of elements in one message, given a block's size.

    Several chunks of a block should be in flight, and a message should take longer on the link than
    its CPU time (about 100 microseconds on both sides). ``itemsize`` is the number of bytes of an
    element on the link; 0 does not divide blocks. ``least`` is the result of `least_message`, and
    ``most`` the maximum size of a message unless ``least`` is larger.
    """
    if itemsize <= 0:
        return max(1, block_elements)
    wanted = int(block_elements * itemsize) // CHUNKS_PER_BLOCK
    size = min(max(wanted, least), max(least, most))
    return max(1, int(size / itemsize))


def compile_rounds(rounds: Iterable[Round], chunk: int) -> Program:
    """Cut the rounds' hops into chunks of ``chunk`` elements and order them by dependency."""
    # Chunks are numbered per link, peer and direction; both ends cut the same spans in one order.
    tags: defaultdict[tuple[type[Hop], int, int], Iterator[int]] = defaultdict(itertools.count)
    cut = cache(lambda span: span.cut(chunk))  # a block is received, and sent in the next round
    first: list[Transfer] = []
    receives: list[Transfer] = []
    unlocks: list[list[Transfer]] = []
    for hops in rounds:
        known = len(receives)
        each_tags = [tags[type(hop), hop.interface, hop.peer] for hop in hops]
        # The chunks of hops alternate as on the links.
        for spans in itertools.zip_longest(*(cut(hop.span) for hop in hops)):
            for hop, tag, span in zip(hops, each_tags, spans, strict=True):
                if span is None:
                    continue
                peer, link, near = hop.peer, hop.interface, hop.near
                if isinstance(hop, Send):
                    last = last_overlap(receives, span, known)
                    to = first if last < 0 else unlocks[last]
                    to.append(Transfer(peer, span, next(tag), False, link, near))
                else:
                    receives.append(Transfer(peer, span, next(tag), hop.reduce, link, near))
                    unlocks.append([])
    return Program(tuple(first), tuple(receives), tuple(map(tuple, unlocks)))


def last_overlap(receives: Sequence[Transfer], span: Span, known: int | None = None) -> int:
    """Return the index of the last of the first ``known`` receives that writes into ``span``.

    -1: none does. ``known`` is all of them by default.
    """
    for index in range((len(receives) if known is None else known) - 1, -1, -1):
        if receives[index].span.overlaps(span):
            return index
    return -1


@lru_cache(maxsize=4096)
def compile_collective(
    what: str,
    topology: Topology,
    rank: int,
    size: int,
    numel: int,
    itemsize: float,
    speeds: tuple[float, ...],
    least: int = MIN_CHUNK_BYTES,
    blocks: tuple[Span, ...] | None = None,
    most: int = MAX_CHUNK_BYTES,
) -> tuple[Program, ...]:
    """Return one worker's program for each link of a collective on ``numel`` elements.

    ``what`` is the operation, of a broadcast with its root (``"broadcast:0"``). ``itemsize`` is the
    bytes of an element on the links; 0 does not divide blocks. Each link carries a part of each
    block in proportion to its speed, in messages of at least ``least`` bytes. ``blocks`` has the
    block of each worker; None: nearly equal blocks. ``most`` is the maximum of a message.
    """
    blocks = blocks or tuple(blocks_of(numel, size))
    stripes = [split(block, speeds) for block in blocks]
    chunk = chunk_elements(max(map(len, blocks)), itemsize, least, most)
    if topology.spans_links:
        chunk = max(chunk, _spanning_chunk(numel, itemsize))
        whole = compile_rounds(_rounds(what, topology, rank, blocks, 0), chunk)
        return (whole, *[compile_rounds((), chunk)] * (len(speeds) - 1))[: len(speeds)]
    return tuple(
        compile_rounds(_rounds(what, topology, rank, [s[link] for s in stripes], link), chunk)
        for link in range(len(speeds))
    )


def _spanning_chunk(numel: int, itemsize: float) -> int:
    """Return the minimum elements per message on several links; receives total twice the buffer."""
    most = MAX_SPANNING_BYTES / itemsize if itemsize > 0 else numel
    return int(min(-(-2 * numel // SPANNING_CHUNKS), most))


def _rounds(
    what: str, topology: Topology, rank: int, blocks: Sequence[Span], link: int
) -> list[Round]:
    name, _, root = what.partition(":")
    if name == "broadcast":
        return topology.broadcast(rank, int(root), blocks, link)
    rounds: list[Round] = getattr(topology, name)(rank, blocks, link)
    return rounds


RECEIVES_AHEAD = 128
"""Receives posted ahead, so that peers can send without waiting. They complete in order: in a mesh,
they must cover the lag of the slowest peer.
"""

DEPTH = 4
"""Maximum number of collectives in progress."""


class Task:
    """The progress of one collective's program on one link.

    ``after`` is the previous collective on the same buffer, whose finished chunks this one may
    send; None: all chunks may be sent.
    """

    def __init__(self, program: Program, after: Task | None = None) -> None:
        self.program = program
        self.after = after
        self.taken = 0
        self.unsent = len(program.first) + sum(map(len, program.unlocks))
        self.held: deque[tuple[int, Transfer]] = deque()

    @property
    def complete(self) -> bool:
        """Whether all chunks have been received, so that the result can be read."""
        return self.taken == len(self.program.receives)

    def hold(self) -> None:
        """Queue the first sends, each after the chunk of ``after`` that it needs.

        An all-gather can thus begin with the first chunk that the reduce-scatter has finished.
        """
        receives = self.after.program.receives if self.after is not None else ()
        self.held.extend((last_overlap(receives, t.span), t) for t in self.program.first)

    def may_send(self) -> bool:
        """Whether ``after`` has finished the next chunk in the queue."""
        if not self.held:
            return False
        return self.after is None or self.held[0][0] < self.after.taken


T = TypeVar("T", bound=Task)


@dataclass(slots=True)
class Begin(Generic[T]):
    """Begin ``task``."""

    task: T


@dataclass(slots=True)
class PostReceive(Generic[T]):
    """Post a receive of a chunk of ``task``."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class AwaitChunk(Generic[T]):
    """Wait for the oldest posted chunk of ``task``, and add or store it."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class SendChunk(Generic[T]):
    """Send a chunk of ``task`` to the link."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class Complete(Generic[T]):
    """The result of ``task`` can be read; parts of it may still be in transmission."""

    task: T


@dataclass(slots=True)
class AwaitSends(Generic[T]):
    """Wait until all chunks of ``task`` are sent; then it is done."""

    task: T


@dataclass(slots=True)
class Idle:
    """Wait until a task is submitted."""


TaskCommand = Begin[T] | PostReceive[T] | AwaitChunk[T] | SendChunk[T] | Complete[T] | AwaitSends[T]
Command = TaskCommand[T] | Idle


class Machine(Generic[T]):
    """Schedules tasks first in, first out.

    Any thread may call `submit`; only the driver may call the other methods. At most ``depth``
    tasks are in progress, each with ``ahead`` posted receives.
    """

    def __init__(self, ahead: int = RECEIVES_AHEAD, depth: int = DEPTH) -> None:
        self._ahead = ahead
        self._depth = depth
        self._queue: deque[T] = deque()
        self._active: deque[T] = deque()
        self._draining: deque[T] = deque()

    def submit(self, task: T) -> None:
        """Queue ``task``."""
        self._queue.append(task)

    @property
    def waiting(self) -> bool:
        """Whether a task has not begun."""
        return bool(self._queue)

    def begun(self) -> list[T]:
        """Return the tasks in progress, oldest first."""
        return [*self._draining, *self._active]

    def drop_waiting(self) -> list[T]:
        """Remove and return the tasks that have not begun."""
        dropped = list(self._queue)
        self._queue.clear()
        return dropped

    def commands(self) -> Iterator[Command[T]]:
        """Yield commands indefinitely; the driver performs each before it requests the next."""
        while True:
            if self._may_begin():
                yield from self._begin()
            elif self._active:
                yield from self._process_first()
            else:
                yield Idle()

    def _may_begin(self) -> bool:
        """Whether a task is queued, and those in progress have sent their last chunk to links."""
        active = self._active
        return bool(self._queue) and (
            not active or (not active[-1].unsent and len(active) < self._depth)
        )

    def _begin(self) -> Iterator[Command[T]]:
        task = self._queue.popleft()
        self._active.append(task)
        yield Begin(task)
        for transfer in task.program.receives[: self._ahead]:
            yield PostReceive(task, transfer)
        task.hold()
        yield from self._release(task)

    def _process_first(self) -> Iterator[Command[T]]:
        """Process the first task's chunks until it is complete, or the next task may begin.

        No reference to a task is kept after that.
        """
        task, ahead = self._active[0], self._ahead
        receives, unlocks = task.program.receives, task.program.unlocks
        for index in range(task.taken, len(receives)):
            if self._may_begin():
                return
            yield AwaitChunk(task, receives[index])
            task.taken = index + 1
            if index + ahead < len(receives):
                yield PostReceive(task, receives[index + ahead])
            for transfer in unlocks[index]:
                yield SendChunk(task, transfer)
                task.unsent -= 1
            if len(self._active) > 1:
                for later in [each for each in self._active if each.after is task]:
                    yield from self._release(later)
        yield Complete(self._active.popleft())
        self._draining.append(task)
        # Its last chunks may queue behind the next task's, which proceeds first.
        while len(self._draining) > (1 if self._active else 0):
            yield AwaitSends(self._draining[0])
            self._draining.popleft()

    def _release(self, task: T) -> Iterator[Command[T]]:
        """Send the first chunks that the previous task has finished."""
        while task.may_send():
            yield SendChunk(task, task.held.popleft()[1])
            task.unsent -= 1
