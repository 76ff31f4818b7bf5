"""``torch.amp.GradScaler`` without whole gradients: each worker shows it the part it reduced.

A scaler reads ``optimizer.param_groups`` to divide the gradients by its scale and to look for
infinities. Any other reader is given whole gradients, which costs an all-gather that nothing
hides; the scaler is content with this worker's blocks, and an agreement on what all have found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from wingbeat.collectives import Collectives


def asks(optimizer: Any) -> bool:
    """Whether the caller's caller is a scaler, and needs no whole gradients of ``optimizer``.

    An optimizer that unscales by itself, inside its step, needs them.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    caller = sys._getframe(2).f_code
    return caller is torch.amp.GradScaler._unscale_grads_.__code__


def groups_of(
    parts: Iterable[torch.Tensor], collectives: Collectives, device: torch.device
) -> list[dict[str, Any]]:
    """Return param groups whose gradients are ``parts``, this worker's reduced blocks.

    If any worker's parts hold an infinity or NaN, every worker's groups do: in a parameter of
    their own, of one element. The scaler then skips the step on all of them alike.
    """
    parts = list(parts)
    flag = torch.zeros(1, device=device)
    found = torch.zeros(collectives.world.size, dtype=torch.float64, device=device)
    # The largest magnitude is infinite or NaN exactly if an element is, and cannot overflow.
    largest = [torch.linalg.vector_norm(part, torch.inf).to(found) for part in parts]
    if largest:
        worst = torch.stack(largest).amax()
        found[collectives.world.rank] = worst.isfinite().logical_not()
    collectives.all_gather(found, label="infinities").wait()
    flag[0] = torch.where(found.sum() > 0, torch.inf, 0.0)
    return [{"params": [_shown(part) for part in (*parts, flag)]}]


def _shown(grad: torch.Tensor) -> torch.Tensor:
    """A stand-in for a parameter, with ``grad`` as its gradient."""
    param = torch.empty_like(grad)
    param.grad = grad
    return param
