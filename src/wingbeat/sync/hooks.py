"""Hooks that survive a copy of the model: in the copy they do nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class WeakCall:
    """Calls a bound method while its object lives, and does not keep that alive."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        """Pass the arguments on."""
        method = self._method()
        if method is not None:
            method(*args)


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
        if torch.compiler.is_compiling():
            _from_compiled_code(self, args)
        else:
            self.run(args)

    def run(self, args: tuple[Any, ...]) -> None:
        """Do so in ordinary Python."""
        engine = self._engine()
        if engine is not None:
            getattr(engine, self._method)(*args)

    def run_in_compiled(self, args: tuple[Any, ...]) -> None:
        """The same where ``torch.compile`` has compiled what is around the call."""
        engine = self._engine()
        if engine is not None:
            engine.enter_compiled()
        self.run(args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inert, ())


@torch._disable_dynamo
def _from_compiled_code(hook: ModuleHook, args: tuple[Any, ...]) -> None:
    hook.run_in_compiled(args)


class _Inert:
    def __call__(self, *args: Any) -> None:
        pass


def _inert() -> _Inert:
    return _Inert()
