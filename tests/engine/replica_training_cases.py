"""What workers run in `test_replica_training`: replicas of two processes, each a torch job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import mesh_cases
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import wingbeat
import wingbeat.errors
from wingbeat.strategies import parse
from wingbeat.transport import on_terminate
from wingbeat.transport.world import World

SIZE = 2
"""Ranks of a replica."""


@contextlib.contextmanager
def replica_world(
    ports: list[int], store: int, timeout: float = 60, **others: str
) -> Iterator[World]:
    """Join as one of a replica's ranks; ``others`` are further variables, by name."""
    before = dict(os.environ)
    replica, rank = divmod(int(os.environ["RANK"]), SIZE)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(SIZE),
        "MASTER_PORT": str(ports[replica]),
        "WINGBEAT_REPLICA": str(replica),
        "WINGBEAT_REPLICAS": str(len(ports)),
        "WINGBEAT_STORE": f"127.0.0.1:{store}",
        **others,
    }
    try:
        yield wingbeat.init(timeout=timeout)
    finally:
        wingbeat.shutdown()
        os.environ.clear()
        os.environ.update(before)


def of_one_process(steps: int) -> torch.Tensor:
    """The weights of one process that has the batches of all ranks, in double precision."""
    model = mesh_cases.net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        parts = [mesh_cases.batch(step, rank) for rank in range(2 * SIZE)]
        x, y = (torch.cat(each).double() for each in zip(*parts, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return mesh_cases.weights(model)


def exact(strategies: list[str], steps: int, ports: list[int], store: int) -> list[float]:
    """For each strategy, the largest relative difference of weights to those of one process."""
    found, theirs, before = [], of_one_process(steps), int(os.environ["RANK"])
    with replica_world(ports, store) as world:
        replica, rank = divmod(world.rank, SIZE)
        assert (world.rank, world.size, world.returned) == (before, 4, False)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, SIZE)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp_shard",))
        for strategy in strategies:
            model = mesh_cases.sharded(mesh_cases.net(1 + replica).double(), mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            made = wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
            for step in range(steps):
                x, y = mesh_cases.batch(step, world.rank)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x.double()), y.double()).backward()
                optimizer.step()
            ours = mesh_cases.weights(model)
            wingbeat.release(*made)
            found.append(float((theirs - ours).norm() / theirs.norm()))
    return found


def refusals(ports: list[int], store: int) -> dict[str, str]:
    """What `distribute` refuses in a replica, by name."""
    with replica_world(ports, store) as world:
        whole = init_device_mesh("cpu", (SIZE,))
        named = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp_shard",))

        def distribute(mesh: Any, strategy: str = "allreduce", **options: Any) -> None:
            model = mesh_cases.sharded(mesh_cases.net(), named)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh, **options)

        calls: dict[str, Callable[[], object]] = {
            "across": lambda: distribute(named, across="dp_shard"),
            "terminated": lambda: on_terminate(lambda: None),
            "other shapes": lambda: distribute(named if world.rank else whole),
        }
        found = {}
        for name, call in calls.items():
            try:
                call()
            except wingbeat.errors.WingbeatError as error:
                found[name] = str(error)
    return found


def joined(ports: list[int], store: int, timeout: float, variables: list[dict[str, str]]) -> str:
    """The error of joining with variables of this rank; empty without one."""
    try:
        with replica_world(ports, store, timeout, **variables[int(os.environ["RANK"])]):
            return ""
    except wingbeat.errors.WingbeatError as error:
        return str(error)
