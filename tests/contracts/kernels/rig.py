"""Kernels to test, and calls of them that are watched from all sides."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels import layout

MARGIN = 64
"""Bytes before and behind whatever a kernel may write; a multiple of every alignment."""

_GUARD = 0xA5


class Guarded:
    """A tensor with guard bytes around it.

    Attributes:
        tensor: what the kernel gets.
    """

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = n * dtype.itemsize
        around = self._nbytes + 2 * MARGIN + -self._nbytes % 8
        self._all = torch.full((around,), _GUARD, dtype=torch.uint8, device=device)
        self.tensor = self._all[MARGIN : MARGIN + self._nbytes].view(dtype)

    def check(self) -> None:
        """Fail if something was written outside."""
        assert bool((self._all[:MARGIN] == _GUARD).all()), "written before the beginning"
        assert bool((self._all[MARGIN + self._nbytes :] == _GUARD).all()), "written past the end"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors are equal bit for bit, NaNs included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN and -0 equals 0."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def relative_error(decoded: Tensor, x: Tensor) -> float:
    """Squared error over squared norm, over what is finite in ``x``; 0 where there is nothing."""
    finite = x.isfinite()
    a, b = decoded[finite].double(), x[finite].double()
    norm = float((b**2).sum())
    return float(((a - b) ** 2).sum()) / norm if norm else float((a**2).sum())


@dataclass(frozen=True)
class Kernels:
    """One implementation on one device. Tensors go in and come out on the CPU.

    Attributes:
        interpreted: runs element by element in Python, so nothing large can be asked of it.
    """

    name: str
    module: ModuleType
    device: torch.device
    interpreted: bool = False

    def put(self, x: Tensor) -> Guarded:
        """A copy of ``x`` on the device, guarded."""
        guarded = Guarded(x.numel(), x.dtype, self.device)
        guarded.tensor.copy_(x)
        return guarded

    def sketch(
        self, x: Tensor, bits: int, *, residual: Tensor | None = None, **options: str
    ) -> Tensor:
        """Encode; returns the payload. ``residual`` (on the CPU) is updated in place."""
        return self._encode(
            self.module.sketch_encode, x, layout.sketch_bytes(x.numel(), bits),
            {"bits": bits, **options}, {"residual": residual},
        )  # fmt: skip

    def topk(
        self,
        x: Tensor,
        k: int,
        *,
        residual: Tensor | None = None,
        velocity: Tensor | None = None,
        momentum: float = 0.0,
    ) -> Tensor:
        """Encode; returns the payload. ``residual`` and ``velocity`` are updated in place."""
        return self._encode(
            self.module.topk_encode, x, layout.topk_bytes(x.numel(), k),
            {"k": k, "momentum": momentum}, {"residual": residual, "velocity": velocity},
        )  # fmt: skip

    def _encode(
        self, encode: Any, x: Tensor, nbytes: int, options: dict[str, Any],
        state: dict[str, Tensor | None],
    ) -> Tensor:  # fmt: skip
        given = self.put(x)
        payload = Guarded(nbytes, torch.uint8, self.device)
        kept = {name: self.put(t) for name, t in state.items() if t is not None}
        encode(given.tensor, payload.tensor, **options, **{n: g.tensor for n, g in kept.items()})
        for guarded in (given, payload, *kept.values()):
            guarded.check()
        assert same_bits(given.tensor.cpu(), x), "x was modified"
        for name, guarded in kept.items():
            out = state[name]
            assert out is not None
            out.copy_(guarded.tensor)
        return payload.tensor.cpu()

    def sketch_decode(
        self, payload: Tensor, n: int, bits: int, *, onto: Tensor | None = None
    ) -> Tensor:
        """Decode over NaNs, or add to a copy of ``onto``."""
        return self._decode(self.module.sketch_decode, payload, n, {"bits": bits}, onto)

    def topk_decode(self, payload: Tensor, n: int, k: int, *, onto: Tensor | None = None) -> Tensor:
        """Decode over NaNs, or add to a copy of ``onto``. ``out`` is watched if it is refused."""
        return self._decode(self.module.topk_decode, payload, n, {"k": k}, onto)

    def _decode(
        self, decode: Any, payload: Tensor, n: int, options: dict[str, int], onto: Tensor | None
    ) -> Tensor:
        before = torch.full((n,), torch.nan) if onto is None else onto
        out, given = self.put(before), self.put(payload)
        try:
            decode(given.tensor, out.tensor, add=onto is not None, **options)
        except ValueError:
            out.check()
            assert same_bits(out.tensor.cpu(), before), "out was touched and then refused"
            raise
        out.check()
        assert torch.equal(given.tensor.cpu(), payload), "the payload was modified"
        return out.tensor.cpu()
