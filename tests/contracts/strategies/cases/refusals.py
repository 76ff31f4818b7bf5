"""Legal in torch, and not to be had here or not yet: refused in one line, with nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wingbeat
from wingbeat.errors import UsageError

from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import ALL, DIVIDED, LARGE, Grid, Rig, check
from ..sides import WingbeatSide, bring_world_up, take_world_down
from .errors import refused
from .state import Trapped

ONE = Grid(worlds=(2,), mbs=(LARGE,))
DENSE = Grid(worlds=(2, 3), strategies=ALL)


def _side(rig: Rig) -> WingbeatSide:
    return WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)


@check(ONE)
def a_parameter_in_two_models(rig: Rig) -> None:
    """An actor and a critic that share an encoder; a model and a part of it."""
    side = _side(rig)
    encoder = nn.Linear(8, 8)
    actor: Any = nn.Sequential(encoder, nn.Linear(8, 3))
    critic: Any = nn.Sequential(encoder, nn.Linear(8, 1))
    side.setup(actor, sgd(actor))
    critic_step = sgd(critic)
    words = ("0.weight", "Sequential", "ModuleDict", "release")
    refused(UsageError, lambda: wingbeat.distribute(critic, critic_step, rig.strategy), *words)
    assert type(critic) is nn.Sequential
    part = sgd(encoder)
    refused(UsageError, lambda: wingbeat.distribute(encoder, part, rig.strategy), "'weight'")
    whole: Any = nn.ModuleList([actor])
    refused(UsageError, lambda: wingbeat.distribute(whole, sgd(whole), rig.strategy), "0.0.weight")
    train(side, *side.trained[0], range(2))
    side.leave()
    wingbeat.release(*wingbeat.distribute(critic, critic_step, rig.strategy))


@check(ONE)
def ddp_inside(rig: Rig) -> None:
    bring_world_up()
    for model in (mlp(), nn.Sequential(mlp())):
        wrapped: Any = DistributedDataParallel(model[0])
        holder: Any = nn.Sequential(wrapped, nn.Tanh())
        for outer in (wrapped, holder):
            optimizer = sgd(outer)
            refused(
                UsageError,
                lambda outer=outer, optimizer=optimizer: wingbeat.distribute(  # type: ignore[misc]
                    outer, optimizer, rig.strategy
                ),
                "DistributedDataParallel",
                "twice",
                ".module",
            )


@check(ONE)
def ddp_around(rig: Rig) -> None:
    side = _side(rig)
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    refused(UsageError, lambda: DistributedDataParallel(model), "twice", "DistributedDataParallel")
    outer: Any = nn.Sequential(model)
    wrapped: Any = DistributedDataParallel(outer)
    x, _ = side.batch(0)
    refused(UsageError, lambda: wrapped(x), "twice")
    train(side, model, optimizer, range(2))
    side.leave()


@check(DENSE)
def a_step_skipped_on_one_rank(rig: Rig) -> None:
    """Every rank says so, with the counts, and none dies or waits for ever."""
    side = _side(rig)
    model: Any = mlp()
    model, optimizer = side.setup(model, adamw(model))
    train(side, model, optimizer, range(2))

    def go_on() -> None:
        for step in range(2, 6):
            optimizer.zero_grad()
            cross_entropy(model, *side.batch(step)).backward()
            if step != 3 or rig.rank != 1:
                optimizer.step()

    text = refused(UsageError, go_on, "rank 1", "step")
    if "sharded" not in rig.strategy_name:
        assert "rank 0 4, rank 1 3" in text or "rank 0 5, rank 1 4" in text, text
    side.trained.clear()
    take_world_down()


@check(ONE)
def converted_after_distribute(rig: Rig) -> None:
    side = _side(rig)
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    words = ("float32", "float64", "distribute()")
    refused(UsageError, lambda: model.double(), *words)
    refused(UsageError, lambda: model.to(torch.float64), *words)
    refused(UsageError, lambda: model.half(), "float16")
    refused(UsageError, lambda: model.to("meta"), "meta")
    model.to(torch.float32).cpu().requires_grad_().float()
    train(side, model, optimizer, range(2))
    x, y = side.batch(3)

    def convert_a_part() -> None:
        model[0].double()
        hidden = model[0](x.double()).float()
        nn.functional.cross_entropy(model[1:](hidden), y).backward()

    refused(UsageError, convert_a_part, "'0.", "float64", "float32", "distribute()")
    side.trained.clear()
    take_world_down()


@check(Grid(worlds=(2,), strategies=DIVIDED, mbs=(LARGE,)))
def step_with_arguments_under_a_divided_optimizer(rig: Rig) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None, scale: float = 1.0) -> Any:
            return super().step(closure)

    side = _side(rig)
    model: Any = mlp()
    made = Scaled(model.parameters(), lr=0.1)
    if "server" in rig.strategy_name:
        made = sgd(model)  # type: ignore[assignment]
    model, optimizer = side.setup(model, made)
    cross_entropy(model, *side.batch(0)).backward()
    words = ("step(scale=2.0)", "param_groups", "wingbeat.DeAR()")
    refused(UsageError, lambda: optimizer.step(scale=2.0), *words)
    optimizer.step()
    train(side, model, optimizer, range(1, 3))
    side.leave()


@check(Grid(worlds=(2,), mbs=(LARGE,)))
def a_backward_that_makes_a_graph(rig: Rig) -> None:
    """Refused on all ranks before anything is exchanged; what is meant works."""
    side = _side(rig)
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    optimizer.zero_grad()
    loss = cross_entropy(model, *side.batch(2))
    words = ("create_graph=True", "torch.autograd.grad", "penalty")
    refused(UsageError, lambda: loss.backward(create_graph=True), *words)
    assert all(p.grad is None for p in model.parameters())
    with side.no_sync(model):
        cross_entropy(model, *side.batch(3)).backward(create_graph=True)
    assert all(p.grad.requires_grad for p in model.parameters())
    optimizer.zero_grad()
    train(side, model, optimizer, range(4, 6))
    side.leave()


@check(ONE)
def laid_out_anew_under_a_fused_optimizer(rig: Rig) -> None:
    """Gradients would stay as they are, and a fused optimizer goes through memory."""
    side = _side(rig)
    model: Any = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    made = torch.optim.AdamW(model.parameters(), fused=True)
    model, _ = side.setup(model, made)
    words = ("AdamW(fused=True)", "4 dimensions", "distribute()")
    refused(UsageError, lambda: model.to(memory_format=torch.channels_last), *words)
    assert model[0].weight.is_contiguous()
    model.to(memory_format=torch.contiguous_format)
    side.leave()
    other: Any = nn.Sequential(nn.Conv2d(2, 4, 3))
    other, _ = side.setup(other, sgd(other))
    other.to(memory_format=torch.channels_last)
    side.leave()


@check(ONE)
def loaded_by_assignment(rig: Rig) -> None:
    side = _side(rig)
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    words = ("assign=True", "distribute()")
    refused(UsageError, lambda: model.load_state_dict(state, assign=True), *words)
    refused(
        UsageError, lambda: model[0].load_state_dict(mlp()[0].state_dict(), assign=True), *words
    )
    model.load_state_dict(state)
    train(side, model, optimizer, range(2, 4))
    side.leave()


@check(DENSE)
def a_backward_after_one_that_was_cut_short(rig: Rig) -> None:
    """Through a method of the model's, so that no forward tells one from the other."""
    side = _side(rig)
    model: Any = Trapped()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))

    def lose(batch: int) -> torch.Tensor:
        x, y = side.batch(batch)
        return nn.functional.cross_entropy(type(model).forward(model, x), y)

    model.armed = "backward"
    with pytest.raises(RuntimeError, match="the trap"):
        lose(2).backward()
    model.armed = ""
    refused(UsageError, lambda: lose(3).backward(), "cut", "short", "zero_grad()")
    optimizer.zero_grad()
    for step in (4, 5):
        lose(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.leave()


@check(ONE)
def unfrozen_after_distribute(rig: Rig) -> None:
    side = _side(rig)
    model: Any = mlp()
    model[0].requires_grad_(False)
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    model[0].weight.requires_grad_(True)
    x, _ = side.batch(2)
    refused(UsageError, lambda: model(x), "0.weight", "frozen", "release")
    with torch.no_grad():
        model(x)
    model[0].weight.requires_grad_(False)
    train(side, model, optimizer, range(3, 5))
    side.leave()


@check(ONE)
def what_torch_distributes_already_is_refused(rig: Rig) -> None:
    """At `distribute`, on every rank, naming a parameter and how it is placed."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    bring_world_up()
    mesh = init_device_mesh("cpu", (rig.size,))

    def all_sharded(model: Any) -> Any:
        return fully_shard(model, mesh=mesh)

    def last_sharded(model: Any) -> Any:
        fully_shard(model[3], mesh=mesh)
        return model

    def column_wise(model: Any) -> Any:
        return parallelize_module(model, mesh, {"0": ColwiseParallel()})

    shard = r"Shard\(dim=0\) on a mesh of shape \(2,\)"
    applied: dict[str, Any] = {
        rf"'0.weight' is sharded as {shard} by fully_shard\(\)": lambda m: fully_shard(
            m, mesh=mesh
        ),
        rf"'3.weight' is sharded as {shard} by fully_shard\(\)": last_sharded,
        rf"'0.weight' is placed as {shard} by parallelize_module\(\)": column_wise,
        r"'0.weight' is replicated by replicate\(\): .* averaged twice": replicate,
        r"_flat_param' is sharded by FullyShardedDataParallel: .*shard_optimizer": lambda m: (
            FullyShardedDataParallel(m, device_id=torch.device("cpu"))
        ),
    }
    for words, apply in applied.items():
        model = apply(mlp())
        with pytest.raises(UsageError, match=words):
            wingbeat.distribute(model, sgd(model), rig.strategy)


@check(ONE)
def what_torch_distributes_since_is_refused(rig: Rig) -> None:
    from torch.distributed._composable.replicate import replicate

    side = _side(rig)
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    replicate(model)
    with pytest.raises(UsageError, match=r"replicate\(\) was applied to it since"):
        model(side.batch(2)[0])
    side.leave()
