"""How chunks are packed for the links: in a narrower dtype or by a codec.

A cast rounds to the nearest value. What is too large becomes infinite and NaN stays NaN, so that
checks for overflow, such as ``torch.amp.GradScaler``, see it; it never becomes a finite number.
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
"""The dtypes that gradients may travel in, other than their own."""


def wire_dtype(name: str) -> torch.dtype | None:
    """Return the dtype called ``name`` in `Choices.wire`; None for the buffer's own (empty).

    Raises:
        UsageError: gradients cannot travel in a dtype of that name.
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
"""Unused memory that is kept. Five collectives overlap at most, so this is enough for buckets of
100 MB that travel in half the bytes.
"""


class ScratchPool:
    """A pool of flat CPU tensors for chunks; for one thread.

    Sizes are rounded up to powers of two, so that chunks of similar size share memory and
    allocation needs no search.
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
        """Return a tensor from `take` to the pool. Nothing may read or write it any more."""
        whole = tensor._base
        assert whole is not None, "not from take()"
        if self._free_bytes + whole.nbytes <= MAX_POOL_BYTES:
            # Keep the view: the next request mostly has the same length.
            self._free[whole.dtype, whole.numel()].append(tensor)
            self._free_bytes += whole.nbytes


class Packing(Protocol):
    """How one worker packs the chunks of one collective.

    A rank sends the result of its own block only, so it rounds it at that moment here as well, and
    all workers end with the same bits.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a packed chunk."""

    @property
    def own(self) -> Span:
        """The block that this rank owns."""

    @property
    def bytes_per_element(self) -> float:
        """Approximate bytes per element of the buffer; 0 if blocks are best left whole."""

    def room(self, span: Span) -> int:
        """Return the elements of ``dtype`` in a packed ``span``."""

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Write ``buffer[span]`` into ``chunk``; also round it in place if in the own block."""

    def unpack(
        self, chunk: torch.Tensor, buffer: torch.Tensor, span: Span, add: bool, scratch: ScratchPool
    ) -> None:
        """Write ``chunk`` into ``buffer[span]``, or add it.

        Raises:
            ValueError: the payload is malformed.
        """


@dataclass(frozen=True, slots=True)
class CastPacking:
    """Casts each chunk to ``dtype``: to the nearest value, infinite if that is too large.

    Chunks that a rank forwards were rounded by their owner and stay the same.
    """

    dtype: torch.dtype
    own: Span

    @property
    def bytes_per_element(self) -> float:
        """Bytes of the dtype."""
        return self.dtype.itemsize

    def room(self, span: Span) -> int:
        """Return the number of elements."""
        return len(span)

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Cast into ``chunk``."""
        part = buffer[span.start : span.stop]
        chunk.copy_(part)
        if self.own.overlaps(span):
            part.copy_(chunk)

    def unpack(
        self, chunk: torch.Tensor, buffer: torch.Tensor, span: Span, add: bool, scratch: ScratchPool
    ) -> None:
        """Cast back."""
        part = buffer[span.start : span.stop]
        if not add:
            part.copy_(chunk)
            return
        # Adding tensors of two dtypes is slower and allocates memory each time.
        widened = scratch.take(len(span), part.dtype)
        part.add_(widened.copy_(chunk))
        scratch.give(widened)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A wire format for `Collectives`: how regions travel, and where the error is kept.

    Attributes:
        coding: how each region of the buffer travels.
        residual: float32, as long as the buffer; None: no error feedback.
    """

    coding: Coding
    residual: torch.Tensor | None = None


WireFormat = torch.dtype | Encoded | Factors
"""What a buffer's elements travel as, if not as their own dtype."""


@dataclass(frozen=True, slots=True)
class CodecPacking:
    """Encodes each chunk by itself; the encoding error is kept in ``residual``.

    For the other workers' blocks the residual holds what their owners have not been sent, for the
    own block what no worker has been sent of the sum. Either way it is this worker's part of what
    the sum lacks, so blocks may change owners.

    Attributes:
        coding: how each region of the buffer travels.
        residual: float32, as long as the buffer; None: no error feedback.
        own: the block that this rank owns.
    """

    coding: Coding
    residual: torch.Tensor | None
    own: Span

    @property
    def dtype(self) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element of the codec."""
        return self.coding.bytes_per_element

    def room(self, span: Span) -> int:
        """Return the size of the payload."""
        return self.coding.room(span)

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Encode into ``chunk``."""
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
        """Decode into the buffer."""
        self.coding.decode(chunk, buffer, span, add=add)


def malformed_text(err: ValueError) -> str:
    """Return the error text for a peer whose payload was rejected with ``err``."""
    return f"sent a malformed payload: {first_line(err)}; check that all ranks run the same version"
