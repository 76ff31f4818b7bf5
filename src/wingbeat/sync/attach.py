"""Puts an engine's hooks on a model, its parameters and its optimizer."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.sync.hooks import ModuleHook

if TYPE_CHECKING:
    from wingbeat.sync.engine import Engine


def attach(engine: Engine) -> list[Any]:
    """Hook the engine in; return the handles that remove the hooks.

    The hooks do not keep the engine alive, and copies of the model have none.
    """
    me = weakref.ref(engine)
    return [*_on_parameters(engine, me), *_on_modules(engine, me), *_on_optimizer(engine, me)]


def _on_parameters(engine: Engine, me: weakref.ref[Engine]) -> list[Any]:
    return [
        slot.param.register_post_accumulate_grad_hook(functools.partial(_on_grad, me, slot.index))
        for slot in engine.slots
    ]


def _on_modules(engine: Engine, me: weakref.ref[Engine]) -> list[Any]:
    handles: list[Any] = []
    for module in engine.model.modules():
        handles += [
            module.register_forward_pre_hook(ModuleHook(me, "enter_module")),
            module.register_state_dict_pre_hook(ModuleHook(me, "before_state")),
            module.register_load_state_dict_pre_hook(ModuleHook(me, "before_state")),
        ]
    model = engine.model
    before = ModuleHook(me, "enter_forward")
    after = ModuleHook(me, "leave_forward")
    handles.append(model.register_forward_pre_hook(before, prepend=True))
    handles.append(model.register_forward_hook(after, always_call=True))
    return handles


def _on_optimizer(engine: Engine, me: weakref.ref[Engine]) -> list[Any]:
    optimizer = engine.optimizer
    before = ModuleHook(me, "before_state")
    return [
        optimizer.register_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(ModuleHook(me, "after_load")),
    ]


def on_backward_end(engine: Engine) -> None:
    """Have the engine called when the backward that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(
        functools.partial(_on_backward_end, weakref.ref(engine))
    )


def _on_grad(engine: weakref.ref[Engine], index: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.on_grad(index)


def _on_backward_end(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.end_backward()
