"""Buffers (such as BatchNorm's running statistics) follow one worker's, as DDP's do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from wingbeat.collectives import Collectives, Handle
    from wingbeat.transport.world import World

_ALIGN = 16


class ByteBuffer:
    """Tensors of any dtype laid end to end as bytes, to travel in one message."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        device = tensors[0].device if tensors else torch.device("cpu")
        self.flat = torch.zeros(end, dtype=torch.uint8, device=device)
        self._views = [
            self.flat[a : a + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for a, t in zip(offsets, tensors, strict=True)
        ]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these have the dtypes and shapes that were laid out."""
        return [(t.dtype, t.shape) for t in tensors] == [(v.dtype, v.shape) for v in self._views]

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors into the bytes."""
        for tensor, view in zip(tensors, self._views, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[torch.Tensor], where: ByteBuffer | None = None) -> None:
        """Copy the bytes into the tensors; with ``where`` only into those that are as in it."""
        unchanged = [True] * len(tensors) if where is None else where.equal(tensors)
        for tensor, view, as_before in zip(tensors, self._views, unchanged, strict=True):
            if as_before:
                # Not as a change that autograd sees: batch norm keeps its buffers for backward and
                # does not use them in it, so there may be a second forward before that.
                tensor.data.copy_(view)

    def equal(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """For each of the tensors, whether it is what was packed, bit for bit."""
        if not self.fits(tensors):
            return [False] * len(tensors)
        return [
            torch.equal(_bits(tensor), _bits(view))
            for tensor, view in zip(tensors, self._views, strict=True)
        ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: NaN equals itself, and zero is not minus zero."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def broadcast_now(
    tensors: Sequence[torch.Tensor], collectives: Collectives, root: int, limit: int = 32 << 20
) -> None:
    """Overwrite ``tensors`` with those of rank ``root``, at most ``limit`` bytes at a time."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for tensor in [*tensors, None]:
        if batch and (tensor is None or nbytes >= limit or tensor.device != batch[0].device):
            packed = ByteBuffer(batch)
            packed.pack(batch)
            collectives.broadcast(packed.flat, root, label="tensors").wait()
            packed.unpack(batch)
            batch, nbytes = [], 0
        if tensor is not None:
            batch.append(tensor)
            nbytes += tensor.numel() * tensor.element_size()


class BufferSync:
    """Keeps a model's buffers those of one worker, the root, as DDP's forward does.

    The root's buffers travel in the background, behind the gradients. As they may be written to
    between that and the next forward, a forward that is to be synchronised begins with one byte
    from the root: whether what it holds now is what it sent. If not, it sends its buffers again.

    Args:
        model: whose buffers; looked up anew each time, as a name may be given another tensor.
        ignored: names of buffers that each worker keeps for itself.
        collectives: what gradients travel by.
        lockstep: whether workers wait for each other in each iteration; if not, each keeps its own
            buffers, until `level`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ignored: Collection[str],
        collectives: Collectives,
        *,
        lockstep: bool = True,
    ) -> None:
        self._places = list(_places(model, ignored))
        self._collectives = collectives
        self._rank = collectives.world.rank
        self._own: Collectives | None = None
        self._sent: ByteBuffer | None = None
        self._before: ByteBuffer | None = None
        self._news = torch.zeros(1, dtype=torch.uint8)
        self._handle: Handle | None = None
        self._asked: Handle | None = None
        self._root = 0
        if self._places and lockstep and collectives.world.size > 1:
            # The byte must not queue behind gradients.
            self._own = type(collectives)(collectives.world.open_channel(), "mesh")

    @property
    def channel(self) -> World | None:
        """The channel of its own, to be closed in the end."""
        return None if self._own is None else self._own.world

    def owns(self, module: torch.nn.Module) -> bool:
        """Whether the module itself has buffers that are synchronised."""
        return any(module._buffers is place for place, _ in self._places)

    def start(self, root: int = 0) -> None:
        """Send rank ``root``'s buffers to everyone, in the background."""
        if self._own is None:
            return
        self.apply()
        self._sent = self._packed(root)
        if self._rank != root:
            self._before = ByteBuffer(self.tensors())
            self._before.pack(self.tensors())
        self._root = root
        label = "buffers after backward"
        self._handle = self._collectives.broadcast(self._sent.flat, root, label=label)

    def ask(self, root: int) -> None:
        """Hear from ``root`` whether its buffers are others by now; every worker must call it."""
        if self._own is None:
            return
        self.apply()
        self._root = root
        if self._rank == root:
            sent = self._sent
            now = self.tensors()
            self._news[0] = sent is None or not (sent.fits(now) and all(sent.equal(now)))
        self._asked = self._own.broadcast(self._news, root, label="news of buffers")

    def apply(self) -> None:
        """Wait for what is under way, if anything, and take it over."""
        handle, self._handle = self._handle, None
        if handle is not None and self._sent is not None:
            handle.wait()
            # What somebody has written since, given another shape or removed (as `prune.remove`
            # does with masks), is this worker's until the next forward.
            now = self.tensors()
            if self._rank != self._root and self._before is not None and self._sent.fits(now):
                self._sent.unpack(now, self._before)
        asked, self._asked = self._asked, None
        if asked is None or self._own is None:
            return
        asked.wait()
        if self._news[0]:
            self._sent = self._packed(self._root)
            self._own.broadcast(self._sent.flat, self._root, label="buffers").wait()
        if self._rank != self._root and self._sent is not None:
            self._sent.unpack(self.tensors())

    def level(self) -> None:
        """Take over rank 0's now; every worker must call it."""
        with torch.no_grad():
            broadcast_now(self.tensors(), self._collectives, root=0)

    def _packed(self, root: int) -> ByteBuffer:
        """Lay out today's buffers, with the values of this worker if it is the root."""
        tensors = self.tensors()
        if self._sent is None or not self._sent.fits(tensors):
            self._sent = ByteBuffer(tensors)
        if self._rank == root:
            self._sent.pack(tensors)
        return self._sent

    def tensors(self) -> list[torch.Tensor]:
        """Return today's buffers, as a name may have been given another one."""
        found = (place.get(name) for place, name in self._places)
        return [tensor for tensor in found if tensor is not None]


def _places(
    model: torch.nn.Module, ignored: Collection[str]
) -> Iterator[tuple[dict[str, torch.Tensor | None], str]]:
    """Yield where each buffer is kept, once, and under what name."""
    seen: set[torch.Tensor] = set()
    for prefix, module in model.named_modules():
        for name, tensor in module._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if tensor is not None and tensor not in seen and full not in ignored:
                seen.add(tensor)
                yield module._buffers, name
