"""What workers run in `test_mesh`: models in replicas of several processes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import wingbeat
import wingbeat.errors
from wingbeat.collectives import Collectives
from wingbeat.engine.upgrade import engine_of
from wingbeat.transport import mesh as mesh_module
from wingbeat.transport import rendezvous
from wingbeat.transport.mesh import column_of
from wingbeat_lab.baselines import parse

NAMES = ("dp_replicate", "dp_shard")

device = "cpu"
"""The type of the devices of meshes and models, which `test_late_mesh` sets."""


def placed(model: Any) -> Any:
    """The model on the device, before it is sharded: torch cannot set ``data`` to another kind."""
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)


class Net(nn.Module):
    """Uneven shards: 7 rows between two ranks, and a bias of one element, of which one has none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5), nn.Tanh())
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def net(seed: int = 1, width: int = 7) -> Net:
    torch.manual_seed(seed)
    return placed(Net(width))


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The model under FSDP2, each layer and the rest."""
    for layer in (model.layers[0], model.layers[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    return x.to(device), x.sum(1, keepdim=True).tanh().to(device)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters, whole, in double precision."""
    found = [p.detach() for p in model.parameters()]
    whole = [getattr(p, "full_tensor", lambda p=p: p)().flatten() for p in found]
    return torch.cat(whole).cpu().double()


