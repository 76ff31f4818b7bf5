"""Forwards that are none of the usual: other methods, other modes, other owners, other times."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import wingbeat
from wingbeat.errors import UsageError

from ..compare import assert_same_on_every_rank
from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import ALL, CODED, TINY, Grid, Rig, check, scenario
from ..sides import Side, WingbeatSide, bring_world_up


class Many(nn.Module):
    """A model that is trained through methods of its own; ``forward`` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(classes=8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)
        self.late = nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.body(x)) * self.scale
        return out

    def loss(self, x: Tensor, y: Tensor, late: bool = False) -> Tensor:
        x = self.features(x)
        # A functional call: the layer's own forward is not run.
        out = F.linear(x, self.head.weight, self.head.bias)
        if late:
            out = out + F.linear(x, self.late.weight, self.late.bias)
        return F.cross_entropy(out, y)

    def forward(self, x: Tensor, y: Tensor, late: bool = False) -> Tensor:
        return self.loss(x, y, late)


@scenario()
def fine_tuning_in_evaluation_mode(side: Side) -> None:
    """Layers are held still, and read by another module than the one that they belong to."""
    model: Any = Many()
    model.eval()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):
        optimizer.zero_grad()
        model(*side.batch(step)).backward()
        optimizer.step()


def _trained_by_method(side: Side, late_from: int = 99) -> None:
    model: Any = Many()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):
        x, y = side.batch(step)
        optimizer.zero_grad()
        run = model.loss if side.is_subject else model
        run(x, y, step >= late_from).backward()
        optimizer.step()


@scenario()
def trained_through_another_method(side: Side) -> None:
    _trained_by_method(side)


@scenario()
def a_part_first_used_later_through_another_method(side: Side) -> None:
    _trained_by_method(side, late_from=3)


@scenario()
def a_part_first_used_later(side: Side) -> None:
    model: Any = Many()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        optimizer.zero_grad()
        model(*side.batch(step), late=step >= 3).backward()
        optimizer.step()


@scenario()
def whole_model_checkpointed(side: Side) -> None:
    """The model's own forward is run again in the midst of backward."""
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        x, y = side.batch(step)
        optimizer.zero_grad()
        if side.is_subject:
            out = checkpoint(model, x.requires_grad_(), use_reentrant=False)
        else:
            out = model(x)
        F.cross_entropy(out, y).backward()
        optimizer.step()


@scenario(Grid(worlds=(2,), mbs=(TINY,)), find_unused=False)
def parts_checkpointed_reentrantly(side: Side) -> None:
    """Each part runs a backward of its own inside of backward; the last one ends with no other."""
    parts: Any = nn.ModuleList([mlp(classes=8), mlp(classes=8), mlp()])
    parts, optimizer = side.setup(_InTurn(parts), adamw(parts))
    for step in range(4):
        optimizer.zero_grad()
        cross_entropy(parts, *side.batch(step)).backward()
        optimizer.step()


class _InTurn(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=True)
        return x


@scenario()
def no_sync_is_decided_by_the_forward(side: Side) -> None:
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        with side.no_sync(model):
            loss = cross_entropy(model, *side.batch(10 * step))
        loss.backward()
        loss = cross_entropy(model, *side.batch(10 * step + 1))
        with side.no_sync(model):
            loss.backward()
        optimizer.step()


class Raising(nn.Module):
    """Raises in its first forward in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.raised = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.raised:
            self.raised = True
            raise KeyError("the user's own mistake")
        out: Tensor = self.body(x)
        return out


@scenario()
def an_exception_in_the_first_forward(side: Side) -> None:
    model: Any = Raising()
    if not side.is_subject:
        model.raised = True
    model, optimizer = side.setup(model, sgd(model))
    if side.is_subject:
        with pytest.raises(KeyError, match="the user's own mistake"):
            model(side.batch(0)[0])
    train(side, model, optimizer)


class Rooted(nn.Module):
    """A model that refers to itself, as some do to reach their root."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.__dict__["root"] = self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.__dict__["root"].body(x)
        return out


