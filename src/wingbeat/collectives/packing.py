"""How chunks are packed for the links: in a narrower dtype or by a codec.

A cast rounds to the nearest value. Values that are too large become infinite and NaN stays NaN, so
that overflow checks such as ``torch.amp.GradScaler`` detect them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.lowrank import Factors
from wingbeat.errors import UsageError, unknown
from wingbeat.transport.text import first_line
from wingbeat.types import Span

CAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The narrower dtypes in which gradients can be sent."""


def wire_dtype(name: str) -> torch.dtype | None:
    """Return the dtype called ``name`` in `Choices.wire`; None (the buffer's dtype) if empty.

    Raises:
        UsageError: the dtype is not supported.
    """
    if not name:
        return None
    if name not in CAST_DTYPES:
        raise unknown("wire dtype", name, CAST_DTYPES)
    return CAST_DTYPES[name]


def narrower_dtype(wire: torch.dtype | None, buffer: torch.Tensor) -> torch.dtype | None:
    """Return ``wire`` if casting ``buffer`` to it saves bytes; else None.

    Raises:
        UsageError: ``wire`` is not one of `CAST_DTYPES`.
    """
    if wire is None:
        return None
    if wire not in CAST_DTYPES.values():
        allowed = ", ".join(CAST_DTYPES)
        raise UsageError(f"wire = {wire}: allowed are {allowed}, and None for the buffer's own")
    saves = buffer.is_floating_point() and wire.itemsize < buffer.element_size()
    return wire if saves else None


MAX_POOL_BYTES = 256 << 20
"""Unused memory kept in a pool: enough for five overlapping buckets of 100 MB at half the bytes."""


class ScratchPool:
    """A pool of flat CPU tensors for chunks. Not thread-safe.

    Sizes are rounded up to powers of two, so that chunks of similar sizes share memory.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self._free_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised flat tensor of ``numel`` elements."""
        capacity = 1 << max(0, numel - 1).bit_length()
        free = self._free[dtype, capacity]
        if not free:
            return torch.empty(capacity, dtype=dtype)[:numel]
        given = free.pop()
        whole = given._base
        assert whole is not None
        self._free_bytes -= whole.nbytes
        return given if given.numel() == numel else whole[:numel]

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor from `take`, which must no longer be used, to the pool."""
        whole = tensor._base
        assert whole is not None, "not from take()"
        if self._free_bytes + whole.nbytes <= MAX_POOL_BYTES:
            # Keep the view: the next request usually has the same length.
            self._free[whole.dtype, whole.numel()].append(tensor)
            self._free_bytes += whole.nbytes


class Packing(Protocol):
    """How one worker packs the chunks of one collective.

    A rank that sends the result of its own block also rounds it in place, so that the result is
    bitwise equal on all workers.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a packed chunk."""

    @property
    def own(self) -> Span:
        """The block of this rank."""

    @property
    def bytes_per_element(self) -> float:
        """Approximate bytes per element of the buffer; 0 if blocks should not be divided."""

    def room(self, span: Span) -> int:
        """Return the number of ``dtype`` elements in a packed ``span``."""

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Write ``buffer[span]`` into ``chunk``; round it in place if it is in the own block."""

    def unpack(
        self, chunk: torch.Tensor, buffer: torch.Tensor, span: Span, add: bool, scratch: ScratchPool
    ) -> None:
        """Write or add ``chunk`` into ``buffer[span]``; raises `ValueError` if it is malformed."""


@dataclass(frozen=True, slots=True)
class CastPacking:
    """Casts each chunk to the nearest values in ``dtype``; values that are too large are infinite.

    Forwarded chunks do not change, as their owner has already rounded them.
    """

    dtype: torch.dtype
    own: Span

    @property
    def bytes_per_element(self) -> float:
        """Size of the dtype."""
        return self.dtype.itemsize

    def room(self, span: Span) -> int:
        """Return the length of the span."""
        return len(span)

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """As `Packing.pack`."""
        part = buffer[span.start : span.stop]
        chunk.copy_(part)
        if self.own.overlaps(span):
            part.copy_(chunk)

    def unpack(
        self, chunk: torch.Tensor, buffer: torch.Tensor, span: Span, add: bool, scratch: ScratchPool
    ) -> None:
        """As `Packing.unpack`."""
        part = buffer[span.start : span.stop]
        if not add:
            part.copy_(chunk)
            return
        # Adding tensors of two dtypes is slower and allocates memory.
        widened = scratch.take(len(span), part.dtype)
        part.add_(widened.copy_(chunk))
        scratch.give(widened)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A wire format for `Collectives`: a coding, and a residual for error feedback.

    Attributes:
        coding: the codec of each region of the buffer.
        residual: float32, of the buffer's length; None: no error feedback.
    """

    coding: Coding
    residual: torch.Tensor | None = None


WireFormat = torch.dtype | Encoded | Factors
"""How a buffer's elements are sent, if not in their own dtype."""


@dataclass(frozen=True, slots=True)
class CodecPacking:
    """Encodes each chunk separately and keeps the encoding error in ``residual``.

    For other workers' blocks the residual is the error of this worker's contribution, for its own
    block the error of the sum. Both are this worker's part of the total error, so blocks may change
    owners. ``residual`` is float32, of the buffer's length; None disables error feedback.
    """

    coding: Coding
    residual: torch.Tensor | None
    own: Span

    @property
    def dtype(self) -> torch.dtype:
        """uint8."""
        return torch.uint8

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element of the codec."""
        return self.coding.bytes_per_element

    def room(self, span: Span) -> int:
        """Return the size of the payload."""
        return self.coding.room(span)

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """As `Packing.pack`."""
        self.coding.encode(buffer, span, chunk, self.residual)
        if self.own.overlaps(span):
            self.coding.decode(chunk, buffer, span)

    def unpack(
        self,
        chunk: torch.Tensor,
        buffer: torch.Tensor,
        span: Span,
        add: bool,
        scratch: ScratchPool,  # noqa: ARG002
    ) -> None:
        """As `Packing.unpack`."""
        self.coding.decode(chunk, buffer, span, add=add)


def malformed_text(err: ValueError) -> str:
    """Return the error text for a peer whose payload was rejected with ``err``."""
    return f"sent a malformed payload: {first_line(err)}; check that all ranks run the same version"
