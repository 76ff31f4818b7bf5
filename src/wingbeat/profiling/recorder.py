"""Hooks that mark what an unchanged training loop does, on the clock of its device.

Nothing of the script is changed: an iteration ends with `torch.optim.Optimizer.step`, modules are
seen by torch's global hooks, and backward by `torch.autograd.backward`. On an accelerator a mark is
an event on the current stream, which is read after the last iteration, so nothing waits.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as steps

from wingbeat.engine.gradients.placed import is_placed
from wingbeat.errors import UsageError
from wingbeat.profiling import layers
from wingbeat.profiling.layers import Call, Description, Mark, Named, Timed

WARMUP = 3
"""Iterations before the first measured one: allocators, lazy modules, the optimizer's state."""

_KINDS: tuple[tuple[str, str], ...] = (
    ("Conv", "conv"),
    ("Linear", "linear"),
    ("BatchNorm", "bn"),
    ("LayerNorm", "layernorm"),
    ("Embedding", "embedding"),
    ("LSTM", "lstm"),
    ("MultiheadAttention", "attention"),
)
_COMPILED = (
    "a module is compiled (torch.compile), so it runs as one piece and its layers have no times of "
    "their own; profile it with TORCH_COMPILE_DISABLE=1"
)


class Stop(BaseException):
    """Ends the script: its measurement is complete, or `error` states why it cannot be.

    Not an `Exception`, so that a script's ``except Exception`` does not catch it.
    """

    def __init__(self, error: UsageError | None = None) -> None:
        super().__init__()
        self.error = error


