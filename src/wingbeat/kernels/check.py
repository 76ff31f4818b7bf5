"""Argument checks of all kernels. An invalid argument raises a ValueError that names it."""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.kernels import layout
from wingbeat.kernels.codebook import LEVELS, SPLITS


def sketch_encode(
    x: Tensor, payload: Tensor, bits: int, split: str, level: str, residual: Tensor | None
) -> None:
    """Check the arguments of ``sketch_encode``."""
    _values("x", x)
    _payload(payload, x, layout.sketch_bytes(x.numel(), bits))
    _choice("split", split, SPLITS)
    _choice("level", level, LEVELS)
    if residual is not None:
        _like("residual", residual, x)


def sketch_decode(payload: Tensor, out: Tensor, bits: int) -> None:
    """Check the arguments of ``sketch_decode``."""
    _values("out", out)
    _payload(payload, out, layout.sketch_bytes(out.numel(), bits))


def topk_encode(
    x: Tensor, payload: Tensor, k: int, residual: Tensor | None, velocity: Tensor | None
) -> None:
    """Check the arguments of ``topk_encode``."""
    _values("x", x)
    _payload(payload, x, layout.topk_bytes(x.numel(), k))
    if residual is not None:
        _like("residual", residual, x)
    if velocity is not None:
        _like("velocity", velocity, x)
        if residual is None:
            raise ValueError("residual is missing; velocity needs one")


def topk_decode(payload: Tensor, out: Tensor, k: int) -> None:
    """Check the arguments of ``topk_decode``, but not the payload's content."""
    _values("out", out)
    _payload(payload, out, layout.topk_bytes(out.numel(), k))


def _values(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise ValueError(f"{name} is {tensor.dtype}; it must be torch.float32")
    _flat(name, tensor)


def _payload(payload: Tensor, beside: Tensor, nbytes: int) -> None:
    if payload.dtype != torch.uint8:
        raise ValueError(f"payload is {payload.dtype}; it must be torch.uint8")
    _flat("payload", payload)
    if payload.numel() != nbytes:
        raise ValueError(f"payload has {payload.numel()} bytes; it must have {nbytes}")
    _same_device("payload", payload, beside)


def _like(name: str, tensor: Tensor, x: Tensor) -> None:
    _values(name, tensor)
    if tensor.numel() != x.numel():
        raise ValueError(f"{name} has {tensor.numel()} elements; x has {x.numel()}")
    _same_device(name, tensor, x)


def _flat(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            "it must be flat and contiguous"
        )


def _same_device(name: str, tensor: Tensor, beside: Tensor) -> None:
    if tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {beside.device}")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
