"""Whether a call on a tensor reads its values, or only looks at what kind of tensor it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "grad", "requires_grad", "ndim", "layout", "is_leaf", "grad_fn"}
    | {"is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_mkldnn"}
    | {"is_nested", "names", "itemsize", "nbytes", "output_nr", "_post_accumulate_grad_hooks"}
    | {"_backward_hooks", "retains_grad", "grad_dtype", "_version"}
)
_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous"}
    | {"is_floating_point", "is_complex", "is_same_size", "get_device", "storage_offset"}
    | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__"}
    | {"retain_grad", "is_inference", "is_signed", "__hash__"}
)


def reads_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Whether ``func``, as ``__torch_function__`` gets it, reads or writes elements.

    >>> reads_values(torch.Tensor.mul, ())
    True
    >>> reads_values(torch.Tensor.size, ())
    False
    """
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _ATTRIBUTES
    if name == "type":
        return len(args) > 1 or bool(kwargs)  # with a dtype it converts
    return name not in _METHODS


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a call's arguments, in nested lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
