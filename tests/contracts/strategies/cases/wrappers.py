"""Optimizers of unusual kinds, and what other libraries put around models and optimizers."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import wingbeat
from wingbeat.errors import UsageError

from ..models import adamw, cross_entropy, evaluation, mlp, sgd, train
from ..registry import BOTH, Grid, Rig, add, check, scenario
from ..sides import Side, WingbeatSide

LASTING = Grid(strategies=(*BOTH, "allreduce-coded", "dear-coded"))
"""Strategies that do not divide the optimizer, which refuse these by name."""


class Counting(torch.optim.Optimizer):
    """Adam's bias correction with one count for all parameters, kept in an attribute."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(0.9).add_(p.grad, alpha=0.1)
                    p.sub_(m / (1 - 0.9**self.t), alpha=group["lr"])


class NormAtOnce(torch.optim.Optimizer):
    """Clips by the norm over all gradients inside its step."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not params:
            return
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / (norm + 1e-6), alpha=self.param_groups[0]["lr"] * 0.1)


class InGroups(torch.optim.Optimizer):
    """Keeps a count in its param groups, as those do that find their learning rate themselves."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"] ** 0.5)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer; every second step goes half of the way only."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)
        self.count = 0
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        super().__init__(inner.param_groups, inner.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.count % 2 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation: evaluates the loss a second time, a little uphill."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        moves = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    move = 0.05 * p.grad.sign()
                    p.add_(move)
                    moves.append((p, move))
        evaluate()
        for p, move in moves:
            p.sub_(move)
        super().step()
        return loss


def _trained(make: Any) -> Any:
    def play(side: Side) -> None:
        model = mlp()
        model, optimizer = side.setup(model, make(model))
        train(side, model, optimizer)
        if isinstance(optimizer, Counting):
            side.note("t", float(optimizer.t))

    return play


for _kind in (Counting, NormAtOnce, InGroups):
    add(_trained(lambda m, k=_kind: k(m.parameters())), f"optimizer_{_kind.__name__}", LASTING)
add(_trained(lambda m: Lookahead(sgd(m))), "optimizer_Lookahead", Grid(strategies=BOTH))


@scenario(Grid(strategies=BOTH))
def optimizer_that_evaluates_twice(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, Sharpness(model.parameters(), lr=0.1))
    for step in range(4):
        closure = evaluation(model, optimizer, *side.batch(step))
        side.note("loss", optimizer.step(closure))


# -- other libraries ----------------------------------------------------------------------


class Delegating(torch.optim.Optimizer):
    """As Accelerate's: holds an optimizer, and passes on what it is asked."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@scenario()
def an_optimizer_in_a_wrapper_that_passes_calls_on(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, Delegating(adamw(model)))
    train(side, model, optimizer)


class Mixed:
    """As Lightning's: an object of a class made from the optimizer's, without its attributes."""

    def __init__(self, optimizer: Any) -> None:
        self._inner = optimizer
        self.__class__ = type("Mixed" + type(optimizer).__name__, (Mixed, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, closure: Any = None) -> Any:
        return self._inner.step(closure)


@scenario()
def an_object_of_a_class_made_from_the_optimizers(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    mixed: Any = Mixed(optimizer)
    for step in range(4):
        closure = evaluation(model, mixed, *side.batch(step))
        mixed.step(closure)
        side.note("groups", float(len(mixed.param_groups)))
        side.note("entries", float(len(mixed.state_dict()["state"])))


@check()
def state_dicts_of_torchs_checkpoints(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = mlp()
    model, optimizer = side.setup(model, adamw(model))
    for last in (0, 3):
        train(side, model, optimizer, range(last))
        weights, moments = copy.deepcopy(get_state_dict(model, optimizer))
        assert set(weights) == set(mlp().state_dict())
        if last:
            assert len(moments["state"]) == len(weights), "a parameter has no state"
    want = {k: v.clone() for k, v in model.state_dict().items()}
    train(side, model, optimizer, range(3, 5))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert all(torch.equal(want[k], v) for k, v in model.state_dict().items())
    train(side, model, optimizer, range(3, 5))
    side.leave()


class Named(nn.Module):
    """Has a layer called ``join`` and methods of its own called ``synchronize`` and ``no_sync``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(classes=8)
        self.join = nn.Linear(8, 3)
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1

    def no_sync(self) -> str:
        return "the model's own"

    def forward(self, x: Tensor) -> Tensor:
        self.synchronize()
        out: Tensor = self.join(torch.tanh(self.body(x)))
        return out


@scenario()
def names_that_the_model_has_itself(side: Side) -> None:
    model: Any = Named()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        with wingbeat.no_sync(model) if side.is_subject else side.no_sync(model):
            cross_entropy(model, *side.batch(10 * step)).backward()
        cross_entropy(model, *side.batch(10 * step + 1)).backward()
        optimizer.step()
    if side.is_subject:
        assert bare.no_sync() == "the model's own"
        wingbeat.synchronize(model)
        with wingbeat.join(model):
            pass
    side.note("synchronized", float(bare.synchronized))


@check()
def functions_refuse_plain_models(rig: Rig) -> None:
    for call in (wingbeat.no_sync, wingbeat.join, wingbeat.synchronize):
        with pytest.raises(UsageError, match=r"pass a model that distribute\(\) has returned"):
            call(mlp())
