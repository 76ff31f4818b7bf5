"""Sums in float32 of what travels in other dtypes, with numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element of what can be summed."""

_BLOCK = 1 << 15
"""Elements that are worked on at a time: what is between two steps stays in the cache."""


def sum_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return what is summed in: float64 for itself, float32 for all others."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def widened(payload: memoryview, dtype: str) -> Array:
    """Return a payload's elements in the dtype of their sum; not copied if that is their own."""
    if dtype != "bfloat16":
        return np.frombuffer(payload, dtype=dtype).astype(sum_dtype(dtype), copy=False)
    # The first two bytes of a float32, the last two being zero; here numbers are little-endian.
    wide = np.zeros((len(payload) // 2, 2), np.uint16)
    wide[:, 1] = np.frombuffer(payload, dtype=np.uint16)
    same: Array = wide.view(np.float32).reshape(-1)
    return same


def narrowed(total: Array, dtype: str, out: Array | None = None) -> Array:
    """Return a sum in the dtype that it travels in; itself if that is its own.

    Args:
        total: the sum.
        dtype: what it travels in.
        out: memory for it, of an earlier one that nobody reads.
    """
    if total.itemsize == ITEMSIZE[dtype]:
        return total
    bfloat16 = dtype == "bfloat16"
    if out is None:
        out = np.empty(len(total), np.uint16 if bfloat16 else dtype)
    # That gradients overflow is the workers' affair: a scaler looks for it in the sum.
    with np.errstate(all="ignore"):
        for part in _blocks(total, dtype):
            wide = total[part]
            out[part] = _to_bfloat16(wide.view(np.uint32)) if bfloat16 else wide
    return out


def _to_bfloat16(bits: NDArray[np.uint32]) -> Array:
    """Round to the nearest, ties to even, as torch does; a NaN stays one."""
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    out: NDArray[np.uint16] = (rounded >> np.uint32(16)).astype(np.uint16)
    out[(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)] = 0x7FC0
    return out


def add(total: Array, payloads: Sequence[memoryview], dtype: str, *, begin: bool = False) -> None:
    """Add payloads to a sum, one after the other; or ``begin`` it with them.

    What is between two of them stays in the cache: the sum goes through memory once.
    """
    adder: Callable[..., object] = np.add
    with np.errstate(all="ignore"):
        for part in _blocks(total, dtype, len(payloads)):
            out = total[part]
            pieces = [widened(_of(payload, part, dtype), dtype) for payload in payloads]
            first, *others = pieces if begin else [out, *pieces]
            if not others:
                np.copyto(out, first)
            for piece in others:
                adder(first, piece, out=out)
                first = out


def _of(payload: memoryview, part: slice, dtype: str) -> memoryview:
    return payload[part.start * ITEMSIZE[dtype] : part.stop * ITEMSIZE[dtype]]


def _blocks(total: Array, dtype: str, payloads: int = 1) -> Iterator[slice]:
    """Yield the parts of a sum that are worked on one after the other.

    All of it, if one payload is added that needs no cast: nothing is between.
    """
    whole = payloads == 1 and total.itemsize == ITEMSIZE[dtype]
    step = max(1, len(total)) if whole else _BLOCK
    for start in range(0, len(total), step):
        yield slice(start, min(start + step, len(total)))
