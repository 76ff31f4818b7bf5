"""C++ kernels for the CPU: one or two passes over memory (sources in ``native/``).

The functions have the signatures and errors of ``reference``. The extension does not check its
arguments, so all checks are here. It releases the GIL and uses torch's number of threads, on which
results do not depend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat import _native
from wingbeat.kernels import layout


def sketch_encode(
    x: Tensor,
    payload: Tensor,
    *,
    bits: int,
    split: str = "error",
    level: str = "mean",
    residual: Tensor | None = None,
) -> None:
    """As `reference.sketch_encode`, on the CPU."""
    layout.check_sketch_encode(x, payload, bits, split, level, residual)
    _native.sketch_encode(
        _address(x),
        x.numel(),
        _address(payload),
        bits,
        split == "error",
        level == "ends",
        _optional(residual),
        torch.get_num_threads(),
    )


def sketch_decode(payload: Tensor, out: Tensor, *, bits: int, add: bool = False) -> None:
    """As `reference.sketch_decode`, on the CPU."""
    layout.check_sketch_decode(payload, out, bits)
    threads = torch.get_num_threads()
    _native.sketch_decode(_address(payload), out.numel(), _address(out), bits, add, threads)


def topk_encode(
    x: Tensor,
    payload: Tensor,
    *,
    k: int,
    residual: Tensor | None = None,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
) -> None:
    """As `reference.topk_encode`, on the CPU; the bytes are the same."""
    layout.check_topk_encode(x, payload, k, residual, velocity)
    _native.topk_encode(
        _address(x),
        x.numel(),
        _address(payload),
        k,
        _optional(residual),
        _optional(velocity),
        momentum,
        torch.get_num_threads(),
    )


def topk_decode(payload: Tensor, out: Tensor, *, k: int, add: bool = False) -> None:
    """As `reference.topk_decode`, on the CPU."""
    layout.check_topk_decode(payload, out, k)
    threads = torch.get_num_threads()
    _native.topk_decode(_address(payload), out.numel(), _address(out), k, add, threads)


def instructions() -> str:
    """Return the instruction set in use: ``"avx2"`` or ``"portable"``."""
    return _native.instructions()


def _address(tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor is on {tensor.device}; the native kernels need the CPU")
    return tensor.data_ptr()


def _optional(tensor: Tensor | None) -> int:
    return 0 if tensor is None else _address(tensor)
