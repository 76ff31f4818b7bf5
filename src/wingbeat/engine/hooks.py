"""The engine's hooks on a model, its parameters and its optimizer.

``copy.deepcopy`` and ``pickle`` copy a module's hooks. A copy (for example for a moving average) is
a plain model, so copied hooks have no effect. Hooks do not keep the engine alive.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from wingbeat.engine.gradients.bucketing import is_compiled
from wingbeat.engine.updates.stepper import recording, unrecorded


class Hooks:
    """All hooks of an engine; ``gradients``: also on its parameters."""

    def __init__(self, engine: Any, *, gradients: bool = True) -> None:
        ref = weakref.ref(engine)
        model, optimizer = engine.model, engine.optimizer
        compiled = (outer for outer in model.modules() if is_compiled(outer))
        skipped = {inner for outer in compiled for inner in outer.modules() if inner is not outer}
        skipped.add(model)
        readers = engine.readers() - skipped
        self._inner: list[Any] = [
            module.register_forward_pre_hook(InnerHook(ref, "before_module_forward"))
            for module in model.modules()
            if module in readers
        ]
        self._others: list[Any] = []
        if gradients:
            dense = ((slot.param, "on_grad", slot.index) for slot in engine.slots)
            sparse = ((p, "on_sparse_grad", i) for i, p in enumerate(engine.sparse.params))
            self._others += [
                LastGradHook(param, functools.partial(_call, ref, method, index))
                for param, method, index in (*dense, *sparse)
            ]
        before = ModuleHook(ref, "before_state_dict")
        loading = ModuleHook(ref, "before_load_module")
        for module in model.modules():
            self._others.append(module.register_state_dict_pre_hook(before))
            self._others.append(module.register_load_state_dict_pre_hook(loading))
        self._others += [
            model.register_forward_pre_hook(
                ForwardHook(ref, "before_module_forward"), prepend=True
            ),
            model.register_forward_pre_hook(ForwardHook(ref, "before_forward"), prepend=True),
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_pre_hook(ModuleHook(ref, "before_load_state_dict")),
            optimizer.register_load_state_dict_post_hook(ModuleHook(ref, "after_load_state_dict")),
        ]

    def remove_inner(self) -> None:
        """Remove the forward hooks on modules inside the model."""
        for handle in self._inner:
            handle.remove()
        self._inner.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        self.remove_inner()
        for handle in self._others:
            handle.remove()
        self._others.clear()


# -- hooks on gradients -------------------------------------------------------------------


class LastGradHook:
    """Runs ``hook(param)`` after each accumulation into ``param.grad``, after all other hooks.

    As under DDP, users' hooks see the gradient of this worker only, and may change it, even if they
    were registered after `distribute`.
    """

    def __init__(self, param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        self._param = param
        param._post_accumulate_grad_hooks = _HooksBeforeLast(
            param._post_accumulate_grad_hooks, hook
        )

    def remove(self) -> None:
        """Remove this hook only."""
        hooks = self._param._post_accumulate_grad_hooks
        if isinstance(hooks, _HooksBeforeLast):
            hooks.pop(_LAST, None)


class _HooksBeforeLast(OrderedDict[int, Any]):
    """Hooks by their handles' ids, in the order of registration, of which one stays last."""

    def __init__(self, earlier: Any, last: Callable[[torch.Tensor], None]) -> None:
        super().__init__(earlier or {})
        self._last = last
        super().__setitem__(_LAST, last)

    def __setitem__(self, key: int, hook: Any) -> None:
        # Torch runs hooks in the order of the dict.
        removed = super().pop(_LAST, None) is None
        super().__setitem__(key, hook)
        if not removed:
            super().__setitem__(_LAST, self._last)

    def __reduce__(self) -> Any:
        return OrderedDict, ([(k, v) for k, v in self.items() if k != _LAST],)


_LAST = -1
"""Less than any handle's id."""


def call_at_backward_end(engine: Any, method: str) -> weakref.ref[Any]:
    """Call an engine's method when the running backward ends, after earlier callbacks.

    The returned reference expires with that backward, even after an exception.
    """
    callback = functools.partial(_call, weakref.ref(engine), method)
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


# `torch.compile` would compile this call if the user compiles the code around the backward.
@torch._disable_dynamo
def _call(engine: weakref.ref[Any], method: str, *args: Any) -> None:
    alive = engine()
    if alive is not None:
        getattr(alive, method)(*args)


def in_backward() -> bool:
    """Whether this thread runs a backward, as when activations are recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether this thread is inside a transform of ``torch.func``, such as ``grad`` or ``vmap``.

    A transform refuses changes to tensors that are not its arguments.
    """
    return torch._C._functorch.maybe_current_level() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Suspend transforms of ``torch.func`` within the context."""
    return torch._C._DisableFuncTorch() if in_transform() else contextlib.nullcontext()


# -- hooks on modules ---------------------------------------------------------------------


class WeakCall:
    """Calls a bound method while its object is alive, through a weak reference."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        """Call the method, if its object is alive."""
        method = self._method()
        if method is not None:
            method(*args)


class ModuleHook:
    """Calls a method of an engine while it is alive; a copy of the hook has no effect."""

    def __init__(self, engine: weakref.ref[Any], method: str) -> None:
        self._engine = engine
        self._method = method

    def __call__(self, *args: Any) -> None:
        """Call the method, if the engine is alive."""
        if torch.compiler.is_compiling():
            _run_outside_compiled(self, args)
        else:
            self.run(args)

    def run(self, args: tuple[Any, ...], *, compiled: bool = False) -> None:
        """Call the method; ``compiled``: from code compiled by ``torch.compile``."""
        engine = self._engine()
        if engine is not None:
            if compiled:
                engine.before_compiled_forward()
            getattr(engine, self._method)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_NoHook, ())

    @property
    def __name__(self) -> str:
        raise AttributeError(_UNNAMED)


class ForwardHook(ModuleHook):
    """Runs before a forward.

    A worker may trace or export its model at any time without the others. Such a forward is not
    training: parameters are made current outside the recording, and there is no further effect.
    """

    def __call__(self, *args: Any) -> None:
        """Call the method, except in compiled exports."""
        # `torch.export` with strict=True compiles this call too, after it has read the parameters.
        if not (torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling()):
            super().__call__(*args)

    def run(self, args: tuple[Any, ...], *, compiled: bool = False) -> None:
        """Call the method, unless operations are recorded."""
        if not recording():
            super().run(args, compiled=compiled)
            return
        engine = self._engine()
        if engine is not None:
            with unrecorded():
                engine.flush()


class InnerHook(ForwardHook):
    """Runs before the forward of a module inside the model, if something is pending for it."""

    def __call__(self, *args: Any) -> None:
        """Call the method only if the module's tensors are not current."""
        if torch.compiler.is_compiling():
            super().__call__(*args)
            return
        engine = self._engine()
        if engine is not None and engine.is_pending(args[0]):
            self.run(args)


_UNNAMED = (
    "torch.jit.script() cannot compile a part or a copy of a model that wingbeat has distributed, "
    "as it would compile wingbeat's hooks too: script the model itself, which leaves them out, or "
    "call wingbeat.release(model, optimizer) before"
)


@torch._disable_dynamo
def _run_outside_compiled(hook: ModuleHook, args: tuple[Any, ...]) -> None:
    hook.run(args, compiled=True)


class _NoHook:
    def __call__(self, *args: Any) -> None:
        pass

    @property
    def __name__(self) -> str:
        raise AttributeError(_UNNAMED)
