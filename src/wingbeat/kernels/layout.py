"""Sizes and layouts of payloads, and the argument checks of all kernels.

Sketch: ``[table: float32[2**bits]][codes: bits each]``, with code ``i`` in the bits ``[i*bits,
(i+1)*bits)`` of a little-endian bit stream that is padded with zeros.

Top-k: ``[values: float32[k]][counts: uint32[ceil(n/65536)]][offsets: uint16[k]]``, indices
ascending. Index ``i`` is offset ``i % 65536`` of block ``i // 65536``, and ``counts`` has the
number of indices of each block, so that an index takes 2 bytes instead of 4.

If that would not be smaller, the payload is raw: the n values as float32. All numbers are little
endian.

Functions raise ValueError if an argument is out of range; k is in 1..n, or 0 for n = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.compression import LEVELS, MAX_BITS, SPLITS

VALUE_BYTES = 4
COUNT_BYTES = 4
OFFSET_BYTES = 2
BLOCK = 1 << 16


def sketch_bytes(n: int, bits: int) -> int:
    """Return the size in bytes of a sketch of ``n`` values with ``bits`` (1 to 8) each.

    >>> sketch_bytes(1_000_000, 8), sketch_bytes(3, 8), sketch_bytes(0, 8)
    (1001024, 12, 0)
    """
    return min(VALUE_BYTES * n, _sketch_packed(n, bits))


def sketch_is_raw(n: int, bits: int) -> bool:
    """Whether the payload of a sketch of ``n`` values is raw.

    >>> sketch_is_raw(341, 8), sketch_is_raw(342, 8)
    (True, False)
    """
    return VALUE_BYTES * n <= _sketch_packed(n, bits)


def table_bytes(bits: int) -> int:
    """Return the size in bytes of a sketch's table, which is the offset of the codes.

    >>> table_bytes(8)
    1024
    """
    return VALUE_BYTES << bits


def topk_bytes(n: int, k: int) -> int:
    """Return the size in bytes of ``k`` of ``n`` values with their indices.

    >>> topk_bytes(1_000_000, 1000), topk_bytes(3, 2), topk_bytes(0, 0)
    (6064, 12, 0)
    """
    return min(VALUE_BYTES * n, _topk_packed(n, k))


def topk_is_raw(n: int, k: int) -> bool:
    """Whether the payload of top-k of ``n`` values is raw.

    >>> topk_is_raw(1000, 664), topk_is_raw(1000, 666)
    (False, True)
    """
    return VALUE_BYTES * n <= _topk_packed(n, k)


def blocks_of(n: int) -> int:
    """Return the number of blocks of 65536 indices that ``n`` values have.

    >>> blocks_of(65536), blocks_of(65537), blocks_of(0)
    (1, 2, 0)
    """
    return -(-n // BLOCK)


def count_of(n: int, density: float) -> int:
    """Return the number of values sent of ``n`` at ``density``: at least one unless n is 0.

    >>> count_of(1000, 0.01), count_of(10, 0.001), count_of(0, 0.5)
    (10, 1, 0)
    """
    _check_n(n)
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"density is {density}; it must be between 0 and 1")
    return min(n, max(1, round(density * n)))


def _sketch_packed(n: int, bits: int) -> int:
    _check_n(n)
    if bits not in range(1, MAX_BITS + 1):
        raise ValueError(f"bits is {bits}; it must be between 1 and {MAX_BITS}")
    return table_bytes(bits) + -(-n * bits // 8)


def _topk_packed(n: int, k: int) -> int:
    _check_n(n)
    if not min(1, n) <= k <= n:
        raise ValueError(f"k is {k}; it must be between 1 and n, which is {n}")
    return (VALUE_BYTES + OFFSET_BYTES) * k + COUNT_BYTES * blocks_of(n)


def _check_n(n: int) -> None:
    if n < 0:
        raise ValueError(f"n is {n}; it must not be negative")


def check_sketch_encode(
    x: Tensor, payload: Tensor, bits: int, split: str, level: str, residual: Tensor | None
) -> None:
    """Raise a `ValueError` that names an invalid argument of ``sketch_encode``."""
    _check_values("x", x)
    _check_payload(payload, x, sketch_bytes(x.numel(), bits))
    for name, value, allowed in (("split", split, SPLITS), ("level", level, LEVELS)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    if residual is not None:
        _check_like("residual", residual, x)


def check_sketch_decode(payload: Tensor, out: Tensor, bits: int) -> None:
    """Raise a `ValueError` that names an invalid argument of ``sketch_decode``."""
    _check_values("out", out)
    _check_payload(payload, out, sketch_bytes(out.numel(), bits))


def check_topk_encode(
    x: Tensor, payload: Tensor, k: int, residual: Tensor | None, velocity: Tensor | None
) -> None:
    """Raise a `ValueError` that names an invalid argument of ``topk_encode``."""
    _check_values("x", x)
    _check_payload(payload, x, topk_bytes(x.numel(), k))
    if residual is not None:
        _check_like("residual", residual, x)
    if velocity is not None:
        _check_like("velocity", velocity, x)
        if residual is None:
            raise ValueError("residual is missing; velocity needs one")


def check_topk_decode(payload: Tensor, out: Tensor, k: int) -> None:
    """As `check_topk_encode`, for ``topk_decode``; the payload's content is not checked."""
    _check_values("out", out)
    _check_payload(payload, out, topk_bytes(out.numel(), k))


def _check_values(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            "it must be flat and contiguous"
        )


def _check_payload(payload: Tensor, beside: Tensor, nbytes: int) -> None:
    _check_values("payload", payload, torch.uint8)
    if payload.numel() != nbytes:
        raise ValueError(f"payload has {payload.numel()} bytes; it must have {nbytes}")
    _check_device("payload", payload, beside)


def _check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    _check_values(name, tensor)
    if tensor.numel() != x.numel():
        raise ValueError(f"{name} has {tensor.numel()} elements; x has {x.numel()}")
    _check_device(name, tensor, x)


def _check_device(name: str, tensor: Tensor, beside: Tensor) -> None:
    if tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {beside.device}")
