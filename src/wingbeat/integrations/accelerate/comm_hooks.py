"""wingbeat's hooks for DDP in Accelerate, which can name only torch's hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wingbeat.compression import Compression
from wingbeat.errors import UsageError
from wingbeat.integrations import residuals
from wingbeat.integrations.accelerate import names
from wingbeat.integrations.ddp import WireState, wire_hook


def register_comm_hook(accelerator: Any, model: Any, wire: Compression) -> WireState:
    """Compress the gradients of a model that Accelerate has wrapped in DDP.

    ``accelerator.save_state`` then saves every worker's residuals too, and ``load_state`` loads
    them, also with another number of workers. Every rank calls this at the same point.

    Args:
        accelerator: the Accelerator that has prepared the model.
        model: the model that ``accelerator.prepare`` has returned.
        wire: the encoding, as for `wingbeat.integrations.ddp.WireState`.

    Returns:
        The hook's state.

    Raises:
        UsageError: Accelerate is missing or too old, the model is not in DDP, or a hook does not
            support the encoding.
    """
    names.check(accelerator)
    ddp = getattr(model, "_orig_mod", model)  # unwraps torch.compile, of Accelerate's dynamo plugin
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(
            f"register_comm_hook({type(model).__name__}): the model must be the "
            "DistributedDataParallel that accelerator.prepare() returns with two processes or more"
        )
    state = WireState(ddp, wire)
    ddp.register_comm_hook(state, wire_hook)
    bare, rank, size = ddp.module, dist.get_rank(), dist.get_world_size()

    def saving(models: list[Any], _weights: list[Any], folder: str) -> None:
        residuals.write(state.state_dict(), Path(folder), _name(models, bare), rank, size)

    def loading(models: list[Any], folder: str) -> None:
        parts = residuals.read(Path(folder), _name(models, bare), rank, size)
        if len(parts) == 1:
            state.load_state_dict(parts[0])
        elif parts:
            state.load_state_dicts(parts)

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(loading)
    return state


def _name(models: list[Any], bare: Any) -> str:
    """Number a model in the way of Accelerate's files."""
    return f"hook_{[getattr(model, 'module', model) for model in models].index(bare)}"
