"""How chunks are packed for the links: in a narrower dtype or by a codec."""

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

WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that gradients may travel in, other than their own."""


def wire_dtype(name: str) -> torch.dtype | None:
    """Return the dtype called ``name`` in `Choices.wire`; None for the buffer's own (empty).

    Raises:
        UsageError: gradients cannot travel in a dtype of that name.
    """
    if not name:
        return None
    if name not in WIRES:
        raise unknown("wire dtype", name, WIRES)
    return WIRES[name]


def narrower(wire: torch.dtype | None, buffer: torch.Tensor) -> torch.dtype | None:
    """Return ``wire`` where casting ``buffer`` to it saves bytes; None where nothing is cast.

    Raises:
        UsageError: ``wire`` is none of `WIRES`.
    """
    if wire is None:
        return None
    if wire not in WIRES.values():
        allowed = ", ".join(WIRES)
        raise UsageError(f"wire = {wire}: allowed are {allowed}, and None for the buffer's own")
    saves = buffer.is_floating_point() and wire.itemsize < buffer.element_size()
    return wire if saves else None


MAX_FREE_BYTES = 256 << 20
"""How much memory is kept for later while nobody uses it. Five collectives overlap at most, so
this is enough for buckets of 100 MB that travel in half the bytes."""


class Scratch:
    """Flat CPU tensors to take and give back; for one thread.

    Sizes are rounded up to powers of two, so that any two chunks of about one size share memory
    and taking costs no search.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self._free_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of ``numel`` elements with any content."""
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
        """Take back a tensor that `take` returned and that nobody reads or writes any more."""
        whole = tensor._base
        assert whole is not None, "not from take()"
        if self._free_bytes + whole.nbytes <= MAX_FREE_BYTES:
            # As it was given: what is taken next is mostly as long.
            self._free[whole.dtype, whole.numel()].append(tensor)
            self._free_bytes += whole.nbytes


class Packing(Protocol):
    """One worker's way to pack the chunks of one collective.

    A rank sends of its own block only the result. So that is the moment to round it here as
    well, and all workers end with the same bits.
    """

    @property
    def dtype(self) -> torch.dtype:
        """What a packed chunk consists of."""

    @property
    def own(self) -> Span:
        """The block that this rank owns."""

    @property
    def bytes_per_element(self) -> float:
        """About how many bytes an element of the buffer takes; 0 where chunks are best whole."""

    def room(self, span: Span) -> int:
        """Return how many elements of ``dtype`` a packed ``span`` takes."""

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Write ``buffer[span]`` into ``chunk``; if it is of the own block, round it as well."""

    def unpack(
        self, chunk: torch.Tensor, buffer: torch.Tensor, span: Span, add: bool, scratch: Scratch
    ) -> None:
        """Write ``chunk`` into ``buffer[span]``, or add it.

        Raises:
            ValueError: no other worker can have packed this.
        """


@dataclass(frozen=True, slots=True)
class CastPacking:
    """Each chunk is cast to ``dtype``: to the nearest value, infinite where that is too large.

    What a rank passes on for others was rounded by its owner and stays the same.
    """

    dtype: torch.dtype
    own: Span

    @property
    def bytes_per_element(self) -> float:
        """Those of the dtype."""
        return self.dtype.itemsize

    def room(self, span: Span) -> int:
        """As many elements."""
        return len(span)

    def pack(self, buffer: torch.Tensor, span: Span, chunk: torch.Tensor) -> None:
        """Cast into ``chunk``."""
        part = buffer[span.start : span.stop]
        chunk.copy_(part)
        if self.own.overlaps(span):
            part.copy_(chunk)

    def unpack(
        self, chunk: torch.Tensor, buffer: torch.Tensor, span: Span, add: bool, scratch: Scratch
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
    """A wire for `Collectives`: how the buffer's regions travel, and where the loss is kept.

    Attributes:
        coding: how each region of the buffer travels.
        residual: float32, as long as the buffer; None where nothing is kept.
    """

    coding: Coding
    residual: torch.Tensor | None = None


WireFormat = torch.dtype | Encoded | Factors
"""What a buffer's elements travel as, where that is not their own dtype."""


@dataclass(frozen=True, slots=True)
class CodecPacking:
    """Each chunk is encoded by itself; what that loses is kept in ``residual``.

    Of the other workers' blocks the residual holds what their owners have not been sent, of the
    own block what nobody has been sent of the sum. Either way it is what the sum
    still lacks of this worker's, so that it does not matter who owns which block the next time.

    Attributes:
        coding: how each region of the buffer travels.
        residual: float32, as long as the buffer; None where nothing is kept.
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
        """The codec's."""
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
        scratch: Scratch,  # noqa: ARG002
    ) -> None:
        """Decode into the buffer."""
        self.coding.decode(chunk, buffer, span, add=add)


def malformed(err: ValueError) -> str:
    """Return what a peer did whose payload was refused with ``err``."""
    return f"sent a malformed payload: {first_line(err)}; check that all ranks run the same version"
