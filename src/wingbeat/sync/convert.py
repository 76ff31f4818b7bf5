"""Parameters keep their dtype and device once they are distributed: buffers were made for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from wingbeat.errors import UsageError


def refuse_conversion(params: Iterable[torch.Tensor], fn: Callable[[torch.Tensor], Any]) -> None:
    """Refuse what ``Module.to``, ``double`` and the like do, if it makes other tensors of these.

    Raises:
        UsageError: ``fn`` makes another dtype of one of ``params``, or moves it.
    """
    kinds = {(p.dtype, p.device) for p in params}
    for dtype, device in kinds:
        made = fn(torch.empty(0, dtype=dtype, device=device))
        if isinstance(made, torch.Tensor) and (made.dtype, made.device) != (dtype, device):
            raise UsageError(
                f"parameters of this model are {_name(dtype)} on {device}, and cannot become "
                f"{_name(made.dtype)} on {made.device} after distribute(): convert or move the "
                "model first, then make the optimizer, then call distribute()"
            )


def check_kind(name: str, param: torch.Tensor, view: torch.Tensor) -> None:
    """Make sure that a parameter is still what its place in a bucket was made for.

    Raises:
        UsageError: its dtype, device or shape is another.
    """
    if (param.dtype, param.device, param.shape) != (view.dtype, view.device, view.shape):
        raise UsageError(
            f"parameter {name!r} was {_name(view.dtype)} {tuple(view.shape)} on {view.device} at "
            f"distribute() and is {_name(param.dtype)} {tuple(param.shape)} on {param.device} now: "
            "convert or move the model first, then make the optimizer, then call distribute()"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
