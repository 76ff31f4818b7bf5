"""Hooks that survive a copy of the model: in the copy they do nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from wingbeat.engine.updates.ambient import recording, unrecorded


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

    @property
    def __name__(self) -> str:
        raise AttributeError(_UNNAMED)


class ForwardHook(ModuleHook):
    """Before a forward. One that is recorded is no part of training.

    What it reads is brought up to date, outside of the recording, and nothing else is done: on one
    worker alone a model may be traced or exported at any time.
    """

    def __call__(self, *args: Any) -> None:
        """Pass the hook's arguments on, while the engine lives."""
        # `torch.export` with strict=True compiles this call too; it has asked for the parameters.
        if not (torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling()):
            super().__call__(*args)

    def run(self, args: tuple[Any, ...]) -> None:
        """Do so in ordinary Python."""
        if not recording():
            super().run(args)
            return
        engine = self._engine()
        if engine is not None:
            with unrecorded():
                engine.flush()

    def run_in_compiled(self, args: tuple[Any, ...]) -> None:
        """The same where ``torch.compile`` has compiled what is around the call."""
        if recording():
            self.run(args)
        else:
            super().run_in_compiled(args)


_UNNAMED = (
    "torch.jit.script() cannot compile a part or a copy of a model that wingbeat has distributed, "
    "as it would compile wingbeat's hooks too: script the model itself, which leaves them out, or "
    "call wingbeat.release(model, optimizer) before"
)


@torch._disable_dynamo
def _from_compiled_code(hook: ModuleHook, args: tuple[Any, ...]) -> None:
    hook.run_in_compiled(args)


class _Inert:
    def __call__(self, *args: Any) -> None:
        pass

    @property
    def __name__(self) -> str:
        raise AttributeError(_UNNAMED)


def _inert() -> _Inert:
    return _Inert()
