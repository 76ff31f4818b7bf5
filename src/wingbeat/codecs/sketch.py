"""Gradient sketch: values are sent as indices into a table of levels (Canary, section 4.3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wingbeat import kernels
from wingbeat.kernels import layout


@dataclass(frozen=True)
class SketchCodec:
    """Writes a table of ``2**bits`` levels and each value's index in it.

    The options are those of `wingbeat.Sketch`. Zeros are exact if at least one in ``2**bits``
    values is zero. Non-finite values are decoded as NaN and do not affect others. Magnitudes below
    2**-133 become zero.
    """

    bits: int = 8
    split: str = "error"
    level: str = "mean"
    feedback: bool = True

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an index, without the table."""
        return self.bits / 8

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`."""
        return layout.sketch_bytes(numel, self.bits)

    def encode(
        self,
        x: torch.Tensor,
        payload: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        cols: int = 0,
    ) -> None:
        """As `Codec.encode`."""
        kernels.of(x.device).sketch_encode(
            x, payload, bits=self.bits, split=self.split, level=self.level, residual=residual
        )

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool = False, cols: int = 0
    ) -> None:
        """As `Codec.decode`."""
        kernels.of(out.device).sketch_decode(payload, out, bits=self.bits, add=add)
