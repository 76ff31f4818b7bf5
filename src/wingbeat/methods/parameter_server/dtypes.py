"""Sums in float32 of what travels in fewer bits, without torch: by numpy, and C++ for 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from wingbeat import _native

Array = NDArray[np.generic]

ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element of what can be summed."""

_HALF: dict[str, np.dtype[np.generic]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
"""What 16 bits are to numpy, which has no bfloat16."""

_SUM: np.dtype[np.generic] = np.dtype(np.float32)

_BLOCK = 1 << 15
"""Elements that are worked on at a time: what is between two steps stays in the cache."""


def sum_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return what is summed in: float64 for itself, float32 for all others."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def widened(payload: memoryview, dtype: str) -> Array:
    """Return a payload's elements in the dtype of their sum; not copied if that is their own."""
    if dtype not in _HALF:
        return np.frombuffer(payload, dtype=dtype)
    wide = np.empty(len(payload) // 2, np.float32)
    add(wide, [payload], dtype, begin=True)
    return wide


def narrowed(total: Array, dtype: str, out: Array | None = None) -> Array:
    """Return a sum in the dtype that it travels in, rounded as by torch; itself if that is its own.

    Args:
        total: the sum.
        dtype: what it travels in.
        out: memory for it, of an earlier one that nobody reads.

    Raises:
        ValueError: the memory has another size or dtype.
    """
    if total.itemsize == ITEMSIZE[dtype]:
        return total
    half = _HALF[dtype]
    if out is None:
        out = np.empty(len(total), half)
    if len(out) != len(total):
        raise ValueError(f"memory for {len(out)} elements; the sum has {len(total)}")
    where = _address(out, half)
    _native.narrow_half(_address(total), len(total), dtype == "bfloat16", where)
    return out


def converted(total: Array, dtype: str) -> Array:
    """Return a float32 sum in another dtype that can be summed, in memory of its own."""
    if dtype == "float64":
        return total.astype(np.float64)
    return narrowed(total, dtype)


def add(total: Array, payloads: Sequence[memoryview], dtype: str, *, begin: bool = False) -> None:
    """Add payloads to a sum, one after the other; or ``begin`` it with them.

    What is between two of them stays in the cache: the sum goes through memory once.

    Raises:
        ValueError: a payload has another size; the sum, another dtype.
    """
    pieces = [np.frombuffer(payload, _HALF.get(dtype, dtype)) for payload in payloads]
    if wrong := [len(piece) for piece in pieces if len(piece) != len(total)]:
        raise ValueError(f"payload of {wrong[0]} elements; the sum has {len(total)}")
    if dtype in _HALF:
        where = [_address(piece, _HALF[dtype]) for piece in pieces]
        _native.add_half(_address(total), where, len(total), dtype == "bfloat16", begin)
        return
    # That gradients overflow is the workers' affair: a scaler looks for it in the sum.
    with np.errstate(all="ignore"):
        for part in _blocks(total, len(payloads)):
            _add(total[part], [piece[part] for piece in pieces], begin)


def _add(out: Array, pieces: list[Array], begin: bool) -> None:
    adder: Callable[..., object] = np.add
    first, *others = pieces if begin else [out, *pieces]
    if not others:
        np.copyto(out, first)
    for piece in others:
        adder(first, piece, out=out)
        first = out


def _address(array: Array, dtype: np.dtype[np.generic] = _SUM) -> int:
    """Return where an array lies that C++ is about to read or write."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} with strides {array.strides}; must be flat {dtype}")
    where: int = array.__array_interface__["data"][0]
    return where


def _blocks(total: Array, payloads: int) -> Iterator[slice]:
    """Yield the parts of a sum that are worked on one after the other.

    All of it, if one payload is added: nothing is between.
    """
    step = max(1, len(total)) if payloads == 1 else _BLOCK
    for start in range(0, len(total), step):
        yield slice(start, min(start + step, len(total)))
