"""Runs any torch optimizer on some of its parameters, with an earlier moment's settings and modes.

A deferred step runs inside some forward, and must not depend on its modes: inference mode would
make the optimizer's state unusable in training, autocast would change its rounding, and a mode that
records operations would record the step's as part of the forward.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from wingbeat.engine.gradients.bucket import Slot
from wingbeat.engine.updates.trials import bare_step
from wingbeat.errors import UsageError

GroupSnapshot = list[dict[str, Any]]
"""Each param group's settings (learning rate and so on) at the moment of ``step()``."""

State = defaultdict[Any, dict[str, Any]]
"""An optimizer's state, by tensor and name, as ``torch.optim.Optimizer.state``."""

_CLOSURE = "closure"

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class StepArguments:
    """The arguments of one call of ``optimizer.step``: a closure, and others.

    Attributes:
        closure: evaluates the loss; None if not given.
    """

    def __init__(
        self,
        step: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._args, self._kwargs = args, dict(kwargs or {})
        self._place: int | str | None = None
        found: Any = None
        if _CLOSURE in self._kwargs:
            self._place, found = _CLOSURE, self._kwargs[_CLOSURE]
        elif args and step is not None:
            position = _closure_position(step)
            if position is not None and position < len(args):
                self._place, found = position, args[position]
        if found is not None and not callable(found):
            found = self._place = None  # another argument is in the closure's position
        self.closure: Callable[[], Any] | None = found

    @property
    def others(self) -> bool:
        """Whether there are arguments other than a closure."""
        return len(self._args) + len(self._kwargs) > (self._place is not None)

    def with_closure(
        self, closure: Callable[[], Any] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``closure`` in place of the closure."""
        args, kwargs = self._args, dict(self._kwargs)
        if isinstance(self._place, str):
            kwargs[self._place] = closure
        elif self._place is not None:
            args = (*args[: self._place], closure, *args[self._place + 1 :])
        elif closure is not None:
            args = (closure, *args)
        return args, kwargs

    def refuse_others(self, where: str, instead: str) -> None:
        """Raise a `UsageError` for arguments other than a closure, which would be lost."""
        if self.others:
            shown = [f"{value!r:.40}" for value in self._args]
            shown += [f"{name}={value!r:.40}" for name, value in self._kwargs.items()]
            text = ", ".join(shown).replace("\n", " ")
            raise UsageError(
                f"optimizer.step({text}) {where}: the optimizer is run on parts of parameters or "
                "at another time, without the arguments of this call; set them in its "
                f"param_groups, or use {instead}"
            )


def _closure_position(step: Callable[..., Any]) -> int | None:
    params = list(inspect.signature(step).parameters.values())[1:]
    for place, param in enumerate(params):
        # A step that takes *args is probably called like torch's own steps.
        if param.name == _CLOSURE or param.kind is inspect.Parameter.VAR_POSITIONAL:
            return place
    return None


class Stepper:
    """Splits one ``step()`` into several, one for each bucket whose gradients have arrived.

    Correct for every optimizer that updates each parameter from its own gradient and state, which
    `trials` determines.

    Attributes:
        stepping: whether the optimizer's own code is running.
        in_parts: whether it runs on some of its parameters, in temporary groups.
        arguments: of the user's current call of ``step``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plain_step: Any) -> None:
        self._optimizer = optimizer
        self._plain_class = type(optimizer)
        self._plain_step = plain_step
        # By identity, because a tensor's hash is a call into Python.
        self._members: dict[int, torch.Tensor] = {}
        self._group_of: dict[int, int] = {}
        self._slots: Sequence[Slot] = ()
        self.stepping = False
        self.in_parts = False
        self.arguments = StepArguments()
        self.refresh()

    def follow(self, slots: Sequence[Slot]) -> None:
        """Keep ``owned`` of these slots from now on."""
        self._slots = slots
        self._mark()

    def _mark(self) -> None:
        for slot in self._slots:
            slot.owned = id(slot.param) in self._group_of

    def refresh(self) -> None:
        """Read again which group each parameter belongs to."""
        grouped = self._grouped()
        if grouped != self._group_of:
            groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
            self._members = {id(param): param for group in groups for param in group["params"]}
            self._group_of = grouped
            self._mark()

    def _grouped(self) -> dict[int, int]:
        groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
        return {id(param): i for i, group in enumerate(groups) for param in group["params"]}

    def refuse_regrouped(self) -> None:
        """Raise a `UsageError` if the groups' parameters have changed since they were read."""
        if self._grouped() != self._group_of:
            raise UsageError(
                "the optimizer's param groups hold other parameters than at distribute(), which "
                'is not possible with a divided optimizer (shard_optimizer, update="server"): call '
                "wingbeat.release(model, optimizer), change them, and distribute() again"
            )

    def group_of(self, param: torch.Tensor) -> int | None:
        """Return the number of the group that contains ``param``, or None."""
        return self._group_of.get(id(param))

    def params(self) -> list[torch.Tensor]:
        """Return all the optimizer's parameters."""
        return list(self._members.values())

    def snapshot(self) -> GroupSnapshot:
        """Copy the groups' settings, because a scheduler may change them before the update."""
        self.refresh()  # the user may have moved parameters between groups, or removed them
        groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
        return [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in groups
        ]

    def whole_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the optimizer's own step on all its parameters, with the arguments of the call."""
        args, kwargs = self.arguments.with_closure(closure)
        with self.inside():
            return self._plain_step(self._optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def calling(self, arguments: StepArguments) -> Iterator[None]:
        """Set `arguments` within the context, during the user's call of ``step``."""
        outer, self.arguments = self.arguments, arguments
        try:
            yield
        finally:
            self.arguments = outer

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Set `stepping` within the context."""
        outer, self.stepping = self.stepping, True
        try:
            yield
        finally:
            self.stepping = outer

    @property
    def hooked(self) -> bool:
        """Whether the user has hooks that run before or after a step."""
        own = [self._optimizer.__dict__[name] for name in _HOOKS]
        return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))

    def run_hooks(self, when: str) -> None:
        """Run the user's and the global step hooks, ``"pre"`` or ``"post"``, once per step."""
        own = list(self._optimizer.__dict__[f"_optimizer_step_{when}_hooks"].values())
        if when == "pre":
            hooks = [*_global_optimizer_pre_hooks.values(), *own]
        else:
            hooks = [*own, *_global_optimizer_post_hooks.values()]
        for hook in hooks:
            hook(self._optimizer, (), {})

    def step(self, params: Iterable[torch.Tensor], snapshot: GroupSnapshot) -> None:
        """Update ``params`` from their ``grad`` with the settings in ``snapshot``."""
        state: State = self._optimizer.__dict__["state"]
        self.step_on(((param, param) for param in params), snapshot, state)

    def step_on(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        snapshot: GroupSnapshot,
        state: State,
    ) -> None:
        """Update stand-ins from their ``grad``, with the settings of their parameter's group.

        ``state`` contains the state of each stand-in; the first step fills it.
        """
        members: dict[int, list[torch.Tensor]] = {}
        for param, stand_in in pairs:
            group = self._group_of.get(id(param))
            if group is not None:
                members.setdefault(group, []).append(stand_in)
        groups = [{**snapshot[i], "params": chosen} for i, chosen in sorted(members.items())]
        inside = self._optimizer.__dict__
        # Hooks belong to the whole step, not to its parts. Only the bare step omits global hooks.
        has_global_hooks = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        step = bare_step(self._plain_step) if has_global_hooks else self._plain_step
        temporary = {"param_groups": groups, "state": state, **{name: {} for name in _HOOKS}}
        # Another object, as other threads may read the optimizer meanwhile. It has a plain class
        # without properties: optimizers read `state` for each parameter.
        runner = object.__new__(self._plain_class)
        runner.__dict__.update({**inside, **temporary})
        outer, self.in_parts = self.in_parts, True
        try:
            with self.inside():
                step(runner)
        finally:
            self.in_parts = outer
            for key, value in runner.__dict__.items():
                if key not in temporary and inside.get(key) is not value:
                    inside[key] = value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def step_outside(slotted: Container[int], stepper: Stepper, snapshot: GroupSnapshot) -> None:
    """Update frozen parameters that have a gradient and are in no bucket, by their identities."""
    others = [p for p in stepper.params() if id(p) not in slotted and p.grad is not None]
    if others:
        stepper.step(others, snapshot)


# -- modes of a thread --------------------------------------------------------------------

_RECORDERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def recording() -> bool:
    """Whether operations are recorded (`torch.jit.trace`, `torch.export`, `make_fx`) or fake."""
    if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        return True
    modes = _RECORDERS if torch._C._len_torch_dispatch_stack() else ()
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in modes)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Suspend all recording within the context."""
    with _untraced(), _dispatch_modes(()):
        yield


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


class Modes:
    """The modes at construction; ``device``: of the work, whose current stream is saved too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._autocast = [(kind, *_autocast_of(kind)) for kind in {"cpu", device.type}]
        self._functions = _get_current_function_mode_stack()
        self._dispatches = _get_current_dispatch_mode_stack()
        self._stream = _stream_of(device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the modes within the context, with gradients and inference mode off."""
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                self._enter_stream(stack, self._stream)
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            if torch._C._get_tracing_state() is not None:
                stack.enter_context(_untraced())
            stack.enter_context(torch.no_grad())
            for kind, enabled, dtype in self._autocast:
                if _autocast_of(kind) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if torch._C._functorch.peek_interpreter_stack() is not None:
                stack.enter_context(temporarily_clear_interpreter_stack())
            if not _same(_get_current_function_mode_stack(), self._functions):
                stack.enter_context(_function_modes(self._functions))
            if not _same(_get_current_dispatch_mode_stack(), self._dispatches):
                stack.enter_context(_dispatch_modes(self._dispatches))
            yield

    def _enter_stream(self, stack: contextlib.ExitStack, stream: torch.Stream) -> None:
        if stream.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "an update of parameters is due while a CUDA graph is being captured: call "
                "model.synchronize() before the capture"
            )
        here = torch.accelerator.current_stream(self._device)
        if here != stream:
            stream.wait_stream(here)
            stack.enter_context(stream)
            stack.callback(here.wait_stream, stream)


def _stream_of(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def _autocast_of(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


@contextlib.contextmanager
def _function_modes(modes: Sequence[Any]) -> Iterator[None]:
    outer = []
    while torch._C._len_torch_function_stack() > 0:
        outer.append(torch._C._pop_torch_function_stack())
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            torch._C._pop_torch_function_stack()
        for mode in reversed(outer):
            torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def _dispatch_modes(modes: Sequence[Any]) -> Iterator[None]:
    with _disable_current_modes():
        for mode in modes:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in modes:
                _pop_mode()
