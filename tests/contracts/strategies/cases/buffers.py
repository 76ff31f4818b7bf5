"""Buffers that forwards make and replace, and forwards inside of transforms of torch.func."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F

from ..compare import assert_same_on_every_rank
from ..models import mlp, sgd, train
from ..registry import TINY, Grid, Rig, check, scenario
from ..sides import Side, WingbeatSide

SMALL = Grid(mbs=(TINY,))


class Late(nn.Module):
    """Scales its output by what its first forward has found."""

    late: Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body = mlp()
        self.how = how
        if how == "announced":
            self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        late: Tensor | None = getattr(self, "late", None)
        if late is None:
            late = out.detach().std(0) + 0.5
            if self.how == "in a new module":
                self.inner = nn.Module()
                self.inner.register_buffer("late", late)
            self.register_buffer("late", late)
        return out / late


def _with_another(how: str) -> Any:
    """DDP follows buffers only in a model that has had one when it was wrapped."""
    model: Any = Late(how)
    model.register_buffer("other", torch.zeros(1))
    return model


@scenario(SMALL)
def a_buffer_that_gets_its_tensor_in_the_first_forward(side: Side) -> None:
    model = _with_another("announced")
    train(side, *side.setup(model, sgd(model)))


@scenario(SMALL)
def a_buffer_registered_in_the_first_forward(side: Side) -> None:
    model = _with_another("in a new module")
    train(side, *side.setup(model, sgd(model)))


def _late_alone(rig: Rig, how: str) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = Late(how)
    model, optimizer = side.setup(model, sgd(model))
    first = model.body(side.batch(0)[0]).detach().std(0) + 0.5
    train(side, model, optimizer, range(3))
    assert_same_on_every_rank(dict(model.state_dict()), "after training")
    assert rig.rank or torch.equal(model.late, first), "they are rank 0's"
    side.leave()


@check(SMALL)
def a_model_whose_only_buffer_is_made_in_forward(rig: Rig) -> None:
    """DDP never synchronises it, and its workers end with other weights."""
    _late_alone(rig, "announced")


@check(SMALL)
def a_model_that_registers_its_only_buffer_in_forward(rig: Rig) -> None:
    _late_alone(rig, "in forward")


class Cached(nn.Module):
    """Keeps a mask for the longest sequence that it has seen, in a buffer or not at all."""

    mask: Tensor

    def __init__(self, *, cached: bool, persistent: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.score = nn.Linear(6, 1)
        self.cached, self.persistent = cached, persistent
        if cached:
            self.register_buffer("mask", _mask(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = _mask(n)
        if self.cached:
            if len(self.mask) < n:
                self.register_buffer("mask", mask, persistent=self.persistent)
            mask = self.mask[:n, :n]
            assert torch.equal(mask, _mask(n)), "another worker's mask has been written into it"
        h = torch.tanh(self.embed(x))
        return self.score((h @ h.mT).softmax(-1).masked_fill(mask.bool(), 0.0) @ h).square()


def _mask(n: int) -> Tensor:
    return torch.ones(n, n).triu(1)


def _of_other_lengths(rig: Rig, persistent: bool) -> None:
    ends = []
    for cached in (False, True):
        side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
        torch.manual_seed(3)
        model: Any = Cached(cached=cached, persistent=persistent)
        model, optimizer = side.setup(model, sgd(model))
        # In turns rank 0 has the longest sequence, and the shortest; and again shorter ones.
        for step, length in enumerate((3, 5, 4, 8, 2)):
            others = rig.rank if step % 2 else rig.size - rig.rank
            rng = torch.Generator().manual_seed(10 * step + rig.rank)
            optimizer.zero_grad()
            model(torch.randn(2, length + others, 4, generator=rng)).mean().backward()
            optimizer.step()
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
        assert_same_on_every_rank(ends[-1], "after training")
        side.leave()
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), f"{name}: {value} and {ends[1][name]}"


@check(SMALL)
def caches_of_other_lengths_on_each_rank(rig: Rig) -> None:
    """Under DDP a shorter one is written into a longer one, and a longer one ends the process."""
    _of_other_lengths(rig, persistent=False)


@check(SMALL)
def persistent_caches_of_other_lengths_on_each_rank(rig: Rig) -> None:
    _of_other_lengths(rig, persistent=True)


# -- transforms ---------------------------------------------------------------------------


def _normed() -> Any:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def _of_model(side: Side, model: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """Gradients of a functional call, per-sample gradients, and a Jacobian."""
    called = model if side.is_subject else side.bare(model)  # DDP's forward fails inside
    params = {name: p.detach() for name, p in side.bare(model).named_parameters()}
    buffers = dict(side.bare(model).named_buffers())

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(called, (params, buffers), (x[None],)), y[None])

    one = grad(loss)(params, x[0], y[0])
    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    return [*one.values(), *each.values(), jacrev(called)(x)]


@scenario()
def gradients_by_transforms_between_steps(side: Side) -> None:
    model = _normed()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        train(side, model, optimizer, [step])
        model.eval()
        with side.no_sync(model) if step % 2 else nullcontext():
            found = _of_model(side, model, *side.batch(0))
        if side.rank == 0:  # after a step DDP's others still have statistics of their own
            for value in found:
                side.note("by a transform", value)
        model.train()


@scenario(reference="plain")  # DDP's forward fails inside of a transform
def a_loss_of_gradients_that_a_transform_has_made(side: Side) -> None:
    """Parameters are not its arguments: they get their gradients from the backward after it."""
    model = _normed()
    model.eval()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        x, _ = side.batch(step)
        optimizer.zero_grad()
        slopes = vmap(grad(lambda z: model(z[None]).sum()))(x)
        slopes.square().mean().backward()
        optimizer.step()