def replicas(across: int = 2) -> DeviceMesh:
    return init_device_mesh(device, (across, dist.get_world_size() // across), mesh_dim_names=NAMES)


def distributed(strategy: Any, optimizer: type[torch.optim.Optimizer], **options: Any) -> Any:
    """A sharded model and its optimizer, with a strategy between two replicas."""
    mesh = replicas()
    model: Any = sharded(net(), mesh["dp_shard"])
    made = optimizer(model.parameters(), **options)
    return wingbeat.distribute(model, made, strategy, mesh=mesh)


def difference_to_hsdp(strategy: str, steps: int, options: dict[str, Any]) -> float:
    """The largest relative difference of weights to torch's own HSDP after ``steps`` steps."""
    wingbeat.init(timeout=60)
    try:
        mesh = replicas()
        of_torch = sharded(net(), mesh, **options)
        by = torch.optim.AdamW(of_torch.parameters(), lr=0.01)
        train(of_torch, by, range(steps))
        model = sharded(net(1 + dist.get_rank() // 2), mesh["dp_shard"], **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        made = wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
        train(*made, range(steps))
        theirs, ours = weights(of_torch), weights(model)
        wingbeat.release(*made)
        return float((theirs - ours).norm() / theirs.norm())
    finally:
        wingbeat.shutdown()


VARIANTS: dict[str, dict[str, Any]] = {
    "resharded after forward": {"options": {"reshard_after_forward": True}},
    "not resharded": {"options": {"reshard_after_forward": False}},
    "bfloat16": {
        "options": {
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        }
    },
    "one group": {"shards": [""]},
    "roots without a common one": {"shards": ["layers.0", "layers.2", "head"]},
    "partly sharded": {"shards": ["layers"], "same": True},
    "sharded after plain layers": {"shards": ["layers.2", "head"], "same": True},
    "sharded after plain layers, without zero_grad": {
        "shards": ["layers.2", "head"],
        "same": True,
        "ours": "kept",
        "theirs": "kept",
    },
    "not the last backward": {"ours": "not last", "theirs": "not last"},
    "partly sharded without zero_grad": {
        "shards": ["layers"],
        "same": True,
        "ours": "kept",
        "theirs": "kept",
    },
    "accumulated without reducing": {"ours": "unreduced", "theirs": "unreduced"},
    "accumulated without exchange": {"ours": "no_sync", "theirs": "unreduced"},
    "accumulated without zero_grad": {"ours": "kept", "theirs": "kept"},
    "clipped": {"ours": "clip", "theirs": "clip of torch"},
    "clipped by torch": {"ours": "clip of torch", "theirs": "clip of torch"},
    "clipped by the largest": {"ours": "clip inf", "theirs": "clip inf by hand"},
    "prefetched": {"ours": "prefetched"},
    "scaled": {"ours": "scaled", "theirs": "scaled"},
    "compiled": {"ours": "compiled"},
}
"""Uses of FSDP2, each for both; ``ours`` and ``theirs`` are ways to train, as in `step_in`.

``shards`` are the modules that `fully_shard` gets in ours. ``same``: the ranks of a replica have
the same batches, as parameters outside `fully_shard` require.
"""


def step_in(
    way: str, model: Any, optimizer: Any, step: int, scaler: Any, reader: int | None = None
) -> None:
    """One step in a way of `VARIANTS`, with the batches of ``reader``; None: of this rank."""
    if way == "scaled":  # one rank has an infinity, and all ranks skip this step
        x, y = batch(step, dist.get_rank())
        loss = F.mse_loss(model(x), y) * (float("inf") if (step, dist.get_rank()) == (2, 3) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return
    many = way in ("unreduced", "no_sync", "kept", "not last")
    for micro in range(2 if many else 1):
        x, y = batch(2 * step + micro, dist.get_rank() if reader is None else reader)
        last = micro == 1
        if way == "unreduced":
            model.set_requires_gradient_sync(last)
        if way == "not last":
            model.set_is_last_backward(last)
        inside = model.no_sync() if way == "no_sync" and not last else contextlib.nullcontext()
        with inside:
            F.mse_loss(model(x), y).backward()
    if way == "clip":
        optimizer.clip_grad_norm_(0.05)
    elif way == "clip of torch":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    elif way == "clip inf":
        optimizer.clip_grad_norm_(0.01, float("inf"))
    elif way == "clip inf by hand":  # torch cannot where a rank has no element of a parameter
        largest = max(float(p.grad.full_tensor().abs().max()) for p in model.parameters())
        for param in model.parameters():
            param.grad.mul_(min(1.0, 0.01 / (largest + 1e-6)))
    optimizer.step()
    optimizer.zero_grad()


def variants(strategy: str, steps: int, names: Collection[str] = VARIANTS) -> dict[str, float]:
    """The largest relative difference of weights to HSDP after some steps of each variant."""
    wingbeat.init(timeout=60)
    try:
        mesh, found = replicas(), {}
        for name in names:
            variant = VARIANTS[name]
            models, optimizers = [], []
            for of, part in (("theirs", mesh), ("ours", mesh["dp_shard"])):
                model: Any = net()
                options = variant.get("options", {})
                shards = variant.get("shards", []) if of == "ours" else []
                for each in shards:
                    fully_shard(model.get_submodule(each), mesh=part, **options)
                if not shards:
                    sharded(model, part, **options)
                optimizer: Any = torch.optim.SGD(
                    model.parameters(), lr=0.05, momentum=0.9, foreach=not variant.get("same")
                )
                way = variant.get(of, "plain")
                if way == "prefetched":
                    layers = model.layers
                    layers[0].set_modules_to_forward_prefetch([layers[2]])
                if way == "compiled":  # the backend does not matter, but the breaks of graphs do
                    model.compile(backend="eager")
                if of == "ours":
                    wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
                scaler = torch.amp.GradScaler(device, init_scale=64.0)
                reader = dist.get_rank() // 2 if "same" in variant else None
                for step in range(steps):
                    step_in(way, model, optimizer, step, scaler, reader)
                if way == "scaled":
                    assert scaler.get_scale() == 32.0, scaler.get_scale()
                models.append(model)
                optimizers.append(optimizer)
            theirs, ours = map(weights, models)
            wingbeat.release(models[1], optimizers[1])
            found[name] = float((theirs - ours).norm() / theirs.norm())
        return found
    finally:
        wingbeat.shutdown()


def pretraining(strategy: str | None, path: str) -> tuple[torch.Tensor, list[float]]:
    """Weights and norms of a loop as in torchtitan, stopped and continued; HSDP without strategy.

    It has activation checkpointing, mixed precision, accumulation, clipping of its own, a schedule,
    and checkpoints of flat state dicts that are loaded after the model is distributed.
    """
    norms: list[float] = []
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for part in range(2):
        world_mesh = replicas()
        world_mesh["dp_shard"]._flatten("dp_shard_cp")
        shards = ("dp_replicate", "dp_shard_cp") if strategy is None else ("dp_shard_cp",)
        model: Any = net(1 + part)
        model.layers[0] = checkpoint_wrapper(model.layers[0], preserve_rng_state=False)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharded(model, world_mesh[shards], mp_policy=policy)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        if strategy is not None:
            wingbeat.distribute(model, optimizer, parse(strategy), mesh=world_mesh)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if part:
            found = _pretrained(model, optimizer, options)
            dcp.load(found, checkpoint_id=path)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=found["model"],
                optim_state_dict=found["optim"],
                options=options,
            )
        for step in range(3 * part, 3 * part + 3):
            optimizer.zero_grad()
            for micro in range(2):
                x, y = batch(2 * step + micro, dist.get_rank())
                (F.mse_loss(model(x), y) / 2).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads, foreach=True).full_tensor()
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm, foreach=True)
            norms.append(float(norm))
            optimizer.step()
            scheduler.step()
        if not part:
            dcp.save(_pretrained(model, optimizer, options), checkpoint_id=path)
        trained = weights(model)
        if strategy is not None:
            wingbeat.release(model, optimizer)
    return trained, norms


def _pretrained(model: Any, optimizer: Any, options: StateDictOptions) -> dict[str, Any]:
    parts = get_state_dict(model, optimizer, options=options)
    return dict(zip(("model", "optim"), parts, strict=True))


def pretrained_as_hsdp(strategy: str, path: str) -> list[Any]:
    """The relative difference of weights to HSDP, and the norms of both."""
    wingbeat.init(timeout=60)
    try:
        theirs, norms = pretraining(None, f"{path}/theirs")
        ours, own = pretraining(strategy, f"{path}/ours")
        return [float((theirs - ours).norm() / theirs.norm()), norms, own]
    finally:
        wingbeat.shutdown()


# -- tensor parallelism -------------------------------------------------------------------


class Summed(nn.Module):
    """A replicated parameter of which each rank's gradient is a term: rows are divided inside."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mesh = mesh
        self.weight = nn.Parameter(
            distribute_tensor(torch.randn(1, 6).to(device), mesh, [Replicate()])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        of_all = DTensor.from_local(rows, self.mesh, [Shard(0)])
        return (of_all @ self.weight.T).full_tensor()


def tensor_parallel(strategy: str, summed: bool, across: int, steps: int) -> float:
    """The largest relative difference to one process that has the batches of all replicas."""
    wingbeat.init(timeout=60)
    try:
        inside = dist.get_world_size() // across
        mesh = init_device_mesh(device, (across, inside), mesh_dim_names=("dp", "tp"))
        tp, model = mesh["tp"], net(width=8)
        if summed:
            model = Summed(tp)
            alone: nn.Module = placed(nn.Linear(6, 1, bias=False))
            alone.weight.data.copy_(model.weight.full_tensor())
        else:
            alone = net(width=8)
            parts = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
            parallelize_module(model, tp, parts)
        one = torch.optim.AdamW(alone.parameters(), lr=0.01)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh, across="dp")
        replica = dist.get_rank() // inside
        for step in range(steps):
            for part, (of, by) in enumerate(((alone, one), (model, optimizer))):
                by.zero_grad()
                for number in range(across) if not part else (replica,):
                    x, y = batch(step, number)
                    (F.mse_loss(of(x), y) / (1 if part else across)).backward()
                if part:
                    optimizer.clip_grad_norm_(0.1)
                else:
                    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                by.step()
        theirs, ours = weights(alone), weights(model)
        wingbeat.release(model, optimizer)
        return float((theirs - ours).norm() / theirs.norm())
    finally:
        wingbeat.shutdown()


def whole_models(strategy: str) -> list[float]:
    """Weights of a model that is not divided, with a mesh and without; the columns connected."""
    job = wingbeat.init(timeout=60)
    try:
        found = []
        for mesh in (None, replicas()):
            model: Any = net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
            train(model, optimizer, range(4))
            found.append(weights(model))
            wingbeat.release(model, optimizer)
        difference = float((found[0] - found[1]).abs().max())
        return [difference, float(found[1].sum()), len(mesh_module._columns.get(job, {}))]
    finally:
        wingbeat.shutdown()


def sharded_in_parallel(model: Any, mesh: DeviceMesh, shards: DeviceMesh) -> Any:
    """FSDP2 over ``shards``, of a model that is tensor parallel; ``head`` is whole along that."""
    plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    parallelize_module(model, mesh["tp"], {"head": _Whole()})
    return sharded(model, shards)


class _Whole(ParallelStyle):
    """Keeps a layer whole, as a `DTensor` that PyTorch can clip with the others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepare = functools.partial(_on_mesh, device_mesh)
        return distribute_module(module, device_mesh, None, prepare, _off_mesh)


def _on_mesh(mesh: DeviceMesh, _module: Any, inputs: Any, _mesh: Any) -> Any:
    return tuple(DTensor.from_local(each, mesh, [Replicate()]) for each in inputs)


def _off_mesh(_module: Any, output: Any, _mesh: Any) -> Any:
    return output.to_local()


def three_dimensions(shape: tuple[int, int, int], strategy: str, steps: int) -> list[Any]:
    """Of FSDP2 with tensor parallelism: difference to PyTorch's HSDP, norms, placements."""
    wingbeat.init(timeout=60)
    try:
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        found, norms = [], []
        batch_of = dist.get_rank() // shape[2]
        for ours in (False, True):
            shards = mesh["dp_shard"] if ours else mesh["dp_replicate", "dp_shard"]
            model: Any = sharded_in_parallel(net(width=8), mesh, shards)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
            if ours:
                wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
            for step in range(steps):
                x, y = batch(step, batch_of)
                F.mse_loss(model(x), y).backward()
                clip = torch.nn.utils.clip_grad_norm_ if step % 2 or not ours else None
                norm = clip(model.parameters(), 0.05) if clip else optimizer.clip_grad_norm_(0.05)
                norms.append(float(getattr(norm, "full_tensor", lambda n=norm: n)()))
                optimizer.step()
                optimizer.zero_grad()
            found.append(weights(model))
            placed = [repr(p.placements) for p in model.parameters()]
        wingbeat.release(model, optimizer)
        difference = float((found[0] - found[1]).norm() / found[0].norm())
        return [difference, norms, placed]
    finally:
        wingbeat.shutdown()


PARALLEL_USES = {
    "accumulated without reducing": ("unreduced", "unreduced"),
    "accumulated without exchange": ("no_sync", "unreduced"),
    "clipped by the largest": ("clip inf", "clip inf by hand"),
}
"""Ways to train, as in `step_in`: ours and PyTorch's."""


def parallel_uses(shape: tuple[int, int, int], strategy: str, steps: int) -> dict[str, float]:
    """The relative difference of weights to HSDP over tensor parallelism for each use."""
    wingbeat.init(timeout=60)
    try:
        return {
            name: _difference(*(_in_three_dimensions(shape, of, way, steps)
                                for of, way in ((None, theirs), (strategy, ours))))
            for name, (ours, theirs) in PARALLEL_USES.items()
        }  # fmt: skip
    finally:
        wingbeat.shutdown()


def compressed_in_parallel(
    shape: tuple[int, int, int], strategy: str, steps: int
) -> tuple[float, list[float], list[bool]]:
    """Difference of weights to HSDP, all weights, and which residuals are not zero."""
    wingbeat.init(timeout=60)
    try:
        residuals: dict[str, torch.Tensor] = {}
        theirs = _in_three_dimensions(shape, None, "plain", steps)
        ours = _in_three_dimensions(shape, strategy, "plain", steps, residuals)
        kept = [bool(each.any()) for each in residuals.values()]
        return _difference(theirs, ours), ours.tolist(), kept
    finally:
        wingbeat.shutdown()


def _difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    return float((theirs - ours).norm() / theirs.norm())


def _in_three_dimensions(
    shape: tuple[int, int, int], strategy: str | None, way: str, steps: int,
    residuals: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Weights after some steps of FSDP2 over tensor parallelism; HSDP without strategy."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=(*NAMES, "tp"))
    shards = mesh["dp_shard"] if strategy else mesh["dp_replicate", "dp_shard"]
    model: Any = sharded_in_parallel(net(width=8), mesh, shards)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if strategy:
        wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
    for step in range(steps):
        step_in(way, model, optimizer, step, None, dist.get_rank() // shape[2])
    if residuals is not None:
        residuals |= optimizer.state_dict()["wingbeat"]["residuals"]
    found = weights(model)
    if strategy:
        wingbeat.release(model, optimizer)
    return found


def unequal_batches() -> str:
    """What a step says whose ranks inside have different batches for a parameter that all hold."""
    wingbeat.init(timeout=60)
    try:
        mesh, model = replicas(), net()
        fully_shard(model.layers, mesh=mesh["dp_shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        wingbeat.distribute(model, optimizer, wingbeat.AllReduce(), mesh=mesh)
        return words_of(lambda: train(model, optimizer, range(1)))
    finally:
        wingbeat.shutdown()


def unequal_steps() -> list[int]:
    """The ranks that an error about numbers of steps names, where one rank leaves one out."""
    wingbeat.init(timeout=60)
    try:
        model, optimizer = distributed(wingbeat.AllReduce(), torch.optim.SGD, lr=0.1)
        train(model, optimizer, range(2))
        replica = dist.get_rank() // 2
        if replica == 0:
            optimizer.step()
        said = words_of(lambda: train(model, optimizer, range(1)))
        return [int(rank) for rank in re.findall("rank ([0-9])", said)]
    finally:
        wingbeat.shutdown()


def joined() -> str:
    """What `join` says in replicas of several ranks."""
    wingbeat.init(timeout=60)
    try:
        model, _ = distributed(wingbeat.AllReduce(), torch.optim.SGD, lr=0.1)
        return words_of(lambda: model.join().__enter__())
    finally:
        wingbeat.shutdown()


# -- deferred updates and checkpoints -----------------------------------------------------


def deferral() -> list[Any]:
    """Whether updates are pending after a step, and what of them three readers see."""
    wingbeat.init(timeout=60)
    try:
        mesh, found = replicas(), []
        for read in (
            lambda m: m.layers[0].weight.to_local().sum(),
            lambda m: m.layers[0].weight.full_tensor().sum(),
            lambda m: m.state_dict()["layers.0.weight"].full_tensor().sum(),
            lambda m: (m.layers[0].unshard(), m.layers[0].weight.sum())[1],
        ):
            model: Any = sharded(net(), mesh["dp_shard"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            wingbeat.distribute(model, optimizer, wingbeat.DeAR(), mesh=mesh)
            train(model, optimizer, range(2))
            due = any(bucket.due for bucket in engine_of(model).buckets)
            with torch.no_grad():
                seen = float(read(model))
                wingbeat.synchronize(model)
                model.reshard()
                model.layers[0].reshard()
                found.append((due, seen == float(read(model))))
            wingbeat.release(model, optimizer)
        return found
    finally:
        wingbeat.shutdown()


def checkpoint(path: str, across: int, save: bool) -> float:
    """Save after some steps, or load; the sum of weights and of both moments."""
    wingbeat.init(timeout=60)
    try:
        mesh = replicas(across)
        model = sharded(net(2 - save), mesh["dp_shard"])
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if not save:
            found: Any = dict(
                zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)
            )
            dcp.load(found, checkpoint_id=path)
            set_state_dict(
                model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
            )
        wingbeat.distribute(model, optimizer, wingbeat.DeAR(), mesh=mesh)
        if save:
            train(model, optimizer, range(3))
            kept = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            dcp.save(kept, checkpoint_id=path)
        state = optimizer.state
        moments = [state[p][key].full_tensor().double().sum() for p in model.parameters()
                   for key in ("exp_avg", "exp_avg_sq")]  # fmt: skip
        total = float(weights(model).sum() + 1000 * sum(moments))
        if not save:
            train(model, optimizer, range(2))
        wingbeat.release(model, optimizer)
        return total
    finally:
        wingbeat.shutdown()


def page(program: str) -> tuple[float, list[float]]:
    """Run the page's program; the last loss, and the weights."""
    names: dict[str, Any] = {}
    try:
        exec(program, names)
        return names["loss"].item(), weights(names["model"]).tolist()
    finally:
        wingbeat.shutdown()


class Optional(nn.Module):
    """With a layer that a forward may use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.some, self.net = nn.Linear(6, 6), model

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.net(x + self.some(x) if use else x)


def unused_in_some_replicas(strategy: str, steps: int) -> float:
    """Difference to one process, of a layer that one replica uses, and none in every third step.

    Replicas are tensor parallel, and `fully_shard` was applied to each layer.
    """
    wingbeat.init(timeout=60)
    try:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=(*NAMES, "tp"))
        trained: list[Any] = []
        for ours in (False, True):
            model: Any = Optional(net(width=8))
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if ours:
                sharded_in_parallel(model.net, mesh, mesh["dp_shard"])
                parallelize_module(model, mesh["tp"], {"some": _Whole()})
                fully_shard(model.some, mesh=mesh["dp_shard"])
                fully_shard(model, mesh=mesh["dp_shard"])
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
                wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
            replica = dist.get_rank() // 2
            for step in range(steps):
                optimizer.zero_grad()
                for reader in [replica] if ours else [0, 1]:
                    x, y = batch(step, reader)
                    loss = F.mse_loss(model(x, use=reader == 0 and step % 3 < 2), y)
                    (loss if ours else loss / 2).backward()
                optimizer.step()
            trained.append(weights(model))
            if ours:
                wingbeat.release(model, optimizer)
        return _difference(*trained)
    finally:
        wingbeat.shutdown()


def killed_in_distribute(dying: int) -> list[Any]:
    """What each rank ends with, and after how long, if one dies before its column is connected."""
    wingbeat.init(timeout=10)
    begin = time.monotonic()
    if dist.get_rank() == dying:
        mesh_module.connect_column = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(*distributed(wingbeat.AllReduce(), torch.optim.AdamW, lr=0.01), range(2))
        return ["trained", 0.0]
    except (wingbeat.errors.WingbeatError, RuntimeError) as error:
        found = [f"{type(error).__name__}: {error}", time.monotonic() - begin]
    finally:
        with contextlib.suppress(wingbeat.errors.WingbeatError):
            wingbeat.shutdown()
    # The process of a script would end, which closes torch's connections: once this is answered.
    threading.Timer(1.0, os._exit, (0,)).start()
    return found


# -- columns ------------------------------------------------------------------------------


def columns_of_two_meshes() -> list[Any]:
    """What a rank sees of its column, of a column of another mesh, and of the first one again."""
    job = wingbeat.init(timeout=60)
    measure = rendezvous.measure_speeds
    try:
        rendezvous.measure_speeds = lambda _: (0.0,)
        first = column_of(job, replicas(), None)
        named = init_device_mesh(device, (2, 2), mesh_dim_names=("tp", "dp"))
        second = column_of(job, named, "dp")
        total = torch.full((5,), float(job.rank))
        Collectives(first.open_channel()).all_reduce(total).wait()
        assert first.inside is not None
        assert second.inside is not None
        inner = first.inside.sum(torch.tensor([float(job.rank)]))
        same = column_of(job, replicas(), "dp_replicate") is first
        return [
            [first.rank, first.ranks, first.inside.number, first.inside.ranks, first.inside.names],
            [second.ranks, second.inside.ranks, second.inside.names],
            [first.layout.hosts, total.tolist(), inner.tolist(), same],
            [first.speeds, tuple(speed / 2 for speed in job.speeds)],
        ]
    finally:
        rendezvous.measure_speeds = measure
        wingbeat.shutdown()


def words_of(call: Callable[[], object]) -> str:
    """The text of the `UsageError` that a call raises."""
    try:
        call()
    except wingbeat.errors.UsageError as error:
        return str(error)
    return "nothing was raised"


def refusals() -> dict[str, str]:
    """What `distribute` says to meshes and models that it cannot use, by what is wrong."""
    job = wingbeat.init(timeout=60)
    try:
        mesh, rank = replicas(), job.rank
        inner = mesh["dp_shard"]

        def attempt(
            model: nn.Module, strategy: Any = None, kind: Any = torch.optim.SGD, **options: Any
        ) -> str:
            optimizer = kind(model.parameters(), lr=0.1)
            chosen = strategy or wingbeat.AllReduce()
            return words_of(lambda: wingbeat.distribute(model, optimizer, chosen, **options))

        other = init_device_mesh(device, (4, 1), mesh_dim_names=NAMES)
        of_gpus = replicas()
        of_gpus._device_type = "meta"  # gloo carries no tensors of it
        table = nn.ModuleDict({"table": nn.Embedding(4, 6, sparse=True), "net": net()})
        sharded(table["net"], inner)
        terms = nn.Linear(6, 1)
        part = DTensor.from_local(torch.ones(1, 6), inner, [Partial()])
        terms.weight = nn.Parameter(part)
        third = init_device_mesh(device, (2, 2, 1), mesh_dim_names=(*NAMES, "alone"))
        return {
            "no mesh": attempt(sharded(net(), inner)),
            "not a mesh": attempt(net(), mesh=(2, 2)),
            "no such dimension": attempt(sharded(net(), inner), mesh=mesh, across="dp"),
            "across without mesh": attempt(net(), across="dp"),
            "a part of the mesh": attempt(sharded(net(), inner), mesh=inner),
            "sharded over all": attempt(sharded(net(), mesh), mesh=mesh),
            "nothing is divided": attempt(sharded(net(), third["alone"]), mesh=third),
            "of GPUs": attempt(sharded(net(), inner), mesh=of_gpus),
            "sparse": attempt(table, mesh=mesh),
            "terms": attempt(terms, mesh=mesh),
            "averaging": attempt(sharded(net(), inner), wingbeat.ADPSGD(), mesh=mesh),
            "threshold file": attempt(
                sharded(net(), inner),
                wingbeat.Geryon(threshold="tuned", plan_file="a.json"),
                mesh=mesh,
            ),
            "measured colayers": attempt(
                sharded(net(), inner), wingbeat.Canary(measured=True), mesh=mesh
            ),
            "communicating optimizer": attempt(
                sharded(net(), inner), wingbeat.Canary(), torch.optim.Adafactor, mesh=mesh
            ),
            "divided": attempt(
                sharded(net(), inner), wingbeat.DeAR(shard_optimizer=True), mesh=mesh
            ),
            "plan file": attempt(
                sharded(net(), inner), wingbeat.DeAR(plan_file="plan.json"), mesh=mesh
            ),
            "unequal meshes": attempt(
                sharded(net(), inner if rank < 3 else other["dp_shard"]),
                mesh=mesh if rank < 3 else other,
            ),
            "one without mesh": attempt(
                sharded(net(), inner) if rank < 3 else net(), mesh=mesh if rank < 3 else None
            ),
            "unequal dimensions": attempt(
                sharded(net(), inner), mesh=mesh, across=None if rank < 3 else "dp_replicate"
            ),
        }
    finally:
        wingbeat.shutdown()


def lost_replica(dying: int) -> str:
    """One rank leaves in the middle; the error of the rank that exchanges with it."""
    job = wingbeat.init(timeout=20)
    column = column_of(job, replicas(), None)
    channel = column.open_channel() if dying in column.ranks else None
    try:
        try:
            if job.rank == dying:
                raise ValueError("no more data")
            if channel is not None:
                Collectives(channel).all_reduce(torch.ones(8)).wait()
        finally:
            wingbeat.shutdown()  # while the exception is about to end the script
    except (ValueError, wingbeat.errors.PeerError) as error:
        return str(error)
    return ""
