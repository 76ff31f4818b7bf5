"""Initialises wingbeat among Lightning's workers, and gathers their residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from wingbeat.engine.checkpoint import PARTS
from wingbeat.engine.upgrade import EXTRA
from wingbeat.errors import UsageError
from wingbeat.transport import World, current, init

_KINDS = ("residuals", "velocity")


def join_workers(size: int, timeout: float, interfaces: Sequence[str] | None) -> World:
    """Initialise wingbeat in Lightning's process group, unless it was initialised before.

    Raises UsageError if it was with other workers, and RendezvousError if workers are missing.
    """
    try:
        world = current()
    except UsageError:
        return init(timeout=timeout, interfaces=interfaces)
    if world.size != size:
        raise UsageError(
            f"wingbeat.init() was called among {world.size} workers, and Lightning trains with "
            f"{size}: leave it out, or call wingbeat.shutdown() first"
        )
    return world


def with_all_residuals(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Add all workers' residuals to an optimizer's state dict; every worker calls this.

    Lightning saves rank 0's state dict, so it is complete only there: float32 on the CPU, 4 bytes
    per parameter and worker. States of other optimizers stay unchanged.
    """
    mine = state.get(EXTRA)
    if not isinstance(mine, dict) or "residuals" not in mine or mine["world_size"] == 1:
        return state
    rank, size = int(mine["rank"]), int(mine["world_size"])
    kept = {key: value for key, value in mine.items() if key not in (*_KINDS, "format", "rank",
            "world_size", "step")}  # fmt: skip
    steps = _gathered(torch.tensor(mine["step"], dtype=torch.int64), device, rank, size)
    parts: list[dict[str, Any]] = [
        {"format": mine["format"], "rank": r, "world_size": size, "step": int(step)}
        for r, step in enumerate(steps)
    ]
    for kind in (kind for kind in _KINDS if kind in mine):
        for part in parts:
            part[kind] = {}
        for name, value in mine[kind].items():
            for part, one in zip(parts, _gathered(value, device, rank, size), strict=True):
                part[kind][name] = one
    return {**state, EXTRA: {**kept, PARTS: parts}} if rank == 0 else state


def _gathered(
    value: torch.Tensor, device: torch.device, rank: int, size: int
) -> list[torch.Tensor]:
    """Return all workers' values on rank 0, and nothing on the others."""
    sent = value.to(device).contiguous()
    found = [torch.empty_like(sent) for _ in range(size)] if rank == 0 else None
    dist.gather(sent, found, dst=0)
    return [each.cpu() for each in found or ()]


def take_over_rank_zeros(model: torch.nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers of a model that is not distributed."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