@check()
def copies_of_a_model_that_refers_to_itself(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = Rooted()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    twin = copy.deepcopy(model)
    assert type(twin) is Rooted
    assert twin.__dict__["root"] is twin
    assert twin.body is not model.body
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    loaded, loaded_optimizer = torch.load(file, weights_only=False)
    assert type(loaded) is Rooted
    assert loaded.__dict__["root"] is loaded
    assert type(loaded_optimizer) is torch.optim.SGD
    assert loaded_optimizer.param_groups[0]["params"][0] is next(loaded.parameters())
    both = copy.deepcopy({"model": model, "layers": [model.body[0]]})
    assert both["layers"][0] is both["model"].body[0]
    for name, value in twin.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    side.leave()


class Scripted(nn.Module):
    """Holds a module whose forward runs in C++, where no hook of its layers is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.jit.trace(mlp(classes=8), torch.zeros(4, 8))  # type: ignore[no-untyped-call]
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


@scenario()
def a_part_compiled_by_torchscript(side: Side) -> None:
    model: Any = Scripted()
    train(side, *side.setup(model, adamw(model)))


@check()
def a_whole_model_compiled_by_torchscript(rig: Rig) -> None:
    bring_world_up()
    model: Any = torch.jit.trace(mlp(), torch.zeros(4, 8))  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match=r"torch.jit .* inside of a plain torch.nn.Module"):
        wingbeat.distribute(model, sgd(model), rig.strategy)


# -- buffers ------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Its output depends on buffers, which are given new tensors or written to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.shift: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x) + self.shift
        if self.training:
            self.shift = 0.9 * self.shift + 0.1 * out.detach().mean(0)
            self.count += 1
        result: Tensor = out
        return result


@scenario()
def buffers_given_new_tensors(side: Side) -> None:
    model: Any = Remembering()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer)


@scenario(reference="plain")  # DDP fails once no buffer is left
def buffers_that_are_removed(side: Side) -> None:
    """As pruning does: masks are buffers from `prune.l1_unstructured` to `prune.remove`."""
    model: Any = mlp()
    parts = [model[0], model[3]]
    for part in parts:
        prune.l1_unstructured(part, "weight", 0.4)  # type: ignore[no-untyped-call]
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.step()
        if step % 2 and parts:
            prune.remove(parts.pop(), "weight")  # type: ignore[no-untyped-call]


def _written(side: Side, who: Any) -> None:
    model: Any = Remembering()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        train(side, model, optimizer, [step])
        if who(side.rank) and step in (1, 2, 4):  # not in the end, where workers may differ
            bare.shift.fill_(0.25 * step)
            bare.count = torch.tensor(100 * step + side.rank)


@scenario()
def buffers_written_between_backward_and_forward_on_all_ranks(side: Side) -> None:
    _written(side, lambda rank: True)


@scenario()
def buffers_written_between_backward_and_forward_on_rank_zero(side: Side) -> None:
    _written(side, lambda rank: rank == 0)


@scenario()
def buffers_written_between_backward_and_forward_on_the_others(side: Side) -> None:
    _written(side, lambda rank: rank > 0)


@scenario()
def running_statistics_reset(side: Side) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    norm = model[1]
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        train(side, model, optimizer, [step])
        norm.reset_running_stats()
        side.note("mean after reset", norm.running_mean)
        side.note("mean saved", side.bare(model).state_dict()["1.running_mean"])


@check()
def a_buffer_written_before_a_forward_reaches_all(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = Remembering()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(3):
        if rig.rank == 0:
            bare.shift = bare.shift + step + 1
        out = model(side.batch(step)[0])
        # All batches differ: what has been added in this forward is not the same everywhere.
        mine = (bare.shift - 0.1 * out.detach().mean(0)) / 0.9
        assert_same_on_every_rank({"shift": mine.round(decimals=4)}, "at the forward's beginning")
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    side.leave()


# -- several models -----------------------------------------------------------------------


class Half(nn.Module):
    """A layer, and one that only some ranks use."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.always = nn.Linear(width, out)
        self.sometimes = nn.Linear(width, out)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        result: Tensor = torch.tanh(self.always(x))
        if both:
            result = result + torch.tanh(self.sometimes(x))
        return result


@scenario()
def two_models_in_one_loss_with_parts_unused_on_one_rank(side: Side) -> None:
    """In which order the two models' buckets are complete differs from rank to rank."""
    encoder: Any = Half(8, 12)
    decoder: Any = Half(12, 3)
    encoder, encoder_step = side.setup(encoder, sgd(encoder))
    decoder, decoder_step = side.setup(decoder, adamw(decoder))
    for step in range(6):
        x, y = side.batch(step)
        encoder_step.zero_grad()
        decoder_step.zero_grad()
        inner = encoder(x, (side.rank + step) % 2 == 0)
        F.cross_entropy(decoder(inner, (side.rank + step) % 3 == 0), y).backward()
        encoder_step.step()
        decoder_step.step()


# Without merging, whose measuring takes all workers at once.
@scenario(Grid(strategies=(*ALL, *CODED)))
def two_models_in_one_backward_in_another_order_on_each_rank(side: Side) -> None:
    """Their forwards take turns, and with them the order in which gradients become ready."""
    models = [side.setup(m, sgd(m)) for m in (Half(8, 3), Half(8, 3))]
    order = [0, 1]
    if side.is_subject and side.rank % 2:  # DDP's messages match by order, so it keeps to one
        order.reverse()
    for step in range(5):
        x, y = side.batch(step)
        losses = [F.cross_entropy(models[i][0](x, (side.rank + i) % 2 == 0), y) for i in order]
        for _, optimizer in models:
            optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        for _, optimizer in models:
            optimizer.step()
