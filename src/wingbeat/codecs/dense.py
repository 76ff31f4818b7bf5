"""Dense: float32 as it is, for what is too small or too precious to round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wingbeat.codecs.codec import check_size


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
