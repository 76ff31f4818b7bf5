"""Sums in float32 of what travels in other dtypes, with numpy alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element of what can be summed."""


def sum_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return what is summed in: float64 for itself, float32 for all others."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def widened(payload: memoryview, dtype: str) -> Array:
    """Return a payload's elements in the dtype of their sum; not copied if that is their own."""
    if dtype != "bfloat16":
        return np.frombuffer(payload, dtype=dtype).astype(sum_dtype(dtype), copy=False)
    wide = np.frombuffer(payload, dtype=np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def narrowed(total: Array, dtype: str) -> Array:
    """Return a sum in the dtype that it travels in; itself if that is its own."""
    if dtype != "bfloat16":
        # That gradients overflow is the workers' affair: a scaler looks for it in the sum.
        with np.errstate(all="ignore"):
            same: Array = total.astype(dtype, copy=False)
        return same
    return _to_bfloat16(total.view(np.uint32))


def _to_bfloat16(bits: NDArray[np.uint32]) -> Array:
    """Round to the nearest, ties to even, as torch does; a NaN stays one."""
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    out: NDArray[np.uint16] = (rounded >> np.uint32(16)).astype(np.uint16)
    out[(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)] = 0x7FC0
    return out


def add(total: Array, payload: memoryview, dtype: str) -> None:
    """Add a payload to a sum."""
    adder: Callable[..., object] = np.add
    with np.errstate(all="ignore"):
        adder(total, widened(payload, dtype), out=total)
