"""The engine's hooks on a model, its parameters and its optimizer.

``copy.deepcopy`` and ``pickle`` copy a module's hooks. A copy (for example for a moving average) is
a plain model, so copied hooks have no effect. Hooks do not keep the engine alive.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from wingbeat.engine.gradients.bucketing import is_compiled
from wingbeat.engine.updates.modes import recording, unrecorded

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Slot
    from wingbeat.engine.gradients.sparse import SparseGradients


class HookTarget(Protocol):
    """The part of the engine that hooks are registered for, and call."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sparse: SparseGradients

    @property
    def slots(self) -> list[Slot]:
        """One for each trained parameter with a dense gradient."""

    def on_grad(self, index: int) -> None:
        """Handle the accumulated gradient of slot ``index``."""

    def on_sparse_grad(self, index: int) -> None:
        """Handle the accumulated gradient of sparse parameter ``index``."""

    def readers(self) -> set[torch.nn.Module]:
        """Return the modules that directly hold synchronised parameters or buffers."""


class Hooks:
    """All hooks of an engine."""

    def __init__(self, engine: HookTarget, *, gradients: bool = True) -> None:
        ref = weakref.ref(engine)
        self._inner = list(_on_inner_modules(engine, ref))
        self._others = [
            *(_on_parameters(engine, ref) if gradients else ()),
            *_on_model(engine, ref),
            *_on_optimizer(engine, ref),
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


def _on_parameters(engine: HookTarget, ref: weakref.ref[HookTarget]) -> list[Any]:
    return [
        *(LastGradHook(s.param, functools.partial(_on_grad, ref, s.index)) for s in engine.slots),
        *(
            LastGradHook(param, functools.partial(_on_sparse_grad, ref, index))
            for index, param in enumerate(engine.sparse.params)
        ),
    ]


def _on_inner_modules(engine: HookTarget, ref: weakref.ref[HookTarget]) -> Iterator[Any]:
    inside, readers = set(_inside_of_compiled(engine.model)), engine.readers()
    for module in engine.model.modules():
        if module is not engine.model and module not in inside and module in readers:
            yield module.register_forward_pre_hook(ForwardHook(ref, "before_module_forward"))


def _on_model(engine: HookTarget, ref: weakref.ref[HookTarget]) -> Iterator[Any]:
    for module in engine.model.modules():
        yield module.register_state_dict_pre_hook(ModuleHook(ref, "before_state_dict"))
        yield module.register_load_state_dict_pre_hook(ModuleHook(ref, "before_load_module"))
    for method in ("before_module_forward", "before_forward"):
        yield engine.model.register_forward_pre_hook(ForwardHook(ref, method), prepend=True)


def _inside_of_compiled(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for outer in model.modules():
        if is_compiled(outer):
            yield from (module for module in outer.modules() if module is not outer)


def _on_optimizer(engine: HookTarget, ref: weakref.ref[HookTarget]) -> list[Any]:
    optimizer = engine.optimizer
    before = ModuleHook(ref, "before_state_dict")
    return [
        optimizer.register_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_pre_hook(ModuleHook(ref, "before_load_state_dict")),
        optimizer.register_load_state_dict_post_hook(ModuleHook(ref, "after_load_state_dict")),
    ]


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


# `torch.compile` would compile this call if the user compiles the code around the backward.
@torch._disable_dynamo
def _on_grad(engine: weakref.ref[HookTarget], index: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.on_grad(index)


@torch._disable_dynamo
def _on_sparse_grad(engine: weakref.ref[HookTarget], index: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.on_sparse_grad(index)


def call_at_backward_end(engine: Any, method: str) -> weakref.ref[Any]:
    """Call an engine's method when the running backward ends, after earlier callbacks.

    The returned reference expires with that backward, even after an exception.
    """
    callback = functools.partial(_call, weakref.ref(engine), method)
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


@torch._disable_dynamo
def _call(engine: weakref.ref[Any], method: str) -> None:
    alive = engine()
    if alive is not None:
        getattr(alive, method)()


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
            _from_compiled_code(self, args)
        else:
            self.run(args)

    def run(self, args: tuple[Any, ...]) -> None:
        """Call the method from ordinary Python."""
        engine = self._engine()
        if engine is not None:
            getattr(engine, self._method)(*args)

    def run_in_compiled(self, args: tuple[Any, ...]) -> None:
        """Call the method from code compiled by ``torch.compile``."""
        engine = self._engine()
        if engine is not None:
            engine.before_compiled_forward()
        self.run(args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_no_hook, ())

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

    def run(self, args: tuple[Any, ...]) -> None:
        """Call the method from ordinary Python."""
        if not recording():
            super().run(args)
            return
        engine = self._engine()
        if engine is not None:
            with unrecorded():
                engine.flush()

    def run_in_compiled(self, args: tuple[Any, ...]) -> None:
        """Call the method from code compiled by ``torch.compile``."""
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


class _NoHook:
    def __call__(self, *args: Any) -> None:
        pass

    @property
    def __name__(self) -> str:
        raise AttributeError(_UNNAMED)


def _no_hook() -> _NoHook:
    return _NoHook()
