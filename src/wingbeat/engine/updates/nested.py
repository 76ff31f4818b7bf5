"""An optimizer's state of one parameter, as a JSON description and its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from wingbeat.engine.updates.json_values import dtype_of

_PLAIN = (bool, int, float, str, type(None))

_ALIGNMENT = 16
"""Bytes: tensors of any dtype can begin at multiples."""

_SHOWN = 60


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Describe nested numbers, text, None and tensors; append the tensors to ``tensors``."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        tensors.append(value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.device.type != "cpu"]}
    if type(value) in (list, tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe(item, tensors) for item in value]}
    if type(value) is dict and all(type(key) in _PLAIN for key in value):
        return {"dict": [[key, describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent to the other workers")


def rebuild(description: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Undo `describe`."""
    if not isinstance(description, dict):
        return description
    [(kind, inside)] = description.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: rebuild(item, tensors) for key, item in inside}
    items = [rebuild(item, tensors) for item in inside]
    return items if kind == "list" else tuple(items)


def check(description: Any) -> None:
    """Raise a `ValueError` unless it is the result of `describe`."""
    if type(description) in _PLAIN:
        return
    try:
        [(kind, inside)] = description.items()
        if kind == "tensor":
            dtype, shape, on_device = inside
            dtype_of(dtype)
            if type(on_device) is not bool or any(type(n) is not int or n < 0 for n in shape):
                raise ValueError
        elif kind == "dict":
            for key, item in inside:
                if type(key) not in _PLAIN:
                    raise ValueError
                check(item)
        elif kind in ("list", "tuple"):
            for item in inside:
                check(item)
        else:
            raise ValueError
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise ValueError(f"malformed description {str(description)[:_SHOWN]}") from None


def nbytes(description: Any) -> int:
    """Return the bytes of all tensors, each aligned."""
    return sum(size for _, size in _places(description))


def views(description: Any, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors as views of a flat buffer of `nbytes` bytes."""
    out, start = [], 0
    for (dtype, shape, _), size in _places(description):
        kind = dtype_of(dtype)
        stop = start + math.prod(shape) * kind.itemsize
        out.append(buffer[start:stop].view(kind).view(shape))
        start += size
    return out


def on_host(description: Any) -> list[bool]:
    """Return for each tensor whether it is in the host's memory."""
    return [not on_device for (_, _, on_device), _ in _places(description)]


def _places(description: Any) -> Iterator[tuple[Any, int]]:
    if not isinstance(description, dict):
        return
    [(kind, inside)] = description.items()
    if kind == "tensor":
        size = math.prod(inside[1]) * dtype_of(inside[0]).itemsize
        yield inside, -(-size // _ALIGNMENT) * _ALIGNMENT
    else:
        for item in inside:
            yield from _places(item[1] if kind == "dict" else item)
