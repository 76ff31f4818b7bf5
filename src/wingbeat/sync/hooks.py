"""Hooks that survive a copy of the model: in the copy they do nothing."""

from __future__ import annotations

import weakref
from typing import Any


class ModuleHook:
    """Calls one method of an engine that it does not keep alive.

    ``copy.deepcopy`` and ``pickle`` copy a module's hooks; a copy (for a moving average, say)
    is a plain model, so that its hooks must have no effect.
    """

    def __init__(self, engine: weakref.ref[Any], method: str) -> None:
        self._engine = engine
        self._method = method

    def __call__(self, *args: Any) -> None:
        """Pass the hook's arguments on, while the engine lives."""
        engine = self._engine()
        if engine is not None:
            getattr(engine, self._method)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inert, ())


class _Inert:
    def __call__(self, *args: Any) -> None:
        pass


def _inert() -> _Inert:
    return _Inert()
