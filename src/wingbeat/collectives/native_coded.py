"""Encoded collectives over a native group: codecs' kernels between a library's exchanges of bytes.

On a GPU all of it is queued on a stream of its own, so that neither the host nor backward waits.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from wingbeat.collectives.native import NativeJob
from wingbeat.collectives.packing import Coded
from wingbeat.errors import PeerError
from wingbeat.transport.world import World
from wingbeat.types import Span, blocks_of

_ALIGNMENT = 16
"""Bytes. Every payload begins at a multiple, so that kernels may read it as they like."""


class _Event:
    """Stands for the library's own handle: waiting orders the current stream after ``event``."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


def start_coded(world: World, what: str, buffer: torch.Tensor, packing: Coded) -> NativeJob:
    """Start ``what`` on ``buffer``, whose length is a multiple of the world's size.

    On a CPU, where there are no streams, it is done when this returns.

    Raises:
        PeerError: the library reported a failure, or a peer sent no payload of this codec.
    """
    exchange = _Exchange(world, what, buffer, packing)
    if not buffer.is_cuda:
        exchange.run()
        return NativeJob(_Event(None), what, world.rank)
    side = _side_stream(world, buffer.device)
    side.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(side):
        exchange.run()
        done = side.record_event()
    return NativeJob(_Event(done), what, world.rank)


class _Exchange:
    """One encoded collective."""

    def __init__(self, world: World, what: str, buffer: torch.Tensor, packing: Coded) -> None:
        self._world = world
        self._what = what
        self._buffer = buffer
        self._coding = packing.coding
        self._residual = packing.residual
        self._own = packing.own
        self._blocks = blocks_of(buffer.numel(), world.size)
        self._rooms = [self._coding.room(block) for block in self._blocks]

    def run(self) -> None:
        if self._what in ("reduce_scatter", "all_reduce"):
            self._reduce_scatter()
        if self._what in ("all_gather", "all_reduce"):
            self._all_gather()

    def _reduce_scatter(self) -> None:
        """Send each worker its block; add what comes in for the own one, by rank."""
        me = self._world.rank
        rows = self._rows()
        for rank, block in enumerate(self._blocks):
            if rank != me:
                room = rows[rank, : self._rooms[rank]]
                self._coding.encode(self._buffer, block, room, self._residual)
        into = torch.empty_like(rows)
        with self._named():
            self._world.native.all_to_all(into.view(-1), rows.view(-1)).wait()
        for rank, row in enumerate(into):
            if rank != me:
                self._decode(rank, row[: self._rooms[me]], self._own, add=True)

    def _all_gather(self) -> None:
        """Send the own block to everyone; all, its owner too, take it from the same payload."""
        me = self._world.rank
        rows = self._rows()
        self._coding.encode(self._buffer, self._own, rows[me, : self._rooms[me]], self._residual)
        with self._named():
            self._world.native.all_gather(rows.view(-1)).wait()
        for rank, block in enumerate(self._blocks):
            self._decode(rank, rows[rank, : self._rooms[rank]], block, add=False)

    def _rows(self) -> torch.Tensor:
        width = -(-max(self._rooms) // _ALIGNMENT) * _ALIGNMENT
        shape = (self._world.size, width)
        return torch.zeros(shape, dtype=torch.uint8, device=self._buffer.device)

    def _decode(self, rank: int, payload: torch.Tensor, span: Span, *, add: bool) -> None:
        try:
            self._coding.decode(payload, self._buffer, span, add=add)
        except ValueError as err:
            raise PeerError(
                f"rank {self._world.rank}: rank {rank} sent a malformed payload: {err}"
            ) from None

    @contextlib.contextmanager
    def _named(self) -> Any:
        try:
            yield
        except RuntimeError as err:
            raise PeerError(
                f"rank {self._world.rank}: {self._what.replace('_', '-')} failed: {err}"
            ) from None


_streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}


def _side_stream(world: World, device: torch.device) -> torch.cuda.Stream:
    """One stream for all of a world's exchanges, so that they keep the order of their calls."""
    key = (id(world), device)
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
        world.on_close(lambda: _streams.__delitem__(key))
    return _streams[key]
