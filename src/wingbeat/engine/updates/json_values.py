"""Exact JSON encoding of small values, such as learning rates and step counters."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
import torch

LIMIT = 1024
"""Elements of the largest tensor that is encoded."""

_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any) -> Any:
    """Encode a number, text, None, small tensor, or a tuple or list of those as JSON."""
    if isinstance(value, torch.Tensor) and value.numel() <= LIMIT and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        flat = value.detach().reshape(-1).tolist()
        return {"tensor": [dtype, list(value.shape), flat, value.device.type != "cpu"]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item) for item in value]}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic) and type(value.item()) in _PLAIN:
        return value.item()  # a rate computed with numpy
    raise TypeError(f"a {type(value).__name__} cannot be sent to the other workers")


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
            return _tensor(inside, device)
    raise ValueError(f"malformed value {_short(data)}")


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype with this name, without ``torch.``; raise a `ValueError` for others."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"malformed dtype {name!r}")
    return dtype


def _tensor(data: Any, device: torch.device) -> torch.Tensor:
    try:
        name, shape, flat, on_device = data
        if len(flat) > LIMIT or not isinstance(on_device, bool):
            raise ValueError
        tensor = torch.tensor(flat, dtype=dtype_of(name)).reshape([int(n) for n in shape])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"malformed tensor {_short(data)}") from None
    return tensor.to(device) if on_device else tensor


def _short(data: Any) -> str:
    """Return the beginning of received data, at any depth of nesting."""
    return reprlib.repr(data)[:80]
