"""Sparse gradients: embeddings of recommenders, whose ranks use other rows, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

import wingbeat
from wingbeat.errors import MismatchError, UsageError

from ..models import sgd
from ..registry import BOTH, LARGE, Grid, Rig, add, check, scenario
from ..sides import Side, WingbeatSide, bring_world_up, take_world_down
from .errors import refused

GATHERED = Grid(strategies=BOTH)
OTHERS = Grid(
    worlds=(2,),
    strategies=tuple(name for name in Grid().strategies if name not in BOTH),
    mbs=(LARGE,),
)


class Recommender(nn.Module):
    """Two sparse tables, of which one may be left out, and a dense layer, if it is to have one."""

    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 6, sparse=True)
        self.tags = nn.EmbeddingBag(15, 6, sparse=True, mode="mean")
        self.out = nn.Linear(6, 3) if dense else None

    def forward(self, items: Tensor, tags: bool = True) -> Tensor:
        found: Tensor = self.items(items)
        if tags:
            found = found + self.tags(items[:, None] % 15)
        return found if self.out is None else self.out(found)


def rows(side: Side, step: int, rank: int | None = None) -> Tensor:
    """As many as a rank has, other ones on each; some of them twice."""
    rank = side.rank if rank is None else rank
    chance = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 20, (2 + 3 * rank,), generator=chance)


def mine(side: Side) -> range:
    """The ranks whose rows this side has."""
    return range(side.size) if side.sees_everything else range(side.rank, side.rank + 1)


def note_sparse(side: Side, model: Any, what: str) -> None:
    for name, param in side.bare(model).named_parameters():
        grad = param.grad
        if grad is not None:
            side.note(f"{what}: {name} is sparse", float(grad.is_sparse))
            side.note(f"{what}: {name}", grad.to_dense())


def _trained(make: Callable[[Any], Any], dense: bool) -> Callable[[Side], None]:
    """DDP ends with an error where a rank does not use a table."""

    def play(side: Side) -> None:
        model: Any = Recommender(dense)
        model, optimizer = side.setup(model, make(list(model.parameters())))
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for rank in mine(side):
                # One rank does not use the second table, then none does.
                tags = not (step == 2 and rank == 1) and step != 4
                loss = model(rows(side, step, rank), tags).square().mean()
                (loss / len(mine(side))).backward()
            note_sparse(side, model, f"step {step}")
            optimizer.step()

    return play


add(_trained(lambda p: optim.SGD(p, lr=0.5), True), "sparse_sgd", GATHERED, reference="plain")
add(
    _trained(lambda p: optim.Adagrad(p, lr=0.1), True),
    "sparse_adagrad",
    GATHERED,
    reference="plain",
)
_adam = _trained(lambda p: optim.SparseAdam(p, lr=0.1), False)
add(_adam, "sparse_adam_alone", GATHERED, reference="plain")


@scenario(GATHERED)
def sparse_accumulation(side: Side) -> None:
    """Under ``no_sync``, and by two synchronised backwards; the last touches few rows, or none."""
    model: Any = Recommender()
    model, optimizer = side.setup(model, optim.SGD(model.parameters(), lr=0.3))
    for step in range(4):
        optimizer.zero_grad()
        with side.no_sync(model):
            model(rows(side, 10 * step)).square().mean().backward()
            model(rows(side, 10 * step + 1)).square().mean().backward()
        few = rows(side, 10 * step + 2)[: step + 1]
        model(few, step % 2 == 0).square().mean().backward()
        if step == 3:
            model(rows(side, 10 * step + 3)).square().mean().backward()
        note_sparse(side, model, f"step {step}")
        optimizer.step()


@scenario(GATHERED)
def sparse_tables_with_an_optimizer_of_their_own(side: Side) -> None:
    """Each of two optimizers is the one that is distributed in turn."""
    for sparse_first in (True, False):
        model: Any = Recommender()
        tables = [model.items.weight, model.tags.weight]
        dense = optim.Adam(model.out.parameters(), lr=0.01)
        made: list[Any] = [optim.SparseAdam(tables, lr=0.05), dense]
        first, second = made if sparse_first else made[::-1]
        model, first = side.setup(model, first)
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            model(rows(side, step)).square().mean().backward()
            first.step()
            second.step()


@scenario(GATHERED)
def sparse_gradients_that_are_clipped_and_scaled(side: Side) -> None:
    model: Any = Recommender()
    model, optimizer = side.setup(model, optim.SGD(model.parameters(), lr=0.3))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(rows(side, step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        if step % 2:
            side.note("total norm", side.clip(model, optimizer, 0.05))
        scaler.step(optimizer)
        scaler.update()


@scenario(GATHERED, reference="plain")
def a_sparse_table_that_a_dense_layer_has_too(side: Side) -> None:
    """DDP ends such a backward with an error; the mean of dense gradients is dense."""
    model: Any = nn.Sequential(nn.Embedding(12, 5, sparse=True), nn.Linear(5, 12, bias=False))
    model[1].weight = model[0].weight
    model, optimizer = side.setup(model, optim.SGD(model.parameters(), lr=0.3))
    for step in range(4):
        optimizer.zero_grad()
        for rank in mine(side):
            x = torch.arange(rank, rank + 5) + step
            # Rank 1 reads the table alone in one step: its gradient is sparse then.
            found = model[0](x) if step == 2 and rank == 1 else model(x)
            (found.square().mean() / len(mine(side))).backward()
        note_sparse(side, model, f"step {step}")
        optimizer.step()


@check(OTHERS)
def sparse_gradients_where_they_cannot_be_exchanged(rig: Rig) -> None:
    """Refused at `distribute`, on all ranks; dense ones of the same model are not."""
    bring_world_up()
    model: Any = Recommender()
    optimizer = sgd(model)
    words = ("'items.weight'", "sparse=True", repr(rig.strategy), "wingbeat.AllReduce()")
    refused(UsageError, lambda: wingbeat.distribute(model, optimizer, rig.strategy), *words)
    assert type(model) is Recommender


@check(Grid(worlds=(2,), strategies=BOTH, mbs=(LARGE,)))
def a_table_that_is_sparse_on_one_rank(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = Recommender()
    model.items.sparse = rig.rank == 0
    words = ("items.weight", "rank 0", "rank 1", "sparse gradients")
    refused(MismatchError, lambda: side.setup(model, sgd(model)), *words)


@check(Grid(worlds=(2,), strategies=BOTH, mbs=(LARGE,)))
def a_step_of_sparse_tables_alone_skipped_on_one_rank(rig: Rig) -> None:
    """No bucket's end tells it here."""
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = Recommender(dense=False)
    model, optimizer = side.setup(model, optim.SGD(model.parameters(), lr=0.1))

    def go_on() -> None:
        for step in range(4):
            optimizer.zero_grad()
            model(rows(side, step)).square().mean().backward()
            if step != 1 or rig.rank != 1:
                optimizer.step()

    refused(UsageError, go_on, "different numbers of optimizer steps", "rank 1 1")
    side.trained.clear()
    take_world_down()
