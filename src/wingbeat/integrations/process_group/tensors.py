"""Tensors as flat buffers, and what reductions do to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from wingbeat.errors import UsageError
from wingbeat.types import Span


class Packed:
    """Tensors of one dtype as one flat buffer: the tensor itself where it is contiguous.

    ``reads``: the buffer begins with the tensors' values. ``copies``: it shares no memory with
    them. A `UsageError` if there are no tensors, or several dtypes.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], *, reads: bool, copies: bool = False
    ) -> None:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            listed = ", ".join(sorted(map(str, dtypes))) or "no tensors"
            raise UsageError(f"tensors of {listed}: allowed are tensors of one dtype in each call")
        self._tensors = tensors
        ends = list(itertools.accumulate(tensor.numel() for tensor in tensors))
        self.spans = tuple(Span(*ends) for ends in zip([0, *ends], ends, strict=False))
        self._in_place = len(tensors) == 1 and tensors[0].is_contiguous() and not copies
        if self._in_place:
            self.flat = writable(tensors[0]).view(-1)
        elif reads:
            self.flat = torch.cat([flatten(tensor) for tensor in tensors])
        else:
            self.flat = torch.empty(ends[-1], dtype=tensors[0].dtype, device="cpu")

    def part(self, index: int) -> torch.Tensor:
        """Return the part of the buffer that belongs to a tensor."""
        return self.flat[self.spans[index].start : self.spans[index].stop]

    def unpack(self) -> None:
        """Copy the buffer into the tensors."""
        if not self._in_place:
            for index, tensor in enumerate(self._tensors):
                writable(tensor).copy_(self.part(index).view(tensor.shape))


def unpack_all(each: Iterable[Packed]) -> None:
    """Copy each buffer into its tensors."""
    for packed in each:
        packed.unpack()


class Reduction:
    """What a reduction does to its buffer before and after the sum, or ``combine`` in its place.

    A `UsageError` for an unknown reduction.
    """

    def __init__(self, opts: Any) -> None:
        op = getattr(opts, "reduceOp", opts)
        self.kind = getattr(op, "op", op)
        self._factor = op.factor if self.kind == dist.ReduceOp.PREMUL_SUM else None
        self.combine = _COMBINE.get(self.kind)
        if self.combine is None and self.kind not in _SUMS:
            raise UsageError(f"{op}: allowed are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR")

    def prepare(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the buffer to reduce: ``flat``, or a view of it.

        A `UsageError` if the reduction is not defined for its dtype.
        """
        whole = not (flat.is_floating_point() or flat.is_complex())
        if self.kind in _BITWISE and not whole:
            raise UsageError(f"{self.kind} of {flat.dtype}: allowed are integers")
        if self.kind == dist.ReduceOp.AVG and whole:
            raise UsageError(f"{self.kind} of {flat.dtype}: use ReduceOp.SUM, then divide")
        if self._factor is not None:
            flat.mul_(self._factor)
        return flat.view(torch.uint8) if flat.dtype == torch.bool else flat

    def finish(self, buffer: torch.Tensor, size: int) -> None:
        """Turn the sum into the result."""
        if self.kind == dist.ReduceOp.AVG:
            buffer.div_(size)


_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
_BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_COMBINE = {
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    **_BITWISE,
}
"""Reductions other than sums, applied to the tensors of all ranks, which each rank receives."""


def tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors in nested lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order: a view, or a copy if they are not contiguous."""
    return writable(tensor).reshape(-1)


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its gradient function, as one that any thread may write to."""
    if not tensor.is_inference():
        return tensor.detach()
    plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return plain.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def describe(tensor: torch.Tensor) -> str:
    """Return a tensor's size and dtype for error messages."""
    return f"{tensor.numel()} elements of {tensor.dtype}"
