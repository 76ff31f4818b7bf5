"""What workers run in `test_late_mesh`: the cases of meshes on the accelerator of tests."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from late_group_cases import on
from mesh_cases import net, replicas, sharded, words_of

import wingbeat
from helpers import accelerator


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


def refused_method() -> str:
    """What `distribute` says to servers between replicas on the device."""
    wingbeat.init(timeout=60)
    try:
        mesh = replicas()
        model = sharded(net(), mesh["dp_shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return words_of(lambda: wingbeat.distribute(model, optimizer, wingbeat.Geryon(), mesh=mesh))
    finally:
        wingbeat.shutdown()
