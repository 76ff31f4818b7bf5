"""What every codec offers: a pair of functions and a size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


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
