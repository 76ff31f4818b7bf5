"""What workers run in `test_late_mesh`: the cases of meshes on the accelerator of tests."""

from __future__ import annotations

import importlib
from typing import Any

import mesh_cases
import torch
import torch.distributed as dist
from late_group_cases import on
from mesh_cases import NAMES, distributed, net, train, weights, words_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import wingbeat
from helpers import accelerator
from wingbeat.strategies import parse


def each_seed(case: str, seeds: range, *args: Any) -> list[Any]:
    """What a case of another module returns on the device, for each order of streams."""
    late = accelerator.load()
    module, _, name = case.partition(".")
    call = getattr(importlib.import_module(module), name)
    found = []
    with on(accelerator.NAME):
        for seed in seeds:
            late.late_seed(4 * seed + dist.get_rank())
            found.append(call(*args))
    return found


def refused_strategy(strategy: str) -> str:
    """What `distribute` says to a strategy between replicas on the device."""
    wingbeat.init(timeout=60)
    try:
        return words_of(lambda: distributed(parse(strategy), torch.optim.SGD))
    finally:
        wingbeat.shutdown()


def refused_tensor_parallelism() -> str:
    """What `distribute` says to a tensor-parallel model on the device."""
    wingbeat.init(timeout=60)
    try:
        mesh = init_device_mesh(mesh_cases.device, (2, 2), mesh_dim_names=(NAMES[0], "tp"))
        plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
        model = parallelize_module(net(width=8), mesh["tp"], plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return words_of(lambda: wingbeat.distribute(model, optimizer, wingbeat.DeAR(), mesh=mesh))
    finally:
        wingbeat.shutdown()


def trained(strategy: str, steps: int) -> torch.Tensor:
    """Weights after some steps of FSDP2 with wingbeat between replicas."""
    wingbeat.init(timeout=60)
    try:
        model, optimizer = distributed(parse(strategy), torch.optim.SGD, lr=0.05, momentum=0.9)
        train(model, optimizer, range(steps))
        found = weights(model)
        wingbeat.release(model, optimizer)
        return found
    finally:
        wingbeat.shutdown()


def differences(strategy: str, steps: int, seeds: range) -> tuple[list[float], float]:
    """How far weights of the device, by seed, and of `AllReduce` are from those of the CPU."""
    want = trained(strategy, steps)
    found = each_seed("late_mesh_cases.trained", seeds, strategy, steps)
    others = [*found, trained("allreduce", steps)]
    *on_device, exact = [float((each - want).norm() / want.norm()) for each in others]
    return on_device, exact
