"""A model that two libraries average is refused: only the training would show it."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from wingbeat.errors import UsageError

_AROUND = (
    "this model is distributed by wingbeat, and with DistributedDataParallel around it gradients "
    "would be averaged twice: use one of them; a trainer that wraps models by itself has to be "
    "kept from it"
)


_SHARDED = (
    "pass the model without it; wingbeat.DeAR(shard_optimizer=True) divides the optimizer's state "
    "among the workers"
)
_WHOLE = "pass the model without it, as each worker needs all of every parameter"
_TWICE = "pass the model without it, as gradients would be averaged twice"

_APPLIED = {
    "FSDPModule": ("fully_shard()", "sharded", _SHARDED),
    "FullyShardedDataParallel": ("FullyShardedDataParallel", "sharded", _SHARDED),
    "ReplicateModule": ("replicate()", "replicated", _TWICE),
    "DDP": ("replicate()", "replicated", _TWICE),
}
"""By the class that torch.distributed puts among a module's: what did so, what that makes of its
parameters, and what to use. By name, as these need not be loaded."""

_PLACED = ("parallelize_module() or distribute_tensor()", "placed", _WHOLE)
"""The same of a DTensor in any other module."""


def _applied(module: torch.nn.Module) -> tuple[str, str, str] | None:
    """Return what of torch.distributed distributes a module already; None if nothing does."""
    for kind in type(module).__mro__:
        if kind.__name__ in _APPLIED and kind.__module__.startswith("torch.distributed."):
            return _APPLIED[kind.__name__]
    return None


def refuse_inside(model: torch.nn.Module) -> None:
    """Refuse a model that torch distributes already, or a part of it.

    Raises:
        UsageError: names the parameter and its placement, or the module that is wrapped.
    """
    _refuse_wrapped(model)
    by = {id(p): found for m in model.modules() if (found := _applied(m)) for p in m.parameters()}
    named: list[tuple[str, str, Any]] = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    for kind, name, tensor in named:
        placements = getattr(tensor, "placements", None)  # a DTensor's
        if placements is None and id(tensor) not in by:
            continue
        what, how, instead = by.get(id(tensor), _PLACED)
        if placements is not None:
            where = ", ".join(map(repr, placements))
            how += f" as {where} on a mesh of shape {tuple(tensor.device_mesh.shape)}"
        raise UsageError(f"distribute(): {kind} {name!r} is {how} by {what}: {instead}")


def _refuse_wrapped(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, torch.nn.DataParallel)):
            what = f"module {name!r} of the model" if name else "the model"
            kind = type(module).__name__
            raise UsageError(
                f"distribute(): {what} is wrapped in {kind}, so gradients would be averaged twice: "
                f"pass the bare module ({kind}(...).module), and an optimizer of its parameters"
            )


def refuse_around(model: torch.nn.Module) -> None:
    """Refuse a forward of a ``model`` that torch distributes too, since `distribute`.

    Raises:
        UsageError: there is one.
    """
    found = _applied(model)
    if found is not None:
        raise UsageError(
            f"this model is distributed by wingbeat, and {found[0]} was applied to it since: "
            "use one of them"
        )
    outer = DistributedDataParallel._active_ddp_module
    if outer is not None and any(module is model for module in outer.modules()):
        raise UsageError(_AROUND)


def refuse_wrapping() -> NoReturn:
    """Answer a look at an attribute that only DDP looks at, while it wraps a module.

    Raises:
        UsageError: it is DDP that asks.
        AttributeError: it is somebody else.
    """
    if _called_by(DistributedDataParallel.__init__):
        raise UsageError(_AROUND)
    raise AttributeError("_ddp_params_and_buffers_to_ignore")


def _called_by(function: Any) -> bool:
    """Whether the caller of this module's caller's caller is ``function``."""
    frame = sys._getframe(3)
    return frame.f_code is function.__code__
