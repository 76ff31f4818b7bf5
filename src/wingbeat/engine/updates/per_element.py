"""What an optimizer remembers of each element of a parameter: found out by trial.

Adam's two moments and a momentum have a value for each element, and can be averaged as parameters
are; a count of steps has none. No list can know every optimizer, so the optimizer at hand is run,
on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wingbeat.engine.updates.chance import kept_random_state
from wingbeat.engine.updates.twin import (
    Unfit,
    bare_step,
    copied_settings,
    make_twin,
    same_settings,
    try_step,
)
from wingbeat.errors import UsageError
from wingbeat.transport.text import first_line

OPTION = "average_state=True"
"""What asks for it, as users write it."""

_STEPS = 2
_SIZES = (3, 5, 7, 2)
"""Of test tensors along each dimension, so that no other shape is taken for theirs."""

_SIMPLE = (bool, int, float, str, type(None))

Names = Mapping[str, torch.dtype]
"""Of state with a value for each element, and the dtype that it has."""


class ElementState:
    """An optimizer's state, as far as it has a value for each element of a parameter.

    The optimizer, its parameters and the random numbers stay as they are: a twin makes the steps.

    Args:
        optimizer: the user's, before its class is changed.
        names: of the parameters whose state counts, by parameter.

    Raises:
        UsageError: it remembers what has no average, or cannot be tried; says what.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer, self._names = optimizer, names
        if isinstance(optimizer, torch.optim.LBFGS):
            raise _refusal(optimizer, "it keeps lists of earlier gradients")
        step = bare_step(type(optimizer).step)
        tried: dict[Any, Names] = {}
        self._known: dict[torch.Tensor, Names] = {}
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for param in (param for param in group["params"] if param in names):
                key = (max(param.ndim, 1), param.dtype, same_settings(settings))
                if key not in tried:
                    tried[key] = _tried(optimizer, step, settings, *key[:2])
                self._known[param] = tried[key]
        for param in self._known:
            self.values(param)

    def names(self, param: torch.Tensor) -> Names:
        """Return what is remembered of each element of ``param``; nothing if it is another's."""
        return self._known.get(param, {})

    def values(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return these values as they are now; some are missing before the first step.

        Raises:
            UsageError: there is more than the trial has shown, or of another kind.
        """
        known = self._known.get(param)
        if known is None:
            return {}
        found = {}
        for key, value in self._optimizer.__dict__["state"].get(param, {}).items():
            if key in known and value is not None:
                why = _no_average(value, param.shape)
                if why:
                    raise self._changed(param, key, why)
                found[key] = value
            elif _each_element(value):
                raise self._changed(param, key, "there, and was not when it was tried")
        return found

    def described(self) -> list[list[str]]:
        """Return what there is of each parameter, in words: equal where workers have the same."""
        return [
            [name, ", ".join(f"{key} ({_short(dtype)})" for key, dtype in sorted(kinds.items()))]
            for param, name in self._names.items()
            for kinds in [self.names(param)]
        ]

    def _changed(self, param: torch.Tensor, key: str, what: str) -> UsageError:
        return UsageError(
            f"{OPTION}: the optimizer's state {key!r} of parameter {self._names[param]!r} is "
            f"{what}: keep the optimizer's options as they are at distribute(), or leave "
            "average_state out"
        )


def _tried(
    optimizer: torch.optim.Optimizer,
    step: Callable[[Any], Any],
    settings: dict[str, Any],
    dimensions: int,
    dtype: torch.dtype,
) -> Names:
    """Return what the optimizer remembers of tensors of so many dimensions after some steps."""
    shape = tuple(_SIZES[place % len(_SIZES)] for place in range(dimensions))
    twin = make_twin(optimizer)
    param = torch.nn.Parameter(_drawn(0, shape, dtype))
    first = param.detach().clone()
    try:
        with kept_random_state([]):
            for number in range(1, _STEPS + 1):
                param.grad = _drawn(number, shape, dtype)
                try_step(twin, step, {**copied_settings(settings), "params": [param]})
    except Unfit as error:
        raise _refusal(optimizer, str(error)) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise _refusal(optimizer, f"it cannot be tried on a small tensor: {reason}") from None
    if torch.equal(param, first):
        raise _refusal(optimizer, "it does not update what its param groups hold by itself")
    if any(key is not param for key in twin.state):
        raise _refusal(optimizer, "it remembers what belongs to no parameter")
    return _sorted_out(optimizer, twin.state.get(param, {}), param.shape)


def _sorted_out(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], shape: torch.Size
) -> Names:
    each = {}
    for key, value in state.items():
        if _each_element(value):
            why = _no_average(value, shape)
            if why:
                raise _refusal(optimizer, f"its state {key!r} is {why}")
            each[key] = value.dtype
    return each


def _each_element(value: Any) -> bool:
    """Whether it is more than one number, or a name."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1 or type(value) is not torch.Tensor
    return not (
        type(value) in _SIMPLE
        or (type(value) is tuple and all(type(item) in _SIMPLE for item in value))
    )


def _no_average(value: Any, shape: Sequence[int]) -> str:
    """Say why values have no average with other workers'; empty if they have."""
    if type(value) is not torch.Tensor:
        return f"a {type(value).__name__}"
    if tuple(value.shape) != tuple(shape):
        return f"of shape {tuple(value.shape)} where the parameter's is {tuple(shape)}"
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        return f"{_short(value.dtype)}, and no plain floating-point numbers"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _refusal(optimizer: torch.optim.Optimizer, why: str) -> UsageError:
    return UsageError(
        f"{OPTION}: the state of {type(optimizer).__name__} cannot be averaged: {why}; leave "
        "average_state out, or take an optimizer whose state is shaped as its parameters, such as "
        "SGD or AdamW"
    )
