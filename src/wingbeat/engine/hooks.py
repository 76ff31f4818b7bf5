"""The engine's hooks on a model, its parameters and its optimizer.

``copy.deepcopy`` and ``pickle`` copy a module's hooks. A copy (for example for a moving average) is
a plain model, so copied hooks have no effect. Hooks do not keep the engine alive.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.bucketing import is_compiled
from wingbeat.engine.gradients.placed import (
    GatherHook,
    InsideFailureHook,
    sum_partial,
    whole_groups,
)
from wingbeat.engine.updates.stepper import recording, unrecorded
from wingbeat.errors import UsageError


class Hooks:
    """All hooks of an engine; ``gradients``: also on its parameters.

    Attributes:
        arrivals: which parameters have got a gradient in the running backward.
    """

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
        slots = engine.slots if gradients else ()
        if engine.update.defers:
            gathering = functools.partial(_before_gather, ref)
            self._others += [GatherHook(each, gathering) for each in whole_groups(model)]
        if engine.world.inside is not None:
            groups = whole_groups(model)
            self._others += [InsideFailureHook(each, engine.world) for each in groups]
        self.arrivals = Arrivals(functools.partial(_call, ref, "on_grad"), slots)
        self.arrivals.watch(engine.buckets)
        self._others += self.arrivals.hooks
        self._others += sum_partial_gradients(slots)
        if gradients:
            self._others += [
                LastGradHook(param, functools.partial(_call, ref, "on_sparse_grad", index))
                for index, param in enumerate(engine.sparse.params)
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
        for handle in reversed(self._others):
            handle.remove()
        self._others.clear()


def sum_partial_gradients(slots: Iterable[Slot]) -> list[Any]:
    """Return hooks that sum gradients over the ranks of a replica that have terms of them."""
    return [
        slot.param.register_post_accumulate_grad_hook(sum_partial) for slot in slots if slot.placed
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

    def replace(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Run another ``hook`` in its place."""
        hooks = self._param._post_accumulate_grad_hooks
        if isinstance(hooks, _HooksBeforeLast):
            hooks.replace_last(hook)

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

    def replace_last(self, hook: Callable[[torch.Tensor], None]) -> None:
        self._last = hook
        if _LAST in self:
            super().__setitem__(_LAST, hook)

    def __reduce__(self) -> Any:
        return OrderedDict, ([(k, v) for k, v in self.items() if k != _LAST],)


_LAST = -1
"""Less than any handle's id."""


class Arrivals:
    """Finds complete buckets with one call of the engine for each, not for each gradient.

    The first gradient of a backward calls the engine. From then on torch appends parameters to a
    list as their gradients arrive, because the list's ``append`` is in the hook that all share. In
    each bucket one parameter is watched: its hook calls the engine as before. If the bucket still
    lacks gradients then, one of these is watched instead. So in an order that does not change each
    bucket's last gradient is watched.

    Attributes:
        hooks: one for each slot.
        listing: whether gradients are appended to the list.
    """

    def __init__(self, call: Callable[[torch.Tensor], None], slots: Sequence[Slot]) -> None:
        self._call = call
        self._shared = functools.partial(call)
        self.hooks = [LastGradHook(slot.param, self._shared) for slot in slots]
        self._slots = slots
        self._watched: dict[Bucket, Slot] = {}
        self._list: list[torch.Tensor] = []
        self._arrived: set[int] = set()  # identities of parameters
        self.listing = False

    def watch(self, buckets: Iterable[Bucket]) -> None:
        """Watch a parameter of each of these buckets, and no others."""
        for slot in self._watched.values():
            self.hooks[slot.index].replace(self._shared)
        self._watched = {bucket: bucket.slots[-1] for bucket in buckets}
        for slot in self._watched.values():
            self.hooks[slot.index].replace(self._call)

    def begin(self) -> None:
        """List the gradients of the running backward."""
        self._list.clear()
        self._arrived.clear()
        self.listing = True
        self._share(self._list.append)

    def end(self) -> None:
        """Stop listing at the end of a backward; raises as `read`."""
        self.read()
        self.abandon()

    def abandon(self, *_args: Any) -> None:
        """Stop listing, as the backward has ended or was interrupted."""
        if self.listing:
            self.listing = False
            self._share(self._call)
            self._list.clear()

    def _share(self, call: Callable[[torch.Tensor], None]) -> None:
        # Exchanges what the one partial calls, in place of the hooks of all parameters.
        self._shared.__setstate__((call, (), {}, {}))  # type: ignore[attr-defined]

    def add(self, slot: Slot) -> bool:
        """Add a gradient for which the engine was called; return whether its bucket is complete."""
        self._list.append(slot.param)
        bucket = slot.bucket
        if self._watched[bucket] is not slot:
            return False
        self.read()
        missing = [each for each in bucket.slots if id(each.param) not in self._arrived]
        if missing:
            self.hooks[slot.index].replace(self._shared)
            self.hooks[missing[-1].index].replace(self._call)
            self._watched[bucket] = missing[-1]
        return not missing

    def read(self) -> None:
        """Read the list; raise a `UsageError` if a gradient has arrived twice."""
        count = len(self._list)  # other threads may append meanwhile
        new = list(map(id, self._list[:count]))
        del self._list[:count]
        if len(set(new)) < count or not self._arrived.isdisjoint(new):
            seen = self._arrived.union
            twice = next(each for i, each in enumerate(new) if each in seen(new[:i]))
            raise arrived_twice(next(s.name for s in self._slots if id(s.param) == twice))
        self._arrived.update(new)


def arrived_twice(name: str) -> UsageError:
    """Return the error for a parameter that gets its gradient twice in one backward."""
    return UsageError(
        f"parameter {name!r} got its gradient twice in one backward, as in two reentrant "
        "checkpoints that share it; use checkpoint(..., use_reentrant=False)"
    )


def call_at_backward_end(
    engine: Any, method: str, then: Callable[..., None] | None = None
) -> weakref.ref[Any]:
    """Call an engine's method when the running backward ends, after earlier callbacks.

    The returned reference expires with that backward, even after an exception, and calls ``then``.
    """
    callback = functools.partial(_call, weakref.ref(engine), method)
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback, then)


# `torch.compile` would compile this call if the user compiles the code around the backward.
@torch._disable_dynamo
def _call(engine: weakref.ref[Any], method: str, *args: Any) -> None:
    alive = engine()
    if alive is not None:
        getattr(alive, method)(*args)


@torch._disable_dynamo
def _before_gather(engine: weakref.ref[Any], params: list[torch.Tensor]) -> torch.Event | None:
    alive = engine()
    return None if alive is None else alive.before_gather(params)


def in_backward() -> bool:
    """Whether this thread runs a backward, as when activations are recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


_BACKWARDS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


def threads_in_backward() -> set[int]:
    """Return the idents of threads that are inside ``torch.autograd.backward`` or ``grad``."""
    return {ident for ident, top in sys._current_frames().items() if _has_backward(top)}


def callers_of_backward() -> set[int]:
    """Return the idents of threads that may have called the running backward.

    That is this thread, unless a thread of autograd for a device runs it.
    """
    own = threading.get_ident()
    return {own} if _has_backward(sys._getframe()) else threads_in_backward()


def _has_backward(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _BACKWARDS:
            return True
        frame = frame.f_back
    return False


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
