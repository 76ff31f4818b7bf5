"""What the tests of torch's distributed checkpoints run in worker processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wingbeat
from helpers.refusals import said_by
from wingbeat.integrations import checkpoint

STRATEGIES: dict[str, Any] = {
    "dear": lambda: wingbeat.DeAR(plan="fixed", mb=0.001),
    "sharded": lambda: wingbeat.DeAR(plan="fixed", mb=0.001, shard_optimizer=True),
    "sketch": lambda: wingbeat.AllReduce(compression="sketch@2:auto_disable=false", mb=0.001),
    "diloco": lambda: wingbeat.DiLoCo(every=2),
}


def _begin(kind: str) -> tuple[Any, Any]:
    wingbeat.shutdown()  # cases of other suites leave the workers of a pool initialised
    world = wingbeat.init(timeout=60)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = wingbeat.distribute(model, optimizer, STRATEGIES[kind]())
    torch.manual_seed(world.rank)
    return model, optimizer


def _train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 9)).pow(2).mean().backward()
        optimizer.step()


def _found(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return all that training goes on with; residuals by parameter."""
    state = optimizer.state_dict()
    beside = state.get("wingbeat", {})
    return {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "state": {k: {n: v.clone() for n, v in of.items()} for k, of in state["state"].items()},
        "residuals": dict(beside.get("residuals", {})),
        "averages": beside.get("averages"),
    }


def save(kind: str, folder: str) -> dict[str, Any]:
    model, optimizer = _begin(kind)
    _train(model, optimizer, 4)
    state = checkpoint.state(model, optimizer)
    assert ("optim" in state) == (kind in ("dear", "sketch")), (
        "nobody has to gather a divided state"
    )
    if kind == "dear":
        dcp.async_save({**state, "epoch": 7}, checkpoint_id=folder).result()
    else:
        dcp.save({**state, "epoch": 7}, checkpoint_id=folder)
    found = _found(model, optimizer)
    wingbeat.shutdown()
    return found


def load(kind: str, folder: str) -> dict[str, Any]:
    model, optimizer = _begin(kind)
    _train(model, optimizer, 1)
    checkpoint.load(model, optimizer, folder)
    found = _found(model, optimizer)
    _train(model, optimizer, 2)
    wingbeat.shutdown()
    return found


def plain(folder: str) -> dict[str, Any]:
    """Load the model with torch alone."""
    model = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    state = {"model": model.state_dict(), "epoch": 0}
    dcp.load(state, checkpoint_id=folder)
    return state


def refused(folder: str) -> list[str]:
    """Each in one line."""
    model, optimizer = _begin("dear")
    said = []
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/other")
    for wrong in (f"{folder}/none", f"{folder}/other"):
        try:
            checkpoint.load(model, optimizer, wrong)
        except wingbeat.errors.UsageError as err:
            said.append(str(err))
    try:
        checkpoint.state(nn.Linear(1, 1), optimizer)
    except wingbeat.errors.UsageError as err:
        said.append(str(err))
    wingbeat.shutdown()
    return said


def _begin_in_replicas(kind: str, across: int) -> tuple[Any, Any]:
    wingbeat.shutdown()
    world = wingbeat.init(timeout=60)
    inside = world.size // across
    mesh = init_device_mesh("cpu", (across, inside), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(9, 15), nn.Tanh(), nn.Linear(15, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp_shard"])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    return wingbeat.distribute(model, optimizer, STRATEGIES[kind](), mesh=mesh)


def _weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def refused_by_replicas(folder: str) -> tuple[str, bool]:
    """What loading a checkpoint of whole models says, and whether it changed no weight."""
    model, optimizer = _begin_in_replicas("dear", 2)
    before = _weights(model)
    [said] = said_by([lambda: checkpoint.load(model, optimizer, folder)])
    same = torch.equal(before, _weights(model))
    wingbeat.shutdown()
    return said, same


def refused_averages() -> list[str]:
    """What saving models that differ between replicas of several ranks says."""
    model, optimizer = _begin_in_replicas("diloco", 2)
    said = said_by([lambda: checkpoint.state(model, optimizer)])
    wingbeat.shutdown()
    return said


def without_residuals(folder: str) -> None:
    """Save beside another library's checkpoint, with a strategy that keeps none."""
    _, optimizer = _begin("dear")
    checkpoint.save_residuals(optimizer, folder)
    wingbeat.shutdown()


def in_replicas(folder: str, across: int, saving: bool, files: bool) -> dict[str, Any]:
    """Save and continue in replicas of several ranks, or load and continue; what is there then.

    ``files``: by torch and the files of residuals, as trainers of other libraries save.
    """
    model, optimizer = _begin_in_replicas("sketch", across)
    _train(model, optimizer, 4 if saving else 1)
    if saving and files:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder)
        checkpoint.save_residuals(optimizer, folder)
    elif saving:
        dcp.save(checkpoint.state(model, optimizer), checkpoint_id=folder)
    elif files:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        checkpoint.load_residuals(optimizer, folder)
    else:
        checkpoint.load(model, optimizer, folder)
    residuals = optimizer.state_dict()["wingbeat"]["residuals"]
    torch.manual_seed(10 + dist.get_rank())
    before = _weights(model)
    _train(model, optimizer, 2)
    found = _weights(model)
    wingbeat.shutdown()
    return {"before": before, "residuals": residuals, "after": found}
