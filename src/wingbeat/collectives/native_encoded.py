"""Encoded sums over a native group: codecs' kernels between a library's exchanges of bytes.

On a GPU all of it is queued on a stream of its own, so that neither the host nor backward waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.collectives.encoded import BlockSum, GroupRows
from wingbeat.collectives.native import NativeJob
from wingbeat.collectives.packing import CodecPacking
from wingbeat.transport.world import World
from wingbeat.types import blocks_of

if TYPE_CHECKING:
    from wingbeat.codecs.factors import Factors


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
