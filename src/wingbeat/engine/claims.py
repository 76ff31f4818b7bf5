"""Which engine synchronises a parameter: a second one would average its gradient once more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from wingbeat.errors import UsageError

_owners: Any = WeakIdKeyDictionary()
"""By parameter, as long as it lives: a weak reference to its engine."""


def claim(engine: Any, params: Iterable[torch.Tensor]) -> None:
    """Note that ``params`` are the engine's, as long as it lives."""
    for param in params:
        _owners[param] = weakref.ref(engine)


def drop(engine: Any) -> None:
    """Forget what the engine has claimed."""
    for param in engine.trained:
        _owners.pop(param, None)


def check(model: torch.nn.Module) -> None:
    """Make sure that no other engine has a parameter of ``model``.

    Raises:
        UsageError: names the first such parameter.
    """
    for name, param in model.named_parameters():
        owner = _owners.get(param)
        engine = None if owner is None else owner()
        if engine is not None:
            other = type(engine.model).__name__.removeprefix("Distributed")
            raise UsageError(
                f"distribute(): parameter {name!r} of {type(model).__name__} is distributed "
                f"already, as a part of {other}: distribute one module that contains both "
                "(torch.nn.ModuleDict, say), with one optimizer, or release() the other first"
            )
