"""An optimizer's settings and state as exact JSON.

Small tensors, such as rates and step counters, can be part of the JSON. Others are listed apart,
and the JSON describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from wingbeat.schema import excerpt

LIMIT = 1024
"""Elements of the largest tensor that is part of the JSON."""

_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any) -> Any:
    """Encode a number, text, None, small tensor, or a tuple or list of those as JSON."""
    if isinstance(value, torch.Tensor) and value.numel() <= LIMIT and not value.is_complex():
        flat = value.detach().reshape(-1).tolist()
        return {"tensor": [_name_of(value), list(value.shape), flat, value.device.type != "cpu"]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item) for item in value]}
    return _plain(value)


def decode(data: Any, device: torch.device) -> Any:
    """Undo `encode`, or raise a `ValueError`; tensors that were on a GPU are made on ``device``."""
    try:
        return _decode(data, device)
    except RecursionError:
        raise ValueError("malformed value: nested too deeply") from None


def _decode(data: Any, device: torch.device) -> Any:
    if type(data) in _PLAIN:
        return data
    if isinstance(data, dict) and len(data) == 1:
        [(kind, inside)] = data.items()
        if kind in ("list", "tuple") and isinstance(inside, list):
            items = [_decode(item, device) for item in inside]
            return items if kind == "list" else tuple(items)
        if kind == "tensor":
            return _decode_tensor(inside, device)
    raise ValueError(f"malformed value {excerpt(data)}")


def _decode_tensor(data: Any, device: torch.device) -> torch.Tensor:
    try:
        name, shape, flat, on_device = data
        if len(flat) > LIMIT or not isinstance(on_device, bool):
            raise ValueError
        tensor = torch.tensor(flat, dtype=dtype_of(name), device="cpu").reshape(
            [int(n) for n in shape]
        )
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"malformed tensor {excerpt(data)}") from None
    return tensor.to(device) if on_device else tensor


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype with this name, without ``torch.``; raise a `ValueError` for others."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"malformed dtype {name!r}")
    return dtype


# -- tensors of any size, listed apart ----------------------------------------------------


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Describe nested numbers, text, None and tensors; append the tensors to ``tensors``."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        tensors.append(value.detach())
        return {"tensor": [_name_of(value), list(value.shape), value.device.type != "cpu"]}
    if type(value) in (list, tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe(item, tensors) for item in value]}
    if type(value) is dict and all(type(key) in _PLAIN for key in value):
        return {"dict": [[key, describe(item, tensors)] for key, item in value.items()]}
    return _plain(value)


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


def empty_tensors(description: Any, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield new tensors as described, on the CPU or on ``device``."""
    if not isinstance(description, dict):
        return
    [(kind, inside)] = description.items()
    if kind == "tensor":
        dtype, shape, on_device = inside
        yield torch.empty(shape, dtype=dtype_of(dtype), device=device if on_device else "cpu")
    else:
        for item in inside:
            yield from empty_tensors(item[1] if kind == "dict" else item, device)


def check_description(description: Any) -> None:
    """Raise a `ValueError` unless it is the result of `describe`."""
    if type(description) in _PLAIN:
        return
    try:
        [(kind, inside)] = description.items()
        if kind == "tensor":
            dtype, shape, on_device = inside
            dtype_of(dtype)
            valid = type(on_device) is bool and all(type(n) is int and n >= 0 for n in shape)
        else:
            valid = kind in ("list", "tuple", "dict")
            for item in inside if valid else ():
                if kind == "dict":
                    key, item = item
                    valid = valid and type(key) in _PLAIN
                check_description(item)
        if not valid:
            raise ValueError
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise ValueError(f"malformed description {excerpt(description)}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):  # such as a rate computed with numpy
        value = value.item()
    if type(value) in _PLAIN:
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent to the other workers")


def _name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
