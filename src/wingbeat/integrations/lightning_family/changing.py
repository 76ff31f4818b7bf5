"""Adds trained parameters to a distributed model, for fine-tuning callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from wingbeat.engine.api import distribute, release
from wingbeat.engine.upgrade import EXTRA, engine_of


def change(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Any,
    what: Callable[[], object],
) -> None:
    """Call ``what`` while model and optimizer are not distributed; every worker calls this.

    Residuals and averages are kept; tuning of the bucket size starts again. Raises UsageError if
    `wingbeat.distribute` rejects the changed model.
    """
    before = optimizer.state_dict().get(EXTRA)
    release(module, optimizer)
    what()
    distribute(module, optimizer, strategy)
    if before:
        state = optimizer.state_dict()
        state[EXTRA] = _with(state.get(EXTRA) or {}, before)
        optimizer.load_state_dict(state)


def _with(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``now`` with the values of ``before``, recursively."""
    inner = {
        key: _with(now.get(key) or {}, value)
        for key, value in before.items()
        if isinstance(value, Mapping)
    }
    return {**now, **before, **inner}


def let_grow(
    optimizer: torch.optim.Optimizer, changed: Callable[[Callable[[], object]], None]
) -> None:
    """Make ``add_param_group`` work on a distributed optimizer, also through its wrapper."""
    engine = engine_of(optimizer)
    assert engine is not None
    engine.add_group = lambda group: changed(lambda: optimizer.add_param_group(group))
