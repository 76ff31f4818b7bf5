"""Parameters keep their dtype and device once they are distributed: buffers were made for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from wingbeat.errors import UsageError


def refuse_conversion(params: Iterable[torch.Tensor], fn: Callable[[torch.Tensor], Any]) -> None:
    """Refuse what ``Module.to``, ``double`` and the like do, if it makes other tensors of these.

    Raises:
        UsageError: ``fn`` makes another dtype of one of ``params``, or moves it.
    """
    kinds = {(p.dtype, p.device) for p in params}
    for dtype, device in kinds:
        made = fn(torch.empty(0, dtype=dtype, device=device))
        if isinstance(made, torch.Tensor) and (made.dtype, made.device) != (dtype, device):
            raise UsageError(
                f"parameters of this model are {_name(dtype)} on {device}, and cannot become "
                f"{_name(made.dtype)} on {made.device} after distribute(): convert or move the "
                "model first, then make the optimizer, then call distribute()"
            )


def refuse_new_layout(
    params: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    fn: Callable[[torch.Tensor], Any],
) -> None:
    """Refuse what would lay parameters out anew, as ``Module.to(memory_format=)``, if it matters.

    Fused optimizers go through memory, not through elements, and gradients stay as they are.

    Raises:
        UsageError: the optimizer is fused, and ``fn`` changes the strides of one of ``params``.
    """
    if not any(group.get("fused") for group in optimizer.__dict__["param_groups"]):
        return
    for dimensions in sorted({p.dim() for p in params}):
        sample = torch.empty((2,) * dimensions)
        made = fn(sample)
        if isinstance(made, torch.Tensor) and made.stride() != sample.stride():
            raise UsageError(
                f"{type(optimizer).__name__}(fused=True): parameters with {dimensions} dimensions "
                "cannot get another memory format after distribute(): convert the model first, "
                "then call distribute()"
            )


def check_kind(name: str, param: torch.Tensor, view: torch.Tensor) -> None:
    """Make sure that a parameter is still what its place in a bucket was made for.

    Raises:
        UsageError: its dtype, device or shape is another.
    """
    if (param.dtype, param.device, param.shape) != (view.dtype, view.device, view.shape):
        raise UsageError(
            f"parameter {name!r} was {_name(view.dtype)} {tuple(view.shape)} on {view.device} at "
            f"distribute() and is {_name(param.dtype)} {tuple(param.shape)} on {param.device} now: "
            "convert or move the model first, then make the optimizer, then call distribute()"
        )


def overlapping(params: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the indices of two parameters that share memory, if there are such."""
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + _extent(p), i)
        for i, p in enumerate(params)
        if p.numel()
    )
    for (device, _, end, i), (other, begin, _, j) in pairwise(spans):
        if device == other and begin < end:
            return min(i, j), max(i, j)
    return None


def refuse_overlapping(params: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters, by name, that share memory, where they are divided among workers.

    Raises:
        UsageError: two of them do.
    """
    found = overlapping(list(params.values()))
    if found:
        first, second = (list(params)[i] for i in found)
        raise UsageError(
            f"parameters {first!r} and {second!r} share memory, so their updates cannot be "
            'divided: tie them by one Parameter, or leave shard_optimizer or update="server" out'
        )


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()


def refuse_fused_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a fused optimizer where gradients will not be laid out as their parameters are.

    Raises:
        UsageError: it is, and would mix up the elements.
    """
    for group in optimizer.__dict__["param_groups"]:
        if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__}(fused=True) with parameters that are not contiguous "
                "(channels_last) is not possible with this wire: use foreach=True"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_unfrozen(model: torch.nn.Module, frozen: Iterable[torch.nn.Parameter]) -> None:
    """Raise a `UsageError` if one of the parameters that were frozen needs a gradient now."""
    for param in frozen:
        if param.requires_grad:
            name = next(n for n, p in model.named_parameters() if p is param)
            raise UsageError(
                f"parameter {name!r} needs a gradient, but was frozen when distribute() was "
                "called, so the workers would drift apart: call wingbeat.release(model, "
                "optimizer), and distribute() again after requires_grad_()"
            )


def refuse_assignment(prefix: str, metadata: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if loading would give the model at ``prefix`` other parameters."""
    if metadata.get("assign_to_params_buffers"):
        raise UsageError(
            f"load_state_dict(assign=True) of {prefix or 'the model'!r} would exchange the "
            "parameters that the optimizer and the buckets have: call it before distribute(), "
            "or leave assign out"
        )
