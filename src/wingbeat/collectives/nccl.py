"""Collectives that a process group of torch.distributed, such as NCCL, runs as a whole."""

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


class NativeJob:
    """A collective that the library runs by itself, in the order of submission."""

    def __init__(self, work: Any, what: str, rank: int, narrowed: Narrowed | None = None) -> None:
        self._work = work
        self._what = what
        self._rank = rank
        self._narrowed = narrowed

    def wait(self) -> None:
        """Make what follows see the result; on a GPU this orders streams, not the host.

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
        narrowed, self._narrowed = self._narrowed, None
        if narrowed is not None:
            narrowed.land()

    def done(self) -> bool:
        """Whether the library has finished."""
        return bool(self._work.is_completed())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, if the library has finished.

        Raises:
            UsageError: it has not; it would tell on a thread of its own at best.
        """
        if not self.done():
            raise UsageError("a collective on a GPU cannot call back: wait() for it, or ask done()")
        run_callback(callback)

    def wait_received(self) -> None:
        """As `wait`: the library does not tell the two apart."""
        self.wait()

    def land(self) -> None:
        """Wait only if the buffer gets the result no sooner than that."""
        if self._narrowed is not None:
            self.wait()


class _Broadcasts:
    """One for each block of a buffer, waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Narrowed:
    """A copy of a buffer in the wire's dtype, for the library to work on.

    Casts are made on the current stream, which the library orders its own after; so neither the
    host nor any other stream waits for them. Sums are the library's and in the wire's dtype.
    """

    def __init__(self, what: str, buffer: torch.Tensor, cast: CastPacking) -> None:
        own, whole = slice(cast.own.start, cast.own.stop), slice(None)
        sent = own if what == "all_gather" else whole
        self._landed = own if what == "reduce_scatter" else whole
        self._buffer = buffer
        self.carried = torch.empty_like(buffer, dtype=cast.dtype)
        self.carried[sent].copy_(buffer[sent])

    def land(self) -> None:
        """Copy the result into the buffer, once the current stream is ordered after it."""
        if self.carried.is_cuda:
            # The memory may be given away when this object goes, but not before the copy.
            self.carried.record_stream(torch.cuda.current_stream(self.carried.device))
        self._buffer[self._landed].copy_(self.carried[self._landed])


def start(
    world: World,
    what: str,
    buffer: torch.Tensor,
    after: NativeJob | None = None,
    cast: CastPacking | None = None,
    blocks: tuple[Span, ...] | None = None,
) -> NativeJob:
    """Start ``what`` in place on ``buffer``, whose length is a multiple of the world's size.

    The library's own halves of an all-reduce have equal ``blocks``. For others all is summed
    everywhere, at twice the bytes of a reduce-scatter, and each block is broadcast by its owner.

    With a ``cast`` the buffer gets the result when the job is first waited for, or when another
    one is started ``after`` it.
    """
    name, _, root = what.partition(":")
    group = world.native
    if after is not None:
        after.land()
    if name == "broadcast":
        return NativeJob(group.broadcast(buffer, int(root)), name, world.rank)
    narrowed = None if cast is None else Narrowed(name, buffer, cast)
    carried = buffer if narrowed is None else narrowed.carried
    work: Any
    if blocks is not None and name == "all_gather":
        parts = [(root, carried[b.start : b.stop]) for root, b in enumerate(blocks) if b]
        work = _Broadcasts([group.broadcast(part, root) for root, part in parts])
    elif blocks is not None and name == "reduce_scatter":
        work = group.all_reduce(carried)
    else:
        work = getattr(group, name)(carried)
    return NativeJob(work, name, world.rank, narrowed)


class _Event:
    """Stands for the library's own handle: waiting orders the current stream after ``event``."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


def start_encoded(
    world: World, what: str, buffer: torch.Tensor, packing: CodecPacking
) -> NativeJob:
    """Start ``what`` on ``buffer``, whose length is a multiple of the world's size.

    On a CPU, where there are no streams, it is done when this returns.

    Raises:
        PeerError: the library reported a failure, or a peer sent a malformed payload.
    """
    if not buffer.is_cuda:
        _run(world, what, buffer, packing)
        return NativeJob(_Event(None), what, world.rank)
    side = _side_stream(world, buffer.device)
    side.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(side):
        _run(world, what, buffer, packing)
        done = side.record_event()
    return NativeJob(_Event(done), what, world.rank)


def start_factored(world: World, buffer: torch.Tensor, factors: Factors, where: str) -> NativeJob:
    """Start an all-reduce of ``buffer`` as factors; see `Collectives.all_reduce_factors`.

    Raises:
        PeerError: the library reported a failure.
    """
    if not buffer.is_cuda:
        _run_factored(world, buffer, factors, where)
        return NativeJob(_Event(None), "all_reduce", world.rank)
    side = _side_stream(world, buffer.device)
    side.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(side):
        _run_factored(world, buffer, factors, where)
        done = side.record_event()
    return NativeJob(_Event(done), "all_reduce", world.rank)


def _run_factored(world: World, buffer: torch.Tensor, factors: Factors, where: str) -> None:
    rows = GroupRows(world.native, where)
    made = factors.begin(buffer)
    rows.all_reduce(made.first)
    made.turn()
    replace(rows, between=made.keep).all_reduce(made.second)
    made.end()


def _run(world: World, what: str, buffer: torch.Tensor, packing: CodecPacking) -> None:
    where = what.replace("_", "-")
    rows = GroupRows(world.native, where)
    blocks = blocks_of(buffer.numel(), world.size)
    encoded = BlockSum(buffer, packing, blocks, world.rank, where)
    if what in ("reduce_scatter", "all_reduce"):
        encoded.encode()
        encoded.reduce(rows)
    if what in ("all_gather", "all_reduce"):
        encoded.spread(rows)


_streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}


def _side_stream(world: World, device: torch.device) -> torch.cuda.Stream:
    """One stream for all of a world's exchanges, so that they keep the order of their calls."""
    key = (id(world), device)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
        world.on_close(lambda: _streams.__delitem__(key))
    return _streams[key]
