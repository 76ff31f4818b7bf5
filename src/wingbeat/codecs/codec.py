"""The interface of codecs, and the codecs that copy float32 or round to bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 4
"""Alignment of each region's payload in bytes, so that it can be viewed as float32."""


class Codec(Protocol):
    """Encodes a flat float32 tensor as bytes, and decodes them to approximately the same values.

    Payloads cannot be summed. Their size depends on the number of elements only, so receivers can
    compute it. With ``cols``, the elements are complete rows of a matrix with that number of
    columns; 0 means no matrix. Non-finite values are decoded as infinite or NaN.
    """

    @property
    def feedback(self) -> bool:
        """Whether the encoding error should be added to the next iteration's values."""

    @property
    def bytes_per_element(self) -> float:
        """Approximate bytes per element, except in matrices."""

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
        """Write ``x``, or ``x + residual``, into ``payload``, uint8 of ``nbytes`` elements.

        Afterwards ``residual``, float32, holds the encoding error; 0 where that is not finite.

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
        """False, as encoding is lossless."""
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
    """Rounds values to the nearest finite bfloat16; infinities and NaN are unchanged.

    Intended for models, whose updates may be smaller than the rounding error.
    """

    @property
    def feedback(self) -> bool:
        """True, as the rounding error of a model may exceed an update."""
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
        if bool(values.isinf().any()):  # finite values must stay finite
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
