"""Parameters that are others than at `distribute`: refused, and what works after that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wingbeat
from wingbeat.errors import UsageError

from ..compare import assert_same_on_every_rank
from ..models import cross_entropy, sgd, train
from ..registry import ALL, BOUND, CODED, DIVIDED, LARGE, SERVED, Grid, Rig, check
from ..sides import WingbeatSide
from .errors import refused

GRID = Grid(worlds=(2,), strategies=(*ALL, *CODED, *BOUND, *SERVED), mbs=(LARGE,))


class Words(nn.Module):
    """An embedding, which grows with its vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.words(x.argmax(1))))
        return out


def _resized(model: Any, optimizer: Any, rank: int) -> None:
    """As most do it by hand; the new rows are drawn by each rank."""
    old, new = model.words.weight, nn.Parameter(torch.randn(9, 6) + rank)
    model.words.weight = new
    _exchange(optimizer, old, new)


def _another_module(model: Any, optimizer: Any, rank: int) -> None:
    """As ``resize_token_embeddings`` does it, with the optimizer forgotten."""
    model.words = nn.Embedding(9, 6)
    del optimizer, rank


def _only_in_the_optimizer(model: Any, optimizer: Any, rank: int) -> None:
    _exchange(optimizer, model.words.weight, nn.Parameter(torch.randn(9, 6) + rank))


def _a_layer_more(model: Any, optimizer: Any, rank: int) -> None:
    model.head = nn.Sequential(model.head, nn.Linear(3, 3))
    del optimizer, rank


def _exchange(optimizer: Any, old: Tensor, new: Tensor) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if param is old else param for param in group["params"]]


def _refused(change: Callable[[Any, Any, int], None], *words: str) -> Callable[[Rig], None]:
    def play(rig: Rig) -> None:
        side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
        model: Any = Words()
        model, optimizer = side.setup(model, sgd(model))
        train(side, model, optimizer, range(2))
        change(model, optimizer, rig.rank)

        def go_on() -> None:
            for step in (2, 3):
                optimizer.zero_grad()
                cross_entropy(model, *side.batch(step)).backward()
                optimizer.step()

        refused(UsageError, go_on, "at distribute()", "release", *words)
        wingbeat.release(*side.trained.pop())
        model, optimizer = side.setup(model, sgd(model))
        train(side, model, optimizer, range(4, 6))
        side.leave()
        assert_same_on_every_rank(dict(model.state_dict()), "after another distribute()")

    return play


for _change, *_words in (
    (_resized, "'words.weight'", "(9, 6)"),
    (_another_module, "'words.weight'", "(9, 6)"),
    (_only_in_the_optimizer, "param groups hold other parameters", "group 0", "(9, 6)"),
    (_a_layer_more, "'head.1.weight'", "(3, 3)"),
):
    _play = _refused(_change, *_words)  # type: ignore[arg-type]
    _play.__name__ = f"parameters_replaced{_change.__name__}"
    check(GRID)(_play)


@check(Grid(worlds=(2,), strategies=DIVIDED, mbs=(LARGE,)))
def another_optimizer_in_training(rig: Rig) -> None:
    """Its ``zero_grad`` is not the one that is asked for, and the line says so."""
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = Words()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    new = sgd(model)

    def go_on() -> None:
        new.zero_grad()
        cross_entropy(model, *side.batch(2)).backward()
        new.step()

    refused(UsageError, go_on, "zero_grad() of the optimizer that distribute() has returned")
    wingbeat.release(*side.trained.pop())
    train(side, *side.setup(model, new), range(3, 5))
    side.leave()
    assert_same_on_every_rank(dict(model.state_dict()), "with the new optimizer")


@check(GRID)
def parameters_that_move_in_the_model(rig: Rig) -> None:
    """By a parametrization, or to another module: they are the same, and nothing is refused."""
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = Words()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    model.head = nn.Sequential(model.head)
    train(side, model, optimizer, range(2, 4))
    side.leave()
    assert_same_on_every_rank(dict(model.state_dict()), "after they have moved")
