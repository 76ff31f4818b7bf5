"""A backward that an exception cuts short."""

from __future__ import annotations

from typing import Any

import torch


class FailsInBackward(torch.autograd.Function):
    """Passes its input on, and raises `ArithmeticError` when its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError
