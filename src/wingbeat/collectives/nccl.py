"""Collectives in NCCL or another process group, with the same handles: dense, cast and encoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.codecs.lowrank import Factors
from wingbeat.collectives.encoded import named_malformed, payload_rows
from wingbeat.collectives.handle import NcclJob
from wingbeat.collectives.packing import Cast, Encoded
from wingbeat.errors import PeerError
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.transport.nccl import NcclGroup


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class CastCopy:
    """A copy of a buffer in a narrower dtype, in which the process group also computes sums.

    Casts run on the current stream, after which the process group orders its own stream.
    """

    def __init__(self, what: str, buffer: torch.Tensor, cast: Cast) -> None:
        own, whole = slice(cast.own.start, cast.own.stop), slice(None)
        sent = own if what == "all_gather" else whole
        self._result = own if what == "reduce_scatter" else whole
        self._buffer = buffer
        self.carried = torch.empty_like(buffer, dtype=cast.dtype)
        self.carried[sent].copy_(buffer[sent])

    def write_back(self) -> None:
        """Copy the result into the buffer. The current stream must be ordered after the work."""
        if self.carried.is_cuda:
            # The allocator must not reuse the memory before the copy is done.
            self.carried.record_stream(torch.cuda.current_stream(self.carried.device))
        self._buffer[self._result].copy_(self.carried[self._result])


def start(
    world: World,
    what: str,
    buffer: torch.Tensor,
    after: NcclJob | None = None,
    cast: Cast | None = None,
    blocks: tuple[Span, ...] | None = None,
) -> NcclJob:
    """Start ``what`` in place on ``buffer``, whose length is a multiple of the world's size.

    With unequal ``blocks``, a reduce-scatter becomes an all-reduce, with twice the bytes, and an
    all-gather becomes a broadcast of each block.

    With a ``cast``, the buffer receives the result at the first wait, or when another collective is
    started ``after`` this one.
    """
    name, _, root = what.partition(":")
    group = world.nccl
    if after is not None:
        after.write_back()
    if name == "broadcast":
        return NcclJob(group.broadcast(buffer, int(root)), name, world.rank)
    copy = None if cast is None else CastCopy(name, buffer, cast)
    carried = buffer if copy is None else copy.carried
    work: Any
    if blocks is not None and name == "all_gather":
        parts = [(root, carried[b.start : b.stop]) for root, b in enumerate(blocks) if b]
        work = _Works([group.broadcast(part, root) for root, part in parts])
    elif blocks is not None and name == "reduce_scatter":
        work = group.all_reduce(carried)
    else:
        work = getattr(group, name)(carried)
    return NcclJob(work, name, world.rank, None if copy is None else copy.write_back)


@dataclass(frozen=True)
class GroupRows:
    """Exchanges rows of a uint8 tensor, one for each worker, in a process group.

    ``where`` names the operation in error messages. ``between`` is called while each collective is
    in progress.
    """

    group: NcclGroup
    where: str
    between: Callable[[], None] = lambda: None

    def all_to_all(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        """Send row r of ``rows`` to rank r, and receive its row in row r of ``into``."""
        start = self.group.all_to_all
        self._do("all-to-all", lambda: start(into.view(-1), rows.view(-1)))

    def all_gather(self, rows: torch.Tensor) -> None:
        """Send this worker's row to all workers; row r becomes that of rank r."""
        self._do("all-gather", lambda: self.group.all_gather(rows.view(-1)))

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sum a float buffer of all workers, in place."""
        self._do("all-reduce", lambda: self.group.all_reduce(buffer))

    def _do(self, what: str, start: Callable[[], Any]) -> None:
        with self._naming(what):
            work = start()
        self.between()  # outside of `_naming`: not a failure of a peer
        with self._naming(what):
            work.wait()

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as err:
            raise PeerError(
                f"rank {self.group.rank}: the {what} of {self.where} among {self.group.size} "
                f"workers failed: {first_line(err)}; find the worker that died or stopped first"
            ) from err


@dataclass(eq=False)
class BlockSum:
    """One encoded sum by blocks, in place on a flat float buffer.

    ``blocks`` has one block for each rank and covers the buffer. ``where`` names the operation in
    error messages.
    """

    buffer: torch.Tensor
    wire: Encoded
    blocks: Sequence[Span]
    rank: int
    where: str

    def __post_init__(self) -> None:
        self._sizes = [self.wire.size_of(block) for block in self.blocks]
        self._rows = payload_rows(len(self.blocks), max(self._sizes), self.buffer.device)

    def encode(self) -> None:
        """Encode the other workers' blocks, without communication."""
        coding = self.wire.coding
        for rank in self._others():
            coding.encode(self.buffer, self.blocks[rank], self._payload(rank), self.wire.residual)

    def exchange(self, rows: GroupRows) -> None:
        """Replace the buffer, which `encode` has encoded, by the sum; a `PeerError` as `reduce`."""
        self.reduce(rows)
        self.spread(rows)

    def reduce(self, rows: GroupRows) -> None:
        """Send the other workers their blocks, and add received payloads in the order of ranks.

        A `PeerError` if a peer failed, timed out, or sent a malformed payload.
        """
        into = torch.empty_like(self._rows)
        rows.all_to_all(into, self._rows)
        for rank in self._others():
            payload = into[rank, : self._sizes[self.rank]]
            with named_malformed(self.rank, rank, self.where):
                self.wire.coding.decode(payload, self.buffer, self.blocks[self.rank], add=True)

    def spread(self, rows: GroupRows) -> None:
        """Send the own block to all workers; every worker decodes it from the same payload.

        A `PeerError` as in `reduce`.
        """
        own, payload = self.blocks[self.rank], self._payload(self.rank)
        self.wire.coding.encode(self.buffer, own, payload, self.wire.residual)
        self.wire.coding.decode(payload, self.buffer, own)
        rows.all_gather(self._rows)
        for rank in self._others():
            with named_malformed(self.rank, rank, self.where):
                self.wire.coding.decode(self._payload(rank), self.buffer, self.blocks[rank])

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(len(self.blocks)) if rank != self.rank)

    def _payload(self, rank: int) -> torch.Tensor:
        return self._rows[rank, : self._sizes[rank]]


