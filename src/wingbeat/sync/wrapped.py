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


def refuse_inside(model: torch.nn.Module) -> None:
    """Refuse a model that is, or contains, a data parallel wrapper.

    Raises:
        UsageError: names the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, torch.nn.DataParallel)):
            what = f"module {name!r} of the model" if name else "the model"
            kind = type(module).__name__
            raise UsageError(
                f"distribute(): {what} is wrapped in {kind}, so gradients would be averaged twice: "
                f"pass the bare module ({kind}(...).module), and an optimizer of its parameters"
            )


def refuse_around(model: torch.nn.Module) -> None:
    """Refuse a forward inside that of a DistributedDataParallel around ``model``.

    Raises:
        UsageError: there is one.
    """
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
