"""`DTensor` parameters and gradients by their local tensors: the part that this rank holds.

Ranks of a column hold the same part of each parameter, so all that is exchanged is local. Gradients
that users and optimizers see stay `DTensor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def is_placed(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`."""
    return getattr(tensor, "placements", None) is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a `DTensor` that this rank holds; any other tensor itself."""
    if not is_placed(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    # Of a collective that is under way.
    return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return]


def place(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a `DTensor` without a gradient over the local ``part``, placed as ``like``."""
    from torch.distributed.tensor import DTensor

    return DTensor(part, like._spec, requires_grad=False)  # type: ignore[attr-defined,no-any-return]


def whole_groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of ``fully_shard`` in a model, each once."""
    known: set[int] = set()
    for module in model.modules():
        for group in groups_of(module):
            if id(group) not in known:
                known.add(id(group))
                yield group


def groups_of(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that ``fully_shard`` gathers before a module's forward."""
    state = getattr(module, "_get_fsdp_state", None)
    return [] if state is None else list(state()._fsdp_param_groups)


def shard_all(model: Any) -> None:
    """Put the sharded parameters of ``fully_shard`` back in place after a forward alone."""
    for group in whole_groups(model):
        group.reshard()


def sharded_tensors(groups: list[Any]) -> list[torch.Tensor]:
    """Return the sharded parameters of groups of ``fully_shard``."""
    return [param.sharded_param for group in groups for param in group.fsdp_params]


def gathered_ids(model: torch.nn.Module) -> set[int]:
    """Return the identities of the whole parameters that ``fully_shard`` puts into modules."""
    return {
        id(param._unsharded_param)
        for group in whole_groups(model)
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    }
