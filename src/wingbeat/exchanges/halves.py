"""The average of two models, part by part, as it travels: x_i, x_j <- (x_i + x_j) / 2.

As it is, both end with the same bits: the worker that is asked computes the average and sends it
back. Nothing of the buffer changes before all parts are there, so that a worker that dies in the
midst leaves the other's model as it was.

Rounded to a narrower dtype, models would lose what one step adds to them, which is less than the
last bit of most parameters. So what comes back is half of the difference, rounded: the one adds it
and the other subtracts the same number, and the sum of the two models stays what it was. They then
differ by what rounding took away, as models of AD-PSGD do anyhow.
"""

from __future__ import annotations

import torch

from wingbeat.collectives.packing import narrower_dtype
from wingbeat.types import Span

PIECE_BYTES = 1 << 20
"""Bytes of a part that travels by itself, at most."""


class Halves:
    """One worker's buffer, and the memory that an average is made in.

    Args:
        buffer: all parameters: flat, contiguous, of floating point numbers, on the CPU.
        wire: what they travel as; as they are if None, or if that is no wider.
        piece_bytes: of a part.

    Attributes:
        spans: the parts, in elements.

    Raises:
        UsageError: parameters cannot travel in the dtype ``wire``.
    """

    def __init__(
        self, buffer: torch.Tensor, wire: torch.dtype | None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._buffer = buffer.detach()
        self._wire = narrower_dtype(wire, buffer)
        dtype = buffer.dtype if self._wire is None else self._wire
        self.spans = Span(0, buffer.numel()).cut(max(1, piece_bytes // dtype.itemsize))
        self._itemsize = dtype.itemsize
        self._fresh = torch.empty(buffer.numel(), dtype=dtype, device="cpu")
        self._bytes = _bytes_of(self._fresh)
        self._own = _bytes_of(self._buffer) if self._wire is None else self._bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, as they travel."""
        return len(self._bytes)

    def fits(self, piece: int, nbytes: int) -> bool:
        """Whether a part of that number has so many bytes."""
        return piece < len(self.spans) and nbytes == len(self.spans[piece]) * self._itemsize

    def model(self, piece: int) -> memoryview:
        """Return a part of this worker's model, to be sent; it does not change until it is back."""
        span = self.spans[piece]
        if self._wire is not None:
            self._fresh[span.start : span.stop].copy_(self._buffer[span.start : span.stop])
        return self._own[self._place(span)]

    def answer(self, piece: int) -> memoryview:
        """Return what becomes of a part that was `met`, to be sent."""
        return self._bytes[self._place(self.spans[piece])]

    def meet(self, piece: int, payload: memoryview) -> None:
        """Average a part of another worker's model, which `fits`, with this one's."""
        span = self.spans[piece]
        self._bytes[self._place(span)] = payload
        fresh = self._fresh[span.start : span.stop]
        own = self._buffer[span.start : span.stop]
        with torch.no_grad():
            if self._wire is None:
                fresh.add_(own).mul_(0.5)
            else:
                fresh.copy_((own - fresh.to(own.dtype)).mul_(0.5))

    def take(self, piece: int, payload: memoryview) -> None:
        """Take in what has become of a part of this worker's model; it `fits`."""
        self._bytes[self._place(self.spans[piece])] = payload

    def adopt(self, *, asked: bool) -> None:
        """Make the average this worker's model, which all its parts are there of.

        Args:
            asked: whether this worker has asked the other.
        """
        with torch.no_grad():
            if self._wire is None:
                self._buffer.copy_(self._fresh)
            elif asked:
                self._buffer.add_(self._fresh)
            else:
                self._buffer.sub_(self._fresh)

    def drop(self) -> None:
        """Begin anew: what is being sent to a worker that is gone may never have left."""
        self._fresh = torch.empty_like(self._fresh)
        mine, self._bytes = self._own is self._bytes, _bytes_of(self._fresh)
        if mine:
            self._own = self._bytes

    def _place(self, span: Span) -> slice:
        return slice(span.start * self._itemsize, span.stop * self._itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view
