"""The interface of codecs, and the two that only copy or round: float32 and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 4
"""Each region's payload begins at a multiple of this many bytes, so it can be read as float32."""


class Codec(Protocol):
    """Encodes a flat float32 tensor as bytes, and decodes them to nearly the same values.

    Payloads cannot be summed: they are decoded first. Their size depends on the number of elements
    only, so a receiver knows it beforehand. ``cols`` tells a codec that the elements are whole rows
    of a matrix with that many columns; 0 means no matrix.

    A value that is not finite never becomes finite: it arrives as infinite or NaN.

    Attributes:
        feedback: whether it uses a residual.
        bytes_per_element: approximate bytes per element.
    """

    @property
    def feedback(self) -> bool:
        """Whether the encoding error should be kept for the next iteration."""

    @property
    def bytes_per_element(self) -> float:
        """Approximate bytes per element outside of matrices."""

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """Return the exact size of the payload of ``numel`` elements."""

    def encode(
        self,
        x: torch.Tensor,
        payload: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        cols: int = 0,
    ) -> None:
        """Write ``x`` into ``payload``, uint8 of ``nbytes`` elements.

        With a ``residual``, float32 like ``x``, it writes ``x + residual``. Afterwards ``residual``
        holds the encoding error; 0 where that is not finite.

        Raises:
            ValueError: the payload's size is wrong; nothing is written.
        """

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool = False, cols: int = 0
    ) -> None:
        """Decode ``payload`` into ``out``, flat float32, or add it.

        Raises:
            ValueError: the payload is malformed; ``out`` is unchanged.
        """


def check_size(payload: torch.Tensor, nbytes: int) -> None:
    """Raise a `ValueError` unless ``payload`` has ``nbytes`` bytes."""
    if payload.numel() != nbytes:
        raise ValueError(f"payload has {payload.numel()} bytes; it must have {nbytes}")


@dataclass(frozen=True)
class Dense:
    """Copies float32 values without loss."""

    @property
    def feedback(self) -> bool:
        """False: nothing is lost."""
        return False

    @property
    def bytes_per_element(self) -> float:
        """Four bytes."""
        return 4.0

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`."""
        return 4 * numel

    def encode(
        self,
        x: torch.Tensor,
        payload: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        cols: int = 0,
    ) -> None:
        """As `Codec.encode`. The residual is zero afterwards."""
        check_size(payload, self.nbytes(x.numel()))
        values = payload.view(torch.float32)
        values.copy_(x)
        if residual is not None:
            values.add_(residual)
            residual.zero_()

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool = False, cols: int = 0
    ) -> None:
        """As `Codec.decode`."""
        check_size(payload, self.nbytes(out.numel()))
        values = payload.view(torch.float32)
        if add:
            out.add_(values)
        else:
            out.copy_(values)


_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class Bf16Codec:
    """Rounds values to the nearest bfloat16; infinities and NaN stay. For models: a step may be
    smaller than their last bit, so the rounding error is kept.

    No payload of the right size is malformed.
    """

    @property
    def feedback(self) -> bool:
        """True: rounding a model loses as much as a step adds."""
        return True

    @property
    def bytes_per_element(self) -> float:
        """Two bytes."""
        return 2.0

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`."""
        return 2 * numel

    def encode(
        self, x: Tensor, payload: Tensor, *, residual: Tensor | None = None, cols: int = 0
    ) -> None:
        """As `Codec.encode`."""
        check_size(payload, self.nbytes(x.numel()))
        if x.numel() == 0:
            return
        total = x if residual is None else residual.add_(x)
        values = payload.view(torch.bfloat16)
        values.copy_(total)
        if bool(values.isinf().any()):  # finite values stay finite
            finite = total.isfinite()
            values.copy_(torch.where(finite, total.clamp(-_LARGEST, _LARGEST), total))
        if residual is not None:
            residual.sub_(values).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """As `Codec.decode`."""
        check_size(payload, self.nbytes(out.numel()))
        if out.numel() == 0:
            return
        values = payload.view(torch.bfloat16)
        if add:
            out.add_(values)
        else:
            out.copy_(values)
