"""A model that gets more parameters to train while it trains, as fine-tuning callbacks have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from wingbeat import sync
from wingbeat.sync.upgrade import KEPT


def change(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Any,
    what: Callable[[], object],
) -> None:
    """Do ``what`` to a model and an optimizer that are plain meanwhile; every worker calls this.

    Residuals and averages go on; a size of buckets that is being found is looked for anew.

    Raises:
        UsageError: what `wingbeat.distribute` refuses.
    """
    before = optimizer.state_dict().get(KEPT)
    sync.release(module, optimizer)
    what()
    sync.distribute(module, optimizer, strategy)
    if before:
        state = optimizer.state_dict()
        state[KEPT] = _with(state.get(KEPT) or {}, before)
        optimizer.load_state_dict(state)


def _with(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept, with the values of ``before`` for all that was there then."""
    inner = {
        key: _with(now.get(key) or {}, value)
        for key, value in before.items()
        if isinstance(value, Mapping)
    }
    return {**now, **before, **inner}


class Frozen:
    """Which parameters are not trained yet, and what adds them to an optimizer.

    Args:
        module: as it was distributed.
        optimizer: of its parameters.
        changed: has something done to both while they are plain.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        changed: Callable[[Callable[[], object]], None],
    ) -> None:
        self._params = [param for param in module.parameters() if not param.requires_grad]
        self._optimizer, self._changed = optimizer, changed
        self.add_through(optimizer)

    def add_through(self, wrapper: Any) -> None:
        """Have the optimizer, or what Lightning has wrapped around it, take param groups."""
        vars(wrapper)["add_param_group"] = self._add

    def _add(self, group: dict[str, Any]) -> None:
        # The method is looked up when the optimizer is plain.
        self._changed(lambda: self._optimizer.add_param_group(group))

    def thawed(self) -> bool:
        """Whether one of them is trained by now."""
        return any(param.requires_grad for param in self._params)

    def let_go(self) -> None:
        """Leave the optimizer as it was."""
        vars(self._optimizer).pop("add_param_group", None)