class Recorder:
    """Marks iterations, with and without the hooks of layers in turn.

    The first `WARMUP` are not measured, and one more finds the model. Then ``count`` with hooks and
    ``count`` without alternate. ``progress`` gets a line for each.
    """

    def __init__(self, count: int, progress: Callable[[str], None]) -> None:
        self._count, self._progress = count, progress
        self._boundaries = 0
        self._device = torch.device("cpu")
        self._optimizer: object = None
        self._parameters: dict[int, Tensor] = {}
        self._roots: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._handles: list[Any] = []
        self._attached = self._compiled = self._in_step = False
        self._backwards = self._depth = 0
        self._hooked: list[tuple[list[tuple[str, Any, Call | None, str]], int]] = []
        self._plain: list[tuple[Any, Any]] = []
        self.description = Description({}, {})
        self._reset()

    # -- what the program runs in ------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._run_backward
        self._step_hooks = (
            steps.register_optimizer_step_pre_hook(self._step),
            steps.register_optimizer_step_post_hook(self._stepped),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._detach()
        torch.autograd.backward = self._backward
        for handle in self._step_hooks:
            handle.remove()

    @property
    def done(self) -> int:
        """Number of iterations so far."""
        return self._boundaries

    @property
    def total(self) -> int:
        """Number of iterations until the measurement is complete."""
        return WARMUP + 1 + 2 * self._count

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._device

    def watch(self, parameters: Iterator[Tensor]) -> None:
        """Set the parameters that are trained."""
        self._parameters = {id(p): p for p in parameters if p.requires_grad}
        first = next(iter(self._parameters.values()), None)
        if first is None:
            raise Stop(UsageError("the model has no parameter that requires gradients"))
        self._device = first.device

    def finish(self) -> tuple[list[Timed], list[float]]:
        """Return the iterations with hooks, and the milliseconds of those without."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        plain = [self._ms(begin, end) for begin, end in self._plain]
        return [self._timed(*each) for each in self._hooked], plain

    def _timed(self, entries: list[tuple[str, Any, Call | None, str]], batch: int) -> Timed:
        begin = entries[0][1]
        marks = [Mark(kind, self._ms(begin, at), call, name) for kind, at, call, name in entries]
        return layers.timed(marks, batch)

    # -- time --------------------------------------------------------------------------------------

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        if self._device.type == "cpu":
            return float(end - begin) * 1e3
        return float(begin.elapsed_time(end))

    def _mark(self, kind: str, call: Call | None = None, name: str = "") -> None:
        self._entries.append((kind, self._now(), call, name))

    def _reset(self) -> None:
        self._entries: list[tuple[str, Any, Call | None, str]] = []
        self._stack: list[list[Any]] = []
        self._calls: dict[str, int] = {}
        self._nodes: set[Any] = set()
        self._batch = self._backwards = 0

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._depth:
            raise Stop(
                UsageError(
                    "the optimizer steps inside backward; profile a script that calls step() after "
                    "backward()"
                )
            )
        self._in_step = True
        if self._attached:
            self._mark(layers.STEP)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._in_step = False
        if self._attached:
            self._mark(layers.STEP_END)
        if not self._backwards:
            return  # another optimizer's step after the same backward
        if self._optimizer is not None and optimizer is not self._optimizer:
            raise Stop(
                UsageError(
                    f"{type(self._optimizer).__name__} and {type(optimizer).__name__} step in "
                    "turns, each after a backward of its own; profile a script with one of them"
                )
            )
        self._optimizer = optimizer
        self.watch(p for group in optimizer.param_groups for p in group["params"])
        self.boundary()

    def boundary(self) -> None:
        """End an iteration and begin the next one, with hooks or without."""
        self._keep(self._now())
        self._boundaries += 1
        if self._compiled:
            raise Stop(UsageError(_COMPILED))
        if self._boundaries >= self.total:  # again, if the script caught it
            raise Stop
        measured = self._boundaries - WARMUP
        if measured < 1:
            self._progress(f"warming up, iteration {self._boundaries + 1} of {self.total}")
        else:
            self._progress(f"measuring, iteration {self._boundaries + 1} of {self.total}")
        if measured == 1:
            self._check_found()
        self._detach()
        self._reset()
        if measured >= 0 and measured % 2 == 0:
            self._attach()
        self._began = self._now()
        if self._attached:
            self._entries.append((layers.START, self._began, None, ""))

    def _keep(self, end: Any) -> None:
        """Keep a measured iteration."""
        if self._boundaries <= WARMUP:
            return
        if self._attached:
            self._hooked.append((self._entries, self._batch))
        else:
            self._plain.append((self._began, end))

    # -- backward ----------------------------------------------------------------------------------

    def _run_backward(self, *args: Any, **kwargs: Any) -> None:
        if self._in_step:
            raise Stop(
                UsageError(
                    "backward runs inside optimizer.step (a closure); profile a script with an "
                    "optimizer that takes none"
                )
            )
        if self._depth:
            raise Stop(
                UsageError(
                    "backward runs inside backward (activation checkpointing with "
                    "use_reentrant=True?); set use_reentrant=False"
                )
            )
        self._depth += 1
        if self._attached:
            self._mark(layers.BACKWARD)
        try:
            self._backward(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._attached:
            self._mark(layers.BACKWARD_END)
        self._backwards += 1
        self._calls.clear()
        self._stack.clear()

    # -- modules -----------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._attached = True
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave),
        ]
        for root in self._roots.values():
            handle = root.register_forward_pre_hook(self._count_samples, with_kwargs=True)
            self._handles.append(handle)
        for name, p in self._found().items():
            handle = p.register_post_accumulate_grad_hook(functools.partial(self._ready, name))
            self._handles.append(handle)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._attached = [], False

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        if self._depth or not torch.is_grad_enabled():
            return
        if not self._stack:
            if not self._is_root(module):
                return
            self._mark(layers.FORWARD)
        else:
            self._stack[-1][1] = True
        self._stack.append([module, False])

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self._compiled or self._depth or not self._stack:
            return
        if not any(each is module for each, _ in self._stack):
            return
        while True:  # a module whose forward raised has not left
            left, calls_others = self._stack.pop()
            if left is module:
                break
        if calls_others:
            return
        if _is_compiled(module):
            self._compiled = True  # before the hooks were there
        name = self._names.get(id(module))
        if name is None:
            return
        self._calls[name] = self._calls.get(name, 0) + 1
        call = Call(name, self._calls[name])
        for node in _nodes(output):
            if node not in self._nodes:  # of another module, whose output this one returns
                self._nodes.add(node)
                node.register_prehook(functools.partial(self._output, call))
        self._mark(layers.LAYER, call)

    def _output(self, call: Call, _gradients: Any) -> None:
        if self._attached:
            self._mark(layers.OUTPUT, call)

    def _ready(self, name: str, _parameter: Tensor) -> None:
        self._mark(layers.GRADIENT, None, name)

    def _count_samples(self, _module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if len(self._stack) == 1 and torch.is_grad_enabled() and not self._depth:
            first = next(tensors([args, kwargs]), None)
            if first is not None and first.dim():
                self._batch += first.shape[0]

    # -- names -------------------------------------------------------------------------------------

    def _is_root(self, module: nn.Module) -> bool:
        """Return whether a module, which no other calls, holds trained parameters."""
        if id(module) not in self._roots:
            if not any(id(p) in self._parameters for p in module.parameters()):
                return False
            self._roots[id(module)] = module
        return True

    def _check_found(self) -> None:
        """Describe the model, as found in the iteration before the first measured one."""
        if not self._roots:
            raise Stop(
                UsageError(
                    "no module that holds the optimizer's parameters was called before backward; "
                    "call the model as model(batch), in code without torch.compile "
                    "(TORCH_COMPILE_DISABLE=1)"
                )
            )
        self._name_modules()
        found = self._found()
        held = {id(p) for p in found.values()}
        missing = [p for key, p in self._parameters.items() if key not in held]
        if missing:
            raise Stop(
                UsageError(
                    f"{len(missing)} of the optimizer's parameters, the first of shape "
                    f"{tuple(missing[0].shape)}, belong to no module that is called; register "
                    "them in the model"
                )
            )
        self._describe(found)

    def _name_modules(self) -> None:
        shared = len(self._roots) > 1
        for i, root in enumerate(self._roots.values()):
            inner = root
            while isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                inner = inner.module
            title = type(inner).__name__ + (f"{i + 1}" if shared else "")
            for path, module in inner.named_modules():
                name = ".".join(each for each in path.split(".") if each != "_orig_mod")
                full = ".".join(filter(None, (title, name))) if shared else name or title
                self._names.setdefault(id(module), full)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for root in self._roots.values():
            for module in root.modules():
                if id(module) in self._names:
                    yield self._names[id(module)], module

    def _found(self) -> dict[str, Tensor]:
        """Return the parameters that require gradients, by full name; a shared one once."""
        found: dict[int, tuple[str, Tensor]] = {}
        self._holders: dict[str, list[str]] = {}
        for module_name, module in self._modules():
            for name, p in module.named_parameters(recurse=False):
                if p.requires_grad:
                    full, _ = found.setdefault(id(p), (f"{module_name}.{name}", p))
                    self._holders.setdefault(full, []).append(module_name)
        return dict(found.values())

    def _describe(self, found: Mapping[str, Tensor]) -> None:
        parameters = {}
        for full, p in found.items():
            if is_placed(p):
                raise Stop(
                    UsageError(
                        f"parameter {full} is a DTensor (fully_shard(), parallelize_module()): on "
                        "one process its layer has times of gathers and copies, to which wingbeat "
                        "plan --inside adds those of a job; profile the model before it is sharded"
                    )
                )
            if p.device != self._device:
                raise Stop(
                    UsageError(
                        f"parameter {full} is on {p.device}, others on {self._device}; a profile "
                        "is that of one device"
                    )
                )
            if p.dtype != torch.float32:
                raise Stop(
                    UsageError(
                        f"parameter {full} is {p.dtype}; profiles count float32 gradients; keep "
                        "the parameters in float32, with torch.autocast for the computation"
                    )
                )
            name = full.rpartition(".")[2]
            parameters[full] = Named(tuple(self._holders[full]), name, tuple(p.shape))
        kinds = {name: _kind(module) for name, module in self._modules()}
        own = {n for n, m in self._modules() if not type(m).__module__.startswith("torch.nn.")}
        self.description = Description(parameters, kinds, frozenset(own))


def _is_compiled(module: nn.Module) -> bool:
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _kind(module: nn.Module) -> str:
    name = type(module).__name__
    return next((kind for prefix, kind in _KINDS if name.startswith(prefix)), name.lower())


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def _nodes(output: Any) -> Iterator[Any]:
    """Yield the nodes of autograd that made an output."""
    for tensor in tensors(output):
        if tensor.grad_fn is not None:
            yield tensor.grad_fn
