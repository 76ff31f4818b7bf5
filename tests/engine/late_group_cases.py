"""What workers run in `test_late_group`: torch's own FSDP2 on the accelerator of tests."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import NAMES, batch, net, sharded, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from helpers import accelerator
from helpers.accelerator import group

STEPS = 6


def join() -> None:
    """Join the default group, of the CPU and of the device."""
    group.register()
    timeout = timedelta(seconds=45)
    dist.init_process_group(f"cpu:gloo,{accelerator.NAME}:{group.NAME}", timeout=timeout)


def collectives() -> list[list[float]]:
    """Results of each collective, between calls of which nothing waits."""
    rank, device = dist.get_rank(), torch.device(accelerator.NAME, 0)
    mine = torch.arange(8.0, device=device) + 10 * rank
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        found.append(mine.clone())
        dist.all_reduce(found[-1], op)
    found.append(mine.clone())
    dist.broadcast(found[-1], 1)
    found.append(torch.empty(32, device=device))
    work = dist.all_gather_into_tensor(found[-1], mine, async_op=True)
    work.wait()
    found.append(torch.empty(2, device=device))
    dist.reduce_scatter_tensor(found[-1], mine)
    outs = [torch.empty(8, device=device) for _ in range(4)]
    dist.all_gather(outs, mine)
    found.append(torch.stack(outs).flatten())
    found.append(torch.empty(8, device=device))
    dist.all_to_all_single(found[-1], mine)
    dist.barrier()
    return [each.tolist() for each in found]


def host_waits() -> int:
    """How often the calling thread waits for the device in ten collectives."""
    late = accelerator.load()
    tensor = torch.ones(4, device=accelerator.NAME)
    before = late.late_synchronizations(threading.get_native_id())
    for _ in range(10):
        dist.all_reduce(tensor)
    found = late.late_synchronizations(threading.get_native_id()) - before
    assert tensor.tolist() == [4.0**10] * 4
    return int(found)


def on(device: str, model: nn.Module) -> nn.Module:
    """Move a model before it is sharded: torch cannot set ``data`` to a tensor of the device."""
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)


def _trained(device: str) -> torch.Tensor:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=NAMES)
    model: Any = sharded(on(device, net()), mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = (each.to(device) for each in batch(step, dist.get_rank()))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return weights(model).cpu()


def _no_order(*_: Any) -> None:
    """In place of a wait."""


MISSING = {
    "": (),
    "of the caller's stream": ((group.LateGroup, "follow_caller", _no_order),),
    "of the result": ((group.LateWork, "wait", _no_order),),
}
"""Waits that are taken away."""


def differences(missing: str, seeds: range) -> list[float]:
    """The relative difference of HSDP's weights on the device to those on the CPU, by seed."""
    late = accelerator.load()
    want = _trained("cpu")
    found = []
    with contextlib.ExitStack() as undone:
        for owner, name, other in MISSING[missing]:
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        for seed in seeds:
            late.late_seed(4 * seed + dist.get_rank())
            got = _trained(accelerator.NAME)
            found.append(float((got - want).norm() / want.norm()))
    return found
