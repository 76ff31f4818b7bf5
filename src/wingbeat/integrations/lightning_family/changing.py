"""A model that gets more parameters to train while it trains, as fine-tuning callbacks have it."""

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
    """Do ``what`` to a model and an optimizer that are plain meanwhile; every worker calls this.

    Residuals and averages go on; a size of buckets that is being found is looked for anew.

    Raises:
        UsageError: what `wingbeat.distribute` refuses.
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
    """Return what is kept, with the values of ``before`` for all that was there then."""
    inner = {
        key: _with(now.get(key) or {}, value)
        for key, value in before.items()
        if isinstance(value, Mapping)
    }
    return {**now, **before, **inner}


def let_grow(
    optimizer: torch.optim.Optimizer, changed: Callable[[Callable[[], object]], None]
) -> None:
    """Have a distributed optimizer take param groups, also through what Lightning wraps around it.

    Args:
        optimizer: takes them when it is plain.
        changed: has something done to model and optimizer while they are.
    """
    engine = engine_of(optimizer)
    assert engine is not None
    engine.add_group = lambda group: changed(lambda: optimizer.add_param_group(group))
