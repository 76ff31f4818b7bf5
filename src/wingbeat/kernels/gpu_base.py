"""Shared helpers of the Triton kernels. Requires triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 1024
"""Programs of a kernel that loops: about 8 for each multiprocessor of a large GPU."""

_MOST_VALUES = 2**31


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` with Triton on its first launch, for each set of constants."""
    return triton.jit(function)


def launch(function: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch ``programs`` programs of a kernel on the current stream.

    Floating point fusion is disabled, so that velocities and top-k are bitwise equal to the CPU's.
    """
    function[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def check_count(name: str, n: int) -> None:
    """Raise ValueError if ``n`` exceeds the kernels' 32-bit counters."""
    if n >= _MOST_VALUES:
        raise ValueError(f"{name} has {n} elements; on a GPU it must have fewer than 2**31")


def words(payload: Tensor) -> Tensor:
    """Return ``payload``, or a copy if it is not aligned to 4 bytes."""
    aligned = payload.data_ptr() % 4 == 0 and payload.storage_offset() % 4 == 0
    return payload if aligned else payload.clone()


def as_floats(payload: Tensor) -> Tensor:
    """View the result of `words` as float32."""
    return payload.view(torch.float32)


@kernel
def load_acc(
    x: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    RESIDUAL: tl.constexpr,
) -> Any:
    """Load x, plus the residual if there is one; 0 outside."""
    acc = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if RESIDUAL:
        acc += tl.load(residual + at, mask=inside, other=0.0, eviction_policy="evict_first")
    return acc
