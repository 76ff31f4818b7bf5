"""Who looks at gradients and parameters, from where, and when: none of them may be served less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import DIVIDED, Grid, Rig, add, check, scenario
from ..sides import Side, WingbeatSide

Look = Callable[[Side, Any, list[Any]], None]


def _between_backward_and_step(look: Look, make: Any = sgd) -> Callable[[Side], None]:
    """``look(side, model, params)`` with a list of parameters made before `distribute`."""

    def play(side: Side) -> None:
        model = mlp()
        params = list(model.parameters())
        bare = model
        model, optimizer = side.setup(model, make(model))
        for step in range(5):
            optimizer.zero_grad()
            cross_entropy(model, *side.batch(step)).backward()
            look(side, bare, params)
            optimizer.step()

    return play


def _clip_list(side: Side, model: Any, params: list[Any]) -> None:
    side.note("norm", nn.utils.clip_grad_norm_(params, 0.05))


def _clip_list_unfused(side: Side, model: Any, params: list[Any]) -> None:
    side.note("norm", nn.utils.clip_grad_norm_(params, 0.05, foreach=False))


def _clip_layer(side: Side, model: Any, params: list[Any]) -> None:
    side.note("norm", nn.utils.clip_grad_norm_(model[0].parameters(), 0.02))


def _clip_values(side: Side, model: Any, params: list[Any]) -> None:
    nn.utils.clip_grad_value_(params, 0.01)


def _read_one(side: Side, model: Any, params: list[Any]) -> None:
    side.note("gradient", model[3].weight.grad)


def _scale_one(side: Side, model: Any, params: list[Any]) -> None:
    model[3].weight.grad *= 0.5
    model[0].bias.grad.data.mul_(2.0)


def _replace_one(side: Side, model: Any, params: list[Any]) -> None:
    params[0].grad = params[0].grad.clone() * 0.25
    params[1].grad.data = torch.full_like(params[1], 0.125)


def _assign_all(side: Side, model: Any, params: list[Any]) -> None:
    """Nothing is read before it is replaced."""
    for p in params:
        p.grad = torch.full_like(p, 0.01)


def _remove_some(side: Side, model: Any, params: list[Any]) -> None:
    for p in params[::2]:
        p.grad = None


def _zero_in_place(side: Side, model: Any, params: list[Any]) -> None:
    params[2].grad.zero_()


def _flat_vector(side: Side, model: Any, params: list[Any]) -> None:
    side.note("flat", torch.cat([p.grad.reshape(-1) for p in params]))


def _numpy(side: Side, model: Any, params: list[Any]) -> None:
    side.note("as numpy", torch.from_numpy(params[0].grad.numpy().copy()))
    side.note("as list", torch.tensor(params[1].grad.tolist()))


def _kept_until_later(side: Side, model: Any, params: list[Any]) -> None:
    kept = [p.grad for p in params]
    side.note("shape", float(sum(g.numel() for g in kept)))
    side.note("norm", torch.stack([g.norm() for g in kept]).norm())


def _one_rank_reads(side: Side, model: Any, params: list[Any]) -> None:
    if side.rank == 0:
        side.note("gradient", params[0].grad)


for _look in (
    _clip_list,
    _clip_list_unfused,
    _clip_layer,
    _clip_values,
    _read_one,
    _scale_one,
    _replace_one,
    _assign_all,
    _remove_some,
    _zero_in_place,
    _flat_vector,
    _numpy,
    _kept_until_later,
    _one_rank_reads,
):
    add(_between_backward_and_step(_look), f"gradients_by_captured_parameters{_look.__name__}")
add(_between_backward_and_step(_clip_list, adamw), "gradients_by_captured_parameters_clip_adamw")


class Routed(nn.Module):
    """A trunk, and a branch that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(classes=8)
        self.branch = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        x = torch.tanh(self.trunk(x))
        if use:
            x = x + torch.tanh(self.branch(x))
        out: Tensor = self.head(x)
        return out


@scenario()
def captured_list_clipped_where_ranks_use_different_parameters(side: Side) -> None:
    model: Any = Routed()
    params = list(model.parameters())
    model, optimizer = side.setup(model, adamw(model))
    for step in range(5):
        optimizer.zero_grad()
        x, y = side.batch(step)
        F.cross_entropy(model(x, (step + side.rank) % 2 == 0), y).backward()
        side.note("norm", nn.utils.clip_grad_norm_(params, 0.05))
        optimizer.step()


