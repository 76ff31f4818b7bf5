"""Compiles rounds of hops into one linear program for one executor thread. Pure functions.

Hops are cut into chunks, and a chunk may be sent as soon as the chunk it depends on has arrived, so
that rounds overlap.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from wingbeat.topologies import Topology
from wingbeat.types import Hop, Round, Send, Span, blocks_of, split

MIN_CHUNK_BYTES = 128 << 10
MAX_CHUNK_BYTES = 1024 << 10
CHUNKS_PER_BLOCK = 4

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


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk to or from ``peer`` over link number ``link``, with one ``tag`` on both sides."""

    peer: int
    span: Span
    tag: int
    reduce: bool = False
    link: int = 0


@dataclass(frozen=True)
class Program:
    """One worker's part of a collective, on one or several links.

    ``first`` can be sent immediately, and ``unlocks[i]`` after ``receives[i]`` has been applied.
    """

    first: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    unlocks: tuple[tuple[Transfer, ...], ...]

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


def chunk_elements(block_elements: int, itemsize: float, least: int = MIN_CHUNK_BYTES) -> int:
    """Choose the number of elements in one message, given a block's size.

    Several chunks of a block should be in flight, and a message should take longer on the link than
    its CPU time (about 100 microseconds on both sides). ``itemsize`` is the number of bytes of an
    element on the link; 0 does not divide blocks. ``least`` is the result of `least_message`.
    """
    if itemsize <= 0:
        return max(1, block_elements)
    wanted = int(block_elements * itemsize) // CHUNKS_PER_BLOCK
    size = min(max(wanted, least), max(least, MAX_CHUNK_BYTES))
    return max(1, int(size / itemsize))


def compile_rounds(rounds: Iterable[Round], chunk: int) -> Program:
    """Cut the rounds' hops into chunks of ``chunk`` elements and order them by dependency."""
    # Chunks are numbered per link, peer and direction; both ends cut the same spans in one order.
    numbers: Counter[tuple[type[Hop], int, int]] = Counter()
    first: list[Transfer] = []
    receives: list[Transfer] = []
    unlocks: list[list[Transfer]] = []
    for hops in rounds:
        known = len(receives)
        for hop, span in _chunks(hops, chunk):
            direction = type(hop), hop.interface, hop.peer
            tag = numbers[direction]
            numbers[direction] += 1
            if isinstance(hop, Send):
                transfer = Transfer(hop.peer, span, tag, link=hop.interface)
                last = last_overlap(receives[:known], span)
                (first if last < 0 else unlocks[last]).append(transfer)
            else:
                receives.append(Transfer(hop.peer, span, tag, hop.reduce, hop.interface))
                unlocks.append([])
    return Program(tuple(first), tuple(receives), tuple(map(tuple, unlocks)))


def _chunks(hops: Round, chunk: int) -> Iterator[tuple[Hop, Span]]:
    """Cut a round's hops into chunks, which alternate as on the links."""
    cut = [[(hop, span) for span in hop.span.cut(chunk)] for hop in hops]
    for turn in itertools.zip_longest(*cut):
        yield from (each for each in turn if each is not None)


def last_overlap(receives: Sequence[Transfer], span: Span) -> int:
    """Return the index of the last receive that writes into ``span``, or -1."""
    for index in range(len(receives) - 1, -1, -1):
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
) -> tuple[Program, ...]:
    """Return one worker's program for each link of a collective on ``numel`` elements.

    ``what`` is the operation, of a broadcast with its root (``"broadcast:0"``). ``itemsize`` is the
    bytes of an element on the links; 0 does not divide blocks. Each link carries a part of each
    block in proportion to its speed, in messages of at least ``least`` bytes. ``blocks`` has the
    block of each worker; None: nearly equal blocks.
    """
    blocks = blocks or tuple(blocks_of(numel, size))
    stripes = [split(block, speeds) for block in blocks]
    chunk = chunk_elements(max(map(len, blocks)), itemsize, least)
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
