"""How chunks are packed for the links: in a narrower dtype or by a codec.

A cast rounds to the nearest value. Values that are too large become infinite and NaN stays NaN, so
that overflow checks such as ``torch.amp.GradScaler`` detect them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

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

    A `UsageError` if the dtype is not supported.
    """
    if not name:
        return None
    if name not in CAST_DTYPES:
        raise unknown("wire dtype", name, CAST_DTYPES)
    return CAST_DTYPES[name]


def narrower_dtype(wire: torch.dtype | None, buffer: torch.Tensor) -> torch.dtype | None:
    """Return ``wire`` if casting ``buffer`` to it saves bytes; else None.

    A `UsageError` if ``wire`` is not one of `CAST_DTYPES`.
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

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised flat tensor of ``numel`` elements."""
        capacity = 1 << max(0, numel - 1).bit_length()
        free = self._free[dtype, capacity]
        if not free:
            return torch.empty(capacity, dtype=dtype, device="cpu")[:numel]
        given = free.pop()
        whole = given._base
        assert whole is not None
        self._free_bytes -= whole.nbytes
        return given if given.numel() == numel else whole[:numel]

    def release(self, tensor: torch.Tensor) -> None:
        """Return a tensor from `acquire`, which must no longer be used, to the pool."""
        whole = tensor._base
        assert whole is not None, "not from acquire()"
        if self._free_bytes + whole.nbytes <= MAX_POOL_BYTES:
            # Keep the view: the next request usually has the same length.
            self._free[whole.dtype, whole.numel()].append(tensor)
            self._free_bytes += whole.nbytes


@dataclass(frozen=True, slots=True)
class Cast:
    """Sends each chunk as the nearest values in ``dtype``; too large ones become infinite.

    A rank that sends the result of its ``own`` block also rounds it in place, so that the result is
    bitwise equal on all workers. Forwarded chunks do not change: their owner has rounded them.
    """

    dtype: torch.dtype
    own: Span

    @property
    def bytes_per_element(self) -> float:
        """Size of the dtype."""
        return self.dtype.itemsize

    def size_of(self, span: Span) -> int:
        """Return the number of ``dtype`` elements in a packed ``span``."""
        return len(span)

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Write ``buffer[span]`` into ``chunk``; round it in place if it is in the own block."""
        part = buffer[span.start : span.stop]
        chunk.copy_(part)
        if self.own.overlaps(span):
            part.copy_(chunk)

    def unpack(
        self, chunk: torch.Tensor, buffer: torch.Tensor, span: Span, add: bool, scratch: ScratchPool
    ) -> None:
        """Write or add ``chunk`` into ``buffer[span]``."""
        part = buffer[span.start : span.stop]
        if not add:
            part.copy_(chunk)
            return
        # Adding tensors of two dtypes is slower and allocates memory.
        widened = scratch.acquire(len(span), part.dtype)
        part.add_(widened.copy_(chunk))
        scratch.release(widened)


_NO_BLOCK = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encodes each chunk separately and keeps the encoding error in ``residual``.

    For other workers' blocks the residual is the error of this worker's contribution, for its
    ``own`` block the error of the sum. Both are this worker's part of the total error, so blocks
    may change owners.

    Attributes:
        coding: the codec of each region of the buffer.
        residual: float32, of the buffer's length; None: no error feedback.
        own: the block of this rank, which `Collectives` sets.
    """

    coding: Coding
    residual: torch.Tensor | None = None
    own: Span = _NO_BLOCK

    @property
    def dtype(self) -> torch.dtype:
        """uint8, of payloads."""
        return torch.uint8

    @property
    def bytes_per_element(self) -> float:
        """Approximate; 0 if blocks should not be divided."""
        return self.coding.bytes_per_element

    def size_of(self, span: Span) -> int:
        """Return the bytes of the payload of ``span``."""
        return self.coding.room(span)

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Write ``buffer[span]`` into ``chunk``; round it in place if it is in the own block."""
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
        """Write or add ``chunk`` into ``buffer[span]``; a `ValueError` if it is malformed."""
        self.coding.decode(chunk, buffer, span, add=add)


Packing = Cast | Encoded
"""How one worker packs the chunks of one collective."""

WireFormat = torch.dtype | Encoded | Factors
"""How a buffer's elements are sent, if not in their own dtype."""


def encoded_of(wire: WireFormat | Packing | None) -> Encoded | None:
    """Return ``wire`` if a codec encodes each chunk; else None."""
    return wire if isinstance(wire, Encoded) else None


def factors_of(wire: WireFormat | None) -> Factors | None:
    """Return ``wire`` if low-rank factors are summed; else None."""
    return wire if isinstance(wire, Factors) else None


def dtype_of(wire: WireFormat | None) -> torch.dtype | None:
    """Return ``wire``, which must not be a codec's; None: the buffer's own dtype."""
    assert not isinstance(wire, Encoded | Factors), wire
    return wire


def malformed_text(err: ValueError) -> str:
    """Return the error text for a peer whose payload was rejected with ``err``."""
    return f"sent a malformed payload: {first_line(err)}; check that all ranks run the same version"
