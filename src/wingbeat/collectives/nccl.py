"""Collectives that NCCL, or another process group, runs as a whole, behind the same handles.

Encoded sums run codec kernels between exchanges of bytes. On a GPU everything is queued on a side
stream, so neither the host nor backward waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.collectives.encoded import BlockSum, GroupRows
from wingbeat.collectives.packing import CodecPacking
from wingbeat.collectives.threads import run_callback
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.codecs.lowrank import Factors
    from wingbeat.collectives.packing import CastPacking


class NcclJob:
    """A collective that the library runs, in the order of submission."""

    def __init__(self, work: Any, what: str, rank: int, copy: CastCopy | None = None) -> None:
        self._work = work
        self._what = what
        self._rank = rank
        self._copy = copy

    def wait(self) -> None:
        """Make subsequent work see the result. On a GPU this orders streams and does not block the
        host.

        Raises:
            PeerError: the library reported a failure.
        """
        try:
            self._work.wait()
        except RuntimeError as err:
            raise PeerError(
                f"rank {self._rank}: {self._what.replace('_', '-')} failed: {first_line(err)}; "
                "look for the worker that died or stopped first"
            ) from None
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.write_back()

    def done(self) -> bool:
        """Whether the library has finished."""
        return bool(self._work.is_completed())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, if the library has finished.

        Raises:
            UsageError: it has not finished: it cannot call back.
        """
        if not self.done():
            raise UsageError("a collective on a GPU cannot call back: use wait() or done()")
        run_callback(callback)

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()

    def write_back(self) -> None:
        """Wait if the buffer receives the result only in `wait`."""
        if self._copy is not None:
            self.wait()


class _Works:
    """Several operations, waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class CastCopy:
    """A copy of a buffer in a narrower dtype, for the library to work on.

    Casts run on the current stream, which the library orders its own after, so neither the host nor
    another stream waits for them. Sums are computed by the library in the narrower dtype.
    """

    def __init__(self, what: str, buffer: torch.Tensor, cast: CastPacking) -> None:
        own, whole = slice(cast.own.start, cast.own.stop), slice(None)
        sent = own if what == "all_gather" else whole
        self._result = own if what == "reduce_scatter" else whole
        self._buffer = buffer
        self.carried = torch.empty_like(buffer, dtype=cast.dtype)
        self.carried[sent].copy_(buffer[sent])

    def write_back(self) -> None:
        """Copy the result into the buffer, once the current stream is ordered after it."""
        if self.carried.is_cuda:
            # The allocator may reuse the memory when this object is deleted, but not before the
            # copy.
            self.carried.record_stream(torch.cuda.current_stream(self.carried.device))
        self._buffer[self._result].copy_(self.carried[self._result])


def start(
    world: World,
    what: str,
    buffer: torch.Tensor,
    after: NcclJob | None = None,
    cast: CastPacking | None = None,
    blocks: tuple[Span, ...] | None = None,
) -> NcclJob:
    """Start ``what`` in place on ``buffer``, whose length is a multiple of the world's size.

    The library's own reduce-scatter and all-gather have equal ``blocks``. For unequal ones
    everything is all-reduced, at twice the bytes of a reduce-scatter, and each block is broadcast
    by its owner.

    With a ``cast`` the buffer receives the result when the job is first waited for, or when another
    one is started ``after`` it.
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
    return NcclJob(work, name, world.rank, copy)


class _EventWork:
    """Replaces the library's handle: waiting orders the current stream after ``event``."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


def start_encoded(world: World, what: str, buffer: torch.Tensor, packing: CodecPacking) -> NcclJob:
    """Start ``what`` on ``buffer``, whose length is a multiple of the world's size.

    On a CPU, which has no streams, it is done when this returns.

    Raises:
        PeerError: the library reported a failure, or a peer sent a malformed payload.
    """
    return _start(world, what, buffer, lambda: _run_encoded(world, what, buffer, packing))


def start_factored(world: World, buffer: torch.Tensor, factors: Factors, where: str) -> NcclJob:
    """Start an all-reduce of ``buffer`` as factors; see `Collectives.all_reduce_factors`.

    Raises:
        PeerError: the library reported a failure.
    """
    return _start(world, "all_reduce", buffer, lambda: _run_factored(world, buffer, factors, where))


def _start(world: World, what: str, buffer: torch.Tensor, run: Callable[[], None]) -> NcclJob:
    """Call ``run``, on the world's side stream if ``buffer`` is on a GPU."""
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
    made.turn()
    replace(rows, between=made.keep).all_reduce(made.second)
    made.end()


def _run_encoded(world: World, what: str, buffer: torch.Tensor, packing: CodecPacking) -> None:
    where = what.replace("_", "-")
    rows = GroupRows(world.nccl, where)
    blocks = blocks_of(buffer.numel(), world.size)
    encoded = BlockSum(buffer, packing, blocks, world.rank, where)
    if what in ("reduce_scatter", "all_reduce"):
        encoded.encode()
        encoded.reduce(rows)
    if what in ("all_gather", "all_reduce"):
        encoded.spread(rows)


_side_streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}


def _side_stream(world: World, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all of a world's exchanges, which keeps the order of calls."""
    key = (id(world), device)
    if key not in _side_streams:
        _side_streams[key] = torch.cuda.Stream(device)
        world.on_close(lambda: _side_streams.__delitem__(key))
    return _side_streams[key]
