"""Bfloat16 that keeps what rounding takes away, for models: a step is less than their last bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.codecs.codec import check_size

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
