"""The interface of codecs, and the two that only copy or round: float32 and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 4
"""Bytes. Each region's payload begins at a multiple, so that it can be read as float32."""


class Codec(Protocol):
    """Turns a flat float32 tensor into bytes, and back into nearly the same values.

    Payloads cannot be summed: whoever sums decodes them first. Their size depends on the number
    of elements only, so that a receiver knows it beforehand. ``cols`` tells a codec that makes
    use of it that the elements are whole rows of a matrix with that many columns; 0 is none.

    What is not finite never becomes a finite number: it arrives as infinite or NaN.

    Attributes:
        feedback: whether it wants a residual.
        bytes_per_element: about how many bytes an element takes on the wire.
    """

    @property
    def feedback(self) -> bool:
        """Whether what is lost is worth keeping for the next time."""

    @property
    def bytes_per_element(self) -> float:
        """About how many bytes an element that is in no matrix takes on the wire."""

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

        With a ``residual``, float32 like ``x``, it is ``x + residual`` that is written, and
        afterwards ``residual`` is what the receiver will miss; 0 where that is not finite.

        Raises:
            ValueError: the payload's size is wrong; nothing is written.
        """

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool = False, cols: int = 0
    ) -> None:
        """Write what ``payload`` stands for into ``out``, flat float32, or add it.

        Raises:
            ValueError: no encoder can have written this; ``out`` is as it was.
        """


def check_size(payload: torch.Tensor, nbytes: int) -> None:
    """Raise a `ValueError` unless ``payload`` has ``nbytes`` bytes."""
    if payload.numel() != nbytes:
        raise ValueError(f"payload has {payload.numel()} bytes; it must have {nbytes}")


@dataclass(frozen=True)
class Dense:
    """Values travel as float32; nothing is lost."""

    @property
    def feedback(self) -> bool:
        """Nothing is lost."""
        return False

    @property
    def bytes_per_element(self) -> float:
        """Four bytes."""
        return 4.0

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """Return the payload's size in bytes."""
        return 4 * numel

    def encode(
        self,
        x: torch.Tensor,
        payload: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        cols: int = 0,
    ) -> None:
        """Copy the values and add the residual, which is zero afterwards.

        Raises:
            ValueError: the payload's size is wrong.
        """
        check_size(payload, self.nbytes(x.numel()))
        values = payload.view(torch.float32)
        values.copy_(x)
        if residual is not None:
            values.add_(residual)
            residual.zero_()

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool = False, cols: int = 0
    ) -> None:
        """Copy or add the values.

        Raises:
            ValueError: the payload's size is wrong.
        """
        check_size(payload, self.nbytes(out.numel()))
        values = payload.view(torch.float32)
        if add:
            out.add_(values)
        else:
            out.copy_(values)


_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class Bf16Codec:
    """Values are rounded to the nearest bfloat16. Infinities and NaN stay what they are.

    No bytes of the right size are malformed.
    """

    @property
    def feedback(self) -> bool:
        """What rounding takes away of a model is as much as a step adds to it."""
        return True

    @property
    def bytes_per_element(self) -> float:
        """Two bytes."""
        return 2.0

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """Return the payload's size in bytes."""
        return 2 * numel

    def encode(
        self, x: Tensor, payload: Tensor, *, residual: Tensor | None = None, cols: int = 0
    ) -> None:
        """Write the rounded values.

        Raises:
            ValueError: the payload's size is wrong.
        """
        check_size(payload, self.nbytes(x.numel()))
        if x.numel() == 0:
            return
        total = x if residual is None else residual.add_(x)
        values = payload.view(torch.bfloat16)
        values.copy_(total)
        if bool(values.isinf().any()):  # what is finite stays so
            finite = total.isfinite()
            values.copy_(torch.where(finite, total.clamp(-_LARGEST, _LARGEST), total))
        if residual is not None:
            residual.sub_(values).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """Widen the values.

        Raises:
            ValueError: the payload's size is wrong.
        """
        check_size(payload, self.nbytes(out.numel()))
        if out.numel() == 0:
            return
        values = payload.view(torch.bfloat16)
        if add:
            out.add_(values)
        else:
            out.copy_(values)
