"""A parameter's hooks after accumulation, of which the engine's stays the last.

Hooks of users see the gradient as it is without any distribution, and may change it, as under DDP;
also those that were registered after `distribute`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


class HooksBefore(OrderedDict[int, Any]):
    """Hooks by their handles' ids, in the order of registration, before one that is always last."""

    def __init__(self, earlier: Any, last: Callable[[torch.Tensor], None]) -> None:
        super().__init__(earlier or {})
        self._last = last
        super().__setitem__(_LAST, last)

    def __setitem__(self, key: int, hook: Any) -> None:
        # torch runs them in the order in which they stand in the dict.
        removed = super().pop(_LAST, None) is None
        super().__setitem__(key, hook)
        if not removed:
            super().__setitem__(_LAST, self._last)

    def remove_last(self) -> None:
        """Keep only the others from here on."""
        super().pop(_LAST, None)

    def __reduce__(self) -> Any:
        return OrderedDict, ([(k, v) for k, v in self.items() if k != _LAST],)


_LAST = -1
"""No handle has this id: they count from 0."""


class LastHook:
    """Runs ``hook(param)`` after each accumulation into ``param.grad`` and all its other hooks."""

    def __init__(self, param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        self._param = param
        param._post_accumulate_grad_hooks = HooksBefore(
            param._post_accumulate_grad_hooks,
            hook,
        )

    def remove(self) -> None:
        """Leave the other hooks as they are."""
        hooks = self._param._post_accumulate_grad_hooks
        if isinstance(hooks, HooksBefore):
            hooks.remove_last()
