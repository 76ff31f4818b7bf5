"""Optimizers and models in legal uses that once ended in other weights than DDP's."""

from __future__ import annotations

import collections
import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import ALL, BOTH, CODED, DIVIDED, Grid, Rig, add, check, scenario
from ..sides import Side, WingbeatSide
from .errors import refused
from .hunted import KeepsGradients

WHOLE = Grid(strategies=(*BOTH, *CODED))
DENSE = Grid(strategies=ALL)


def _one_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model, x, y).backward()
    optimizer.step()


# -- the optimizer between a step and the update that is due -------------------------------


class Settings(torch.optim.Optimizer):
    """SGD with a factor in an attribute, and noise."""

    def __init__(self, params: Any, noise: float = 0.0) -> None:
        super().__init__(params, {"lr": 0.1})
        self.factor, self.noise = 1.0, noise

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.factor)
                    if self.noise:
                        p.add_(torch.randn_like(p) * self.noise)


def _changed(make: Callable[[Any], Any], change: Callable[[Any, int], None]) -> Any:
    def play(side: Side) -> None:
        model: Any = mlp()
        model, optimizer = side.setup(model, make(model))
        for step in range(6):
            _one_step(model, optimizer, *side.batch(step))
            change(optimizer, step)

    return play


def _new_state(optimizer: Any, step: int) -> None:
    if step == 3:
        optimizer.state = collections.defaultdict(dict)


def _betas_in_a_list(model: Any) -> Any:
    optimizer = adamw(model)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    return optimizer


def _write_betas(optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["betas"][0] = 0.1 * step


def _set_factor(optimizer: Any, step: int) -> None:
    optimizer.factor = 0.3 * (1 + step)


def _remove_from_group(optimizer: Any, step: int) -> None:
    if step == 3:
        del optimizer.param_groups[0]["params"][:2]


def _regroup(optimizer: Any, step: int) -> None:
    if step == 3:
        group = optimizer.param_groups[0]
        params = group["params"]
        optimizer.param_groups = [
            {**group, "params": params[:2], "lr": 0.01},
            {**group, "params": params[2:]},
        ]


def _plain(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


_settings = _changed(lambda m: Settings(m.parameters()), _set_factor)
add(_changed(adamw, _new_state), "optimizer_state_replaced_right_after_step", WHOLE)
add(_changed(_betas_in_a_list, _write_betas), "settings_in_a_list_written_right_after_step", DENSE)
add(_settings, "attribute_of_an_optimizer_set_right_after_step", DENSE)
add(_changed(_plain, _remove_from_group), "parameters_removed_from_a_group", WHOLE)
add(_changed(_plain, _regroup), "param_groups_replaced", WHOLE)


@scenario(WHOLE)
def an_optimizer_that_draws_random_numbers(side: Side) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))
    train(side, *side.setup(model, Settings(model.parameters(), noise=0.01)))


@check(Grid(strategies=DIVIDED))
def shards_of_an_optimizer_that_keeps_gradients(rig: Rig) -> None:
    model: Any = mlp()
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    optimizer = KeepsGradients(model.parameters())
    refused(Exception, lambda: side.setup(model, optimizer), "keeps gradients themselves")


@check(Grid(strategies=DIVIDED))
def a_divided_optimizer_changed_after_distribute(rig: Rig) -> None:
    model: Any = mlp()
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model, optimizer = side.setup(model, adamw(model))
    _one_step(model, optimizer, *side.batch(0))
    refused(Exception, lambda: setattr(optimizer, "state", {}), "load_state_dict()")
    refused(Exception, lambda: optimizer.state.clear(), "optimizer.state_dict()")
    optimizer.zero_grad()
    del optimizer.param_groups[0]["params"][:2]
    cross_entropy(model, *side.batch(1)).backward()
    refused(Exception, optimizer.step, "param groups", "release")


# -- copies that a model makes of itself ---------------------------------------------------


class CopiesItself(nn.Module):
    """Makes another of its kind, and copies its attributes by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.last = nn.Linear(width, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out

    def clone(self) -> Any:
        made = type(self)(self.width)
        made.load_state_dict(self.state_dict())
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        kind = self.__class__
        made = kind.__new__(kind)
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return made


def _copied(make: Callable[[], Any], copy_of: Callable[[Any], Any]) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        bare = make()
        model, optimizer = side.setup(bare, sgd(bare))
        for step in range(3):
            x, y = side.batch(step)
            _one_step(model, optimizer, x, y)
            made = copy_of(bare).to(x.device)
            side.note("output", made(x).sum())
            side.note("norm", sum(float(p.detach().norm()) for p in made.parameters()))

    return play


add(_copied(lambda: CopiesItself(8), lambda m: m.clone()), "a_model_that_clones_itself")
add(_copied(lambda: CopiesItself(8), copy.deepcopy), "a_model_with_deepcopy_of_its_own")
add(_copied(lambda: torch.fx.symbolic_trace(mlp()), copy.deepcopy), "copies_of_a_traced_model")


@check(DENSE)
def models_without_values(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    lazy: Any = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    refused(Exception, lambda: side.setup(lazy, _plain(lazy)), "'0.weight'", "forward")
    meta: Any = nn.Linear(4, 3, device="meta")
    refused(Exception, lambda: side.setup(meta, _plain(meta)), "'weight'", "to_empty()")


@check(DENSE)
def a_forked_child_reads_parameters(rig: Rig) -> None:
    """As the workers of a DataLoader do that is made right after a step."""
    bare: Any = mlp()
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model, optimizer = side.setup(bare, sgd(bare))
    _one_step(model, optimizer, *side.batch(0))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os.write(theirs, str(float(bare[0].weight.sum())).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child did not end"
    assert float(os.read(ours, 100)) == float(bare[0].weight.sum())
    os.close(ours)
    os.close(theirs)
    side.leave()
