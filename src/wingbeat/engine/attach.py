"""Puts an engine's hooks on a model, its parameters and its optimizer."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from wingbeat.engine.gradients.bucketing import is_opaque
from wingbeat.engine.hooks import ForwardHook, ModuleHook
from wingbeat.engine.last_hook import LastHook

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Slot
    from wingbeat.engine.gradients.sparse import SparseGradients


class Hooked(Protocol):
    """What the hooks are put on, and what they call: an engine."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sparse: SparseGradients

    @property
    def slots(self) -> list[Slot]:
        """One for each trained parameter with a dense gradient."""

    def on_grad(self, index: int) -> None:
        """Take in the gradient of slot ``index``."""

    def on_sparse_grad(self, index: int) -> None:
        """Take notice of the sparse gradient of parameter ``index`` of those that have one."""

    def readers(self) -> set[torch.nn.Module]:
        """Return the modules that have parameters or buffers of their own that are synchronised."""


class Hooks:
    """An engine's hooks, which do not keep it alive, and of which copies of the model have none.

    Args:
        engine: whose.
        gradients: whether it takes gradients in.
    """

    def __init__(self, engine: Hooked, *, gradients: bool = True) -> None:
        me = weakref.ref(engine)
        self._inner = list(_on_inner_modules(engine, me))
        self._others = [
            *(_on_parameters(engine, me) if gradients else ()),
            *_on_model(engine, me),
            *_on_optimizer(engine, me),
        ]

    def remove_inner(self) -> None:
        """Remove those on the forwards of modules inside of the model."""
        for handle in self._inner:
            handle.remove()
        self._inner.clear()

    def remove(self) -> None:
        """Remove them all."""
        self.remove_inner()
        for handle in self._others:
            handle.remove()
        self._others.clear()


def _on_parameters(engine: Hooked, me: weakref.ref[Hooked]) -> list[Any]:
    return [
        *(LastHook(s.param, functools.partial(_on_grad, me, s.index)) for s in engine.slots),
        *(
            LastHook(param, functools.partial(_on_sparse_grad, me, index))
            for index, param in enumerate(engine.sparse.params)
        ),
    ]


def _on_inner_modules(engine: Hooked, me: weakref.ref[Hooked]) -> Iterator[Any]:
    inside, readers = set(_inside_of_compiled(engine.model)), engine.readers()
    for module in engine.model.modules():
        if module is not engine.model and module not in inside and module in readers:
            yield module.register_forward_pre_hook(ForwardHook(me, "enter_module"))


def _on_model(engine: Hooked, me: weakref.ref[Hooked]) -> Iterator[Any]:
    for module in engine.model.modules():
        yield module.register_state_dict_pre_hook(ModuleHook(me, "before_state"))
        yield module.register_load_state_dict_pre_hook(ModuleHook(me, "before_load"))
    for method in ("enter_module", "enter_forward"):
        yield engine.model.register_forward_pre_hook(ForwardHook(me, method), prepend=True)


def _inside_of_compiled(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules whose calls are part of a compiled call of another one."""
    for outer in model.modules():
        if is_opaque(outer):
            yield from (module for module in outer.modules() if module is not outer)


def _on_optimizer(engine: Hooked, me: weakref.ref[Hooked]) -> list[Any]:
    optimizer = engine.optimizer
    before = ModuleHook(me, "before_state")
    return [
        optimizer.register_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_pre_hook(ModuleHook(me, "before_loading")),
        optimizer.register_load_state_dict_post_hook(ModuleHook(me, "after_load")),
    ]


def in_backward() -> bool:
    """Whether this thread is running a backward, as when activations are computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether this thread is inside of a transform of ``torch.func``, such as ``grad`` or ``vmap``.

    It refuses to see a tensor changed that is not its argument.
    """
    return torch._C._functorch.maybe_current_level() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Have what runs inside done as if no transform was there, to tensors that are none of its."""
    return torch._C._DisableFuncTorch() if in_transform() else contextlib.nullcontext()


def on_backward_end(engine: Any, method: str = "end_backward") -> weakref.ref[Any]:
    """Have the engine called when the backward that is running ends, after earlier requests.

    Returns:
        A reference that is dead as soon as that backward is over, also by an exception: only
        autograd keeps what it refers to.
    """
    callback = functools.partial(_on_backward_end, weakref.ref(engine), method)
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


# `torch.compile` would compile what a backward calls, if a compiled function of the user runs it.
@torch._disable_dynamo
def _on_grad(engine: weakref.ref[Hooked], index: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.on_grad(index)


@torch._disable_dynamo
def _on_sparse_grad(engine: weakref.ref[Hooked], index: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.on_sparse_grad(index)


@torch._disable_dynamo
def _on_backward_end(engine: weakref.ref[Hooked], method: str) -> None:
    alive = engine()
    if alive is not None:
        getattr(alive, method)()
