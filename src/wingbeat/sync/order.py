"""Which parameters each module's forward reads, and in what order: as execution shows.

The definition order of modules is not their execution order, and a module may read another's
parameters. So the first training forward is watched, function call by function call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

_LOOK_ONLY = frozenset(
    {"shape", "dtype", "device", "grad", "requires_grad", "ndim", "layout", "is_leaf", "grad_fn"}
    | {"is_cuda", "is_sparse", "is_quantized", "is_meta", "names", "itemsize", "nbytes"}
)
"""Attributes whose reading does not read the values."""


class ForwardOrder:
    """Learns, during one forward of ``model``, who reads which parameter and when first.

    Attributes:
        first_use: indices of the parameters, in the order of their first use.
        readers: for each parameter's index, the modules whose forward reads it.
    """

    def __init__(self, model: torch.nn.Module, params: Iterable[torch.Tensor]) -> None:
        self._model = model
        self._index = {param: i for i, param in enumerate(params)}
        self.first_use: list[int] = []
        self.readers: dict[int, set[torch.nn.Module]] = {i: set() for i in self._index.values()}
        self._stack: list[torch.nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._mode: _Watch | None = None
        for module in model.modules():
            for param in module._parameters.values():
                if param is not None and param in self._index:
                    self.readers[self._index[param]].add(module)

    @property
    def watching(self) -> bool:
        """Whether a forward is being watched now."""
        return self._mode is not None

    def start(self) -> None:
        """Watch from here on; called as the model's forward begins."""
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._stack = [self._model]
        self._mode = _Watch(self._see)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop watching. Safe to call when not watching."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: torch.nn.Module, _args: Any, _out: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass

    def _see(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            index = self._index.get(value)
            if index is not None and self._stack:
                if index not in self.first_use:
                    self.first_use.append(index)
                self.readers[index].add(self._stack[-1])
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._see(item)
        elif isinstance(value, dict):
            for item in value.values():
                self._see(item)


class _Watch(TorchFunctionMode):
    def __init__(self, see: Callable[[Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        getter = getattr(func, "__name__", "") == "__get__"
        looked_at = getattr(getattr(func, "__self__", None), "__name__", "") if getter else ""
        if looked_at not in _LOOK_ONLY:
            self._see(args)
            self._see(kwargs or {})
        return func(*args, **(kwargs or {}))