class _EventWork:
    """A process group's work object; waiting orders the current stream after ``event``."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


def start_encoded(world: World, what: str, buffer: torch.Tensor, wire: Encoded) -> NcclJob:
    """Start ``what`` on ``buffer``, whose length is a multiple of the world's size.

    On a CPU this blocks until the result is available.
    """
    return _start(world, what, buffer, lambda: _run_encoded(world, what, buffer, wire))


def start_factored(world: World, buffer: torch.Tensor, factors: Factors, where: str) -> NcclJob:
    """Start an all-reduce of ``buffer`` as factors; see `Collectives.all_reduce_factors`."""
    return _start(world, "all_reduce", buffer, lambda: _run_factored(world, buffer, factors, where))


def _start(world: World, what: str, buffer: torch.Tensor, run: Callable[[], None]) -> NcclJob:
    if not buffer.is_cuda:
        run()
        return NcclJob(_EventWork(None), what, world.rank)
    side = _side_stream(world, buffer.device)
    side.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(side):
        run()
        done = side.record_event()
    return NcclJob(_EventWork(done), what, world.rank)


def _run_factored(world: World, buffer: torch.Tensor, factors: Factors, where: str) -> None:
    rows = GroupRows(world.nccl, where)
    made = factors.begin(buffer)
    rows.all_reduce(made.first)
    made.compute_second()
    replace(rows, between=made.keep_residual).all_reduce(made.second)
    made.write_result()


def _run_encoded(world: World, what: str, buffer: torch.Tensor, wire: Encoded) -> None:
    where = what.replace("_", "-")
    rows = GroupRows(world.nccl, where)
    blocks = blocks_of(buffer.numel(), world.size)
    encoded = BlockSum(buffer, wire, blocks, world.rank, where)
    if what in ("reduce_scatter", "all_reduce"):
        encoded.encode()
        encoded.reduce(rows)
    if what in ("all_gather", "all_reduce"):
        encoded.spread(rows)


_side_streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}


def _side_stream(world: World, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all of a world's exchanges, which preserves the order of calls."""
    key = (id(world), device)
    if key not in _side_streams:
        _side_streams[key] = torch.cuda.Stream(device)
        world.on_close(lambda: _side_streams.__delitem__(key))
    return _side_streams[key]