def _two_optimizers(first: bool, make: Any) -> Callable[[Side], None]:
    """A second, plain optimizer for the head, stepping before or after the distributed one."""

    def play(side: Side) -> None:
        model: Any = Routed()
        plain = make(nn.ModuleList([model.head, model.never]))
        for p in (*model.head.parameters(), *model.never.parameters()):
            p.in_plain = True
        own = torch.optim.SGD(
            [p for p in model.parameters() if not hasattr(p, "in_plain")], lr=0.1, momentum=0.9
        )
        model, own = side.setup(model, own)
        for step in range(5):
            own.zero_grad()
            plain.zero_grad()
            x, y = side.batch(step)
            F.cross_entropy(model(x, (step + side.rank) % 2 == 0), y).backward()
            for each in (plain, own) if first else (own, plain):
                each.step()

    return play


LASTING = Grid(strategies=("allreduce", "dear", "allreduce-coded", "dear-coded", "mgwfbp"))
"""With which gradients outlast the step."""

add(_two_optimizers(True, adamw), "second_plain_optimizer_steps_first")
add(_two_optimizers(False, adamw), "second_plain_optimizer_steps_last_adamw")
add(_two_optimizers(False, sgd), "second_plain_optimizer_steps_last_sgd")


@scenario(LASTING)
def gradients_read_after_step(side: Side) -> None:
    model = mlp()
    params = list(model.parameters())
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.step()
        side.note("norm", torch.stack([p.grad.norm() for p in params]).norm())


@scenario(LASTING)  # divided among the workers, reading it is refused: below
def optimizer_state_read_by_attribute(side: Side) -> None:
    model = mlp()
    params = list(model.parameters())
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        train(side, model, optimizer, [step])
        side.note("moment", optimizer.state[params[0]]["exp_avg"])


@scenario()
def parameters_read_by_attribute_after_step(side: Side) -> None:
    model = mlp()
    layer, params = model[0], list(model.parameters())
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        train(side, model, optimizer, [step])
        side.note("weight", layer.weight)
        side.note("captured", params[-1])
        side.note("printed", float(str(params[1]).count(",")))
        side.note("as numpy", torch.from_numpy(params[2].detach().numpy().copy()))
        side.note("length", float(len(params[3])))
        side.note("sum", torch.stack([p.detach().sum() for p in params]).sum())


@scenario()
def parameters_changed_by_attribute_after_step(side: Side) -> None:
    model = mlp()
    layer = model[0]
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        train(side, model, optimizer, [step])
        with torch.no_grad():
            layer.weight.clamp_(-0.1, 0.1)
            layer.bias.data.mul_(0.5)
            layer.weight[0] = 0.0


class Hooked(nn.Module):
    """Hooks of the user on every parameter, registered when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.seen: list[Tensor] = []

    def listen(self) -> None:
        for p in self.body.parameters():
            p.register_post_accumulate_grad_hook(self._hear)

    def _hear(self, p: Tensor) -> None:
        assert p.grad is not None
        self.seen.append(p.grad.detach().norm())
        p.grad.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def _hooked(before: bool) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model: Any = Hooked()
        bare = model
        if before:
            bare.listen()
        model, optimizer = side.setup(model, sgd(model))
        if not before:
            bare.listen()
        for step in range(4):
            train(side, model, optimizer, [step])
            side.note("what hooks saw", torch.stack(bare.seen))
            bare.seen.clear()

    return play


add(_hooked(True), "accumulation_hooks_registered_before_distribute")
add(_hooked(False), "accumulation_hooks_registered_after_distribute")


@scenario()
def tensor_hooks_registered_after_distribute(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for p in bare.parameters():
        p.register_hook(lambda grad: grad * 0.5 + 0.01)
    train(side, model, optimizer)


@check()
def gradients_cost_nothing_while_nobody_looks(rig: Rig) -> None:
    """Nothing is gathered between backward and step, unless somebody touches a gradient."""
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = mlp()
    params = list(model.parameters())
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(3))
    optimizer.zero_grad()
    cross_entropy(model, *side.batch(9)).backward()
    kinds = {type(p.grad) for p in params}
    assert all(p.grad is not None and p.grad.shape == p.shape for p in params)
    assert all(p.grad.dtype is p.dtype and not p.grad.is_sparse for p in params)
    if "dear" in rig.strategy_name:
        assert kinds == {type(params[0].grad)}, "looking at shapes has gathered something"
        assert kinds != {Tensor}
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    assert norm > 0
    assert {type(p.grad) for p in params} == {Tensor}
    optimizer.step()
    side.leave()


@check(Grid(strategies=DIVIDED))
def divided_state_cannot_be_read(rig: Rig) -> None:
    import pytest

    from wingbeat.errors import UsageError

    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = mlp()
    weight = model[0].weight
    model, optimizer = side.setup(model, adamw(model))
    train(side, model, optimizer, range(2))
    assert len(optimizer.state) > 0
    with pytest.raises(UsageError, match="state_dict"):
        optimizer.state[weight]
    with pytest.raises(UsageError, match="state_dict"):
        list(optimizer.state)
    train(side, model, optimizer, range(2, 4))
    side.leave()
