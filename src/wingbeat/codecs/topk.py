"""Top-k: only the largest magnitudes travel (OMGS-SGD, section II-C).

With momentum correction and a density that warms up (Deep Gradient Compression, Lin et al. 2018,
sections 3.1 to 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wingbeat import kernels
from wingbeat.kernels import layout

FIRST_DENSITY = 0.25
"""Density with which a warm-up begins (Deep Gradient Compression, section 3.3)."""


@dataclass(frozen=True)
class TopKCodec:
    """The ``max(1, round(density * n))`` largest magnitudes travel, with their indices.

    Ties go to the lowest index. What is not finite counts as largest, so that it travels.
    """

    density: float = 0.001
    momentum: float = 0.0
    feedback: bool = True

    @property
    def bytes_per_element(self) -> float:
        """Four bytes of value and two of index for each that travels."""
        return 6 * self.density

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """Return the payload's size in bytes."""
        return layout.topk_bytes(numel, layout.count_of(numel, self.density))

    def encode(
        self,
        x: torch.Tensor,
        payload: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        cols: int = 0,
        velocity: torch.Tensor | None = None,
    ) -> None:
        """Write the largest values and where they are; ``velocity`` gathers momentum here."""
        kernels.of(x.device).topk_encode(
            x,
            payload,
            k=layout.count_of(x.numel(), self.density),
            residual=residual,
            velocity=velocity,
            momentum=self.momentum,
        )

    def decode(
        self, payload: torch.Tensor, out: torch.Tensor, *, add: bool = False, cols: int = 0
    ) -> None:
        """Put or add the values where they belong; the others are zero.

        Raises:
            ValueError: the payload is malformed.
        """
        k = layout.count_of(out.numel(), self.density)
        kernels.of(out.device).topk_decode(payload, out, k=k, add=add)


def warmed_up(density: float, warmup: int, step: int) -> float:
    """Return the density of step ``step`` (from 0): from 0.25 it falls exponentially.

    >>> [round(warmed_up(0.001, 4, step), 4) for step in range(6)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    """
    if step >= warmup or density >= FIRST_DENSITY:
        return density
    return float(FIRST_DENSITY * (density / FIRST_DENSITY) ** (step / warmup))
