"""Checks of function arguments, made before anything is sent."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch

from wingbeat.errors import UsageError


def number(name: str, value: Any) -> int:
    """Convert an integer of any type, such as NumPy's; raise a `UsageError` for other values."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise UsageError(f"{name}={value!r:.60}: allowed are whole numbers")


def numbers(name: str, values: Any) -> tuple[int, ...]:
    """Convert a sequence to a tuple of integers; raise a `UsageError` for other values."""
    try:
        return tuple(number(name, value) for value in values)
    except (TypeError, UsageError):  # a TypeError: not a sequence
        raise UsageError(
            f"{name}={values!r:.60}: allowed are whole numbers, as in (0, 0)"
        ) from None


def pair(name: str, values: Any) -> tuple[int, int]:
    """Convert a sequence to two integers; raise a `UsageError` for other values."""
    found = numbers(name, values)
    if len(found) != 2:
        raise UsageError(f"{name}={values!r:.60}: allowed are 2 whole numbers, as in (0, 0)")
    return found[0], found[1]


def check_count(name: str, count: int, most: int) -> None:
    """Raise a `UsageError` unless ``count`` is an integer from 1 to ``most``."""
    if type(count) is not int or not 1 <= count <= most:
        raise UsageError(f"{name}={count!r}: allowed are whole numbers, 1 to {most}")


def check_tensor(tensor: Any, *, written: bool = False) -> None:
    """Check a tensor before a collective, which would otherwise fail on all workers.

    Raises a `UsageError` if it cannot be sent or, with ``written``, not be written to.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"tensor={type(tensor).__name__}: allowed is a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise UsageError(
            f"a tensor with layout {tensor.layout} on {tensor.device} cannot be sent: allowed are "
            "dense tensors that have values, such as tensor.to_dense()"
        )
    twice = any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if written and (twice or tensor.is_inference()):
        raise UsageError(
            "all_reduce writes to its tensor, and this one is expanded or was made in "
            "inference_mode: pass tensor.clone()"
        )
