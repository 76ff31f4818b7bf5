"""Collectives that run in NCCL or another process group, with the same handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.collectives.threads import run_callback
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.collectives.packing import CastPacking


class NcclJob:
    """A collective in the process group, which runs collectives in the order of submission."""

    def __init__(self, work: Any, what: str, rank: int, copy: CastCopy | None = None) -> None:
        self._work = work
        self._what = what
        self._rank = rank
        self._copy = copy

    def wait(self) -> None:
        """Wait for the result; on a GPU, make the current stream wait, without blocking the host.

        Raises:
            PeerError: the process group reported a failure.
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
        """Whether the collective has finished."""
        return bool(self._work.is_completed())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` if the collective is done; raise a `UsageError` otherwise."""
        if not self.done():
            raise UsageError("a collective on a GPU cannot call back: use wait() or done()")
        run_callback(callback)

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()

    def write_back(self) -> None:
        """Wait if the buffer receives the result in `wait` only."""
        if self._copy is not None:
            self.wait()


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

    def __init__(self, what: str, buffer: torch.Tensor, cast: CastPacking) -> None:
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
    cast: CastPacking | None = None,
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
    return NcclJob(work, name, world.rank, copy)
