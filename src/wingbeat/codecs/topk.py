"""Top-k: only the largest magnitudes are sent (OMGS-SGD, section II-C).

Supports momentum correction and a warm-up of the density (Deep Gradient Compression, Lin et al.
2018, sections 3.1 to 3.3), and values as a sketch of few bits (SparseLoCo, Sarfi et al. 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat import kernels
from wingbeat.codecs.codec import Codec, NativeFields, check_size
from wingbeat.kernels import layout

PLAIN = 32
"""Bits of a value that is not sketched."""

FIRST_DENSITY = 0.25
"""Density at the start of a warm-up (Deep Gradient Compression, section 3.3)."""


@dataclass(frozen=True)
class TopKCodec(Codec):
    """Sends the ``max(1, round(density * n))`` largest magnitudes with their indices.

    Among equal magnitudes the lowest index is sent. Non-finite values rank as largest. With
    ``bits`` from 1 to 8 the payload has a sketch in place of the values, whose error stays in the
    residual.
    """

    density: float = 0.001
    momentum: float = 0.0
    feedback: bool = True
    bits: int = PLAIN

    @property
    def bytes_per_element(self) -> float:  # type: ignore[override]
        """Bytes of the sent values and indices, divided by the number of elements."""
        return (self.bits / 8 + layout.OFFSET_BYTES) * self.density

    @property
    def native(self) -> NativeFields:
        """As `Codec.native`."""
        return 3, self.bits, False, False, self.density

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`."""
        k = layout.count_of(numel, self.density)
        whole = layout.topk_bytes(numel, k)
        return whole - layout.VALUE_BYTES * k + self._room(k) if self._sketches(numel) else whole

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        residual: Tensor | None = None,
        cols: int = 0,
        velocity: Tensor | None = None,
    ) -> None:
        """As `Codec.encode`; ``velocity`` accumulates momentum."""
        k, kernel = layout.count_of(x.numel(), self.density), kernels.of(x.device)
        whole = payload
        if self._sketches(x.numel()):
            check_size(payload, self.nbytes(x.numel()))
            whole = payload.new_empty(layout.topk_bytes(x.numel(), k))
        kernel.topk_encode(
            x, whole, k=k, residual=residual, velocity=velocity, momentum=self.momentum
        )
        if whole is payload:
            return
        values, room = whole[: layout.VALUE_BYTES * k].view(torch.float32), self._room(k)
        # Kernels require aligned memory; a payload may begin at any address.
        sketch = payload.new_empty(room)
        kernel.sketch_encode(values, sketch, bits=self.bits)
        payload[:room].copy_(sketch)
        payload[room:].copy_(whole[layout.VALUE_BYTES * k :])
        if residual is not None:
            arrived = torch.empty_like(values)
            kernel.sketch_decode(sketch, arrived, bits=self.bits)
            values.sub_(arrived).nan_to_num_(0.0, 0.0, 0.0)
            kernel.topk_decode(whole, residual, k=k, add=True)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """As `Codec.decode`; elements that were not sent are zero."""
        k, kernel = layout.count_of(out.numel(), self.density), kernels.of(out.device)
        whole = payload
        if self._sketches(out.numel()):
            check_size(payload, self.nbytes(out.numel()))
            whole, room = payload.new_empty(layout.topk_bytes(out.numel(), k)), self._room(k)
            values = whole[: layout.VALUE_BYTES * k].view(torch.float32)
            kernel.sketch_decode(payload[:room].clone(), values, bits=self.bits)
            whole[layout.VALUE_BYTES * k :].copy_(payload[room:])
        kernel.topk_decode(whole, out, k=k, add=add)

    def _sketches(self, numel: int) -> bool:
        raw = layout.topk_is_raw(numel, layout.count_of(numel, self.density))
        return self.bits != PLAIN and not raw

    def _room(self, k: int) -> int:
        return layout.sketch_bytes(k, self.bits)


def warmed_up(density: float, warmup: int, step: int) -> float:
    """Return the density of step ``step`` (from 0), which falls exponentially from 0.25.

    >>> [round(warmed_up(0.001, 4, step), 4) for step in range(6)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    """
    if step >= warmup or density >= FIRST_DENSITY:
        return density
    return float(FIRST_DENSITY * (density / FIRST_DENSITY) ** (step / warmup))
