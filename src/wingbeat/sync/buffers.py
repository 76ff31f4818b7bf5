"""Buffers (such as BatchNorm's running statistics) follow one worker's, as DDP's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from wingbeat.collectives import Collectives, Handle

_ALIGN = 16


class ByteBuffer:
    """Tensors of any dtype laid end to end as bytes, to travel in one message."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        offsets, end = [], 0
        for tensor in self._tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self.flat = torch.zeros(end, dtype=torch.uint8, device=device)
        self._views = [
            self.flat[a : a + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for a, t in zip(offsets, self._tensors, strict=True)
        ]

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the tensors into the bytes."""
        for tensor, view in zip(self._tensors, self._views, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the bytes into the tensors."""
        for tensor, view in zip(self._tensors, self._views, strict=True):
            tensor.copy_(view)


def broadcast_now(
    tensors: Sequence[torch.Tensor], collectives: Collectives, root: int, limit: int = 32 << 20
) -> None:
    """Overwrite ``tensors`` with those of rank ``root``, at most ``limit`` bytes at a time."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for tensor in [*tensors, None]:
        if batch and (tensor is None or nbytes >= limit or tensor.device != batch[0].device):
            packed = ByteBuffer(batch)
            packed.pack()
            collectives.broadcast(packed.flat, root).wait()
            packed.unpack()
            batch, nbytes = [], 0
        if tensor is not None:
            batch.append(tensor)
            nbytes += tensor.numel() * tensor.element_size()


class BufferSync:
    """Broadcasts a model's buffers behind the gradients; applied before the next forward."""

    def __init__(self, buffers: Sequence[torch.Tensor], collectives: Collectives) -> None:
        self._collectives = collectives
        self._rank = collectives.world.rank
        self._bytes = ByteBuffer(buffers) if buffers else None
        self._handle: Handle | None = None
        self._root = 0

    def start(self, root: int = 0) -> None:
        """Send rank ``root``'s buffers to everyone, in the background."""
        if self._bytes is None:
            return
        self.apply()
        if self._rank == root:
            self._bytes.pack()
        self._root = root
        self._handle = self._collectives.broadcast(self._bytes.flat, root)

    def apply(self) -> None:
        """Wait for the broadcast under way, if any, and take over what it brought."""
        if self._handle is None or self._bytes is None:
            return
        handle, self._handle = self._handle, None
        handle.wait()
        if self._rank != self._root:
            self._bytes.unpack()
