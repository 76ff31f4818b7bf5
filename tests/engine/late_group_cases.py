"""What workers run in `test_late_group`: torch's own FSDP2 on the accelerator of tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import mesh_cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import batch, net, replicas, sharded, weights

from helpers import accelerator
from helpers.accelerator import group

STEPS = 6
DEADLINE = 170.0
"""Seconds of a case, the first of which may build the device."""


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


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Have meshes and models on a device."""
    before, mesh_cases.device = mesh_cases.device, device
    try:
        yield
    finally:
        mesh_cases.device = before


def _trained() -> torch.Tensor:
    model: Any = sharded(net(), replicas(), reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return weights(model)


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
    want = _trained()
    found = []
    with contextlib.ExitStack() as undone:
        for owner, name, other in MISSING[missing]:
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        for seed in seeds:
            late.late_seed(4 * seed + dist.get_rank())
            with on(accelerator.NAME):
                got = _trained()
            found.append(float((got - want).norm() / want.norm()))
    return found
