"""A copy of an optimizer that trains test tensors, to see what the optimizer does."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LR = 0.01
"""In place of a group's own learning rate, which a warm-up may have set to zero."""

_RTOL, _ATOL = 1e-4, 1e-6

Optimizer = torch.optim.Optimizer


class Unfit(Exception):
    """Says why an optimizer cannot do what a trial is to show."""


class _Alone(TorchDispatchMode):
    """Ends a trial in which an optimizer calls ``torch.distributed`` by itself.

    What it does then depends on other workers, and they are not in the same trial.
    """

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.rstrip("_")
            raise Unfit(f"it exchanges tensors with other workers by itself ({name})")
        return func(*args, **(kwargs or {}))


def try_step(twin: Any, step: Callable[[Any], Any], group: dict[str, Any]) -> list[str]:
    """Have a twin make a step on one group; return the settings that have changed.

    One with a mode for training, as schedule-free optimizers have, is in that.

    Raises:
        Unfit: it calls ``torch.distributed`` by itself.
    """
    before = dict(group)
    twin.__dict__["param_groups"] = [group]
    with _Alone():  # type: ignore[no-untyped-call]
        if callable(getattr(twin, "train", None)):
            twin.train()
        step(twin)
    return [key for key, value in group.items() if key not in before or value is not before[key]]


def why(error: Exception) -> str:
    """Say what a trial has ended in."""
    if isinstance(error, Unfit):
        return str(error)
    reason = str(error).strip().splitlines() or [""]
    return f"a step on test tensors ends in {type(error).__name__}: {reason[0]}"


def bare_step(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an optimizer's ``step`` without hooks for all optimizers of the process.

    Those belong to the user's own steps.
    """
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def make_twin(optimizer: Optimizer) -> Any:
    """Return a copy without parameters, state and hooks.

    Where it refers to parameters by itself, as an optimizer around another one does, it has empty
    ones instead: a trial must never change the user's.
    """
    twin = object.__new__(type(optimizer))
    params = [p for group in optimizer.__dict__["param_groups"] for p in group["params"]]
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().new_empty(0), p.requires_grad) for p in params
    }
    memo[id(optimizer)] = twin
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            twin.__dict__[key] = type(value)()
        elif key not in ("param_groups", "state", "step"):
            twin.__dict__[key] = _copied(value, memo)
    twin.__dict__["state"] = defaultdict(dict)
    return twin


def copied_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings for one step of a trial."""
    settings = copy.deepcopy(settings)
    lr = settings.get("lr")
    if isinstance(lr, torch.Tensor):
        settings["lr"] = torch.full_like(lr, LR)
    elif lr is not None:
        settings["lr"] = LR
    return settings


def same_settings(settings: dict[str, Any]) -> str:
    """Text that is equal for settings that ask for the same trial."""
    return repr(sorted((k, v) for k, v in settings.items() if k not in ("lr", "initial_lr")))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Not bit for bit: an element at a vector's end may be computed with other instructions.
    return torch.allclose(a, b, _RTOL, _ATOL, equal_nan=True)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an attribute of any kind: what cannot be copied is shared
        return value
