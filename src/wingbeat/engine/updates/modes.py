"""Saves and restores a thread's modes: autocast, function and dispatch modes, streams.

A deferred step runs inside some forward, and must not depend on it: inference mode would make its
state unusable in training, autocast would change its rounding, and a mode that records operations
would record the step's as part of the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from wingbeat.errors import UsageError

_RECORDERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def recording() -> bool:
    """Whether operations are recorded (`torch.jit.trace`, `torch.export`, `make_fx`) or fake."""
    if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in _RECORDERS)


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
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the modes within the context, with gradients and inference mode off."""
        with contextlib.ExitStack() as stack:
            self._enter_stream(stack)
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

    def _enter_stream(self, stack: contextlib.ExitStack) -> None:
        if self._stream is None:
            return
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "an update of parameters is due while a CUDA graph is being captured: call "
                "model.synchronize() before the capture"
            )
        here = torch.cuda.current_stream(self._device)
        if here != self._stream:
            self._stream.wait_stream(here)
            stack.enter_context(torch.cuda.stream(self._stream))
            stack.callback(here.wait_stream, self._stream)


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
