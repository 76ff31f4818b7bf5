"""When gradients are summed, zeroed, dropped, changed, and how many batches there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import BOTH, Grid, add, scenario
from ..sides import Side


class Forked(nn.Module):
    """A trunk and two heads; ``head`` says which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(classes=16)
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        out: Tensor = self.heads[head](torch.tanh(self.trunk(x)))
        return out


def _micro_batches(side: Side, model: Any, step: int, heads: list[int]) -> None:
    """One backward a micro-batch, communicating in the last only; ``heads[i]`` is used."""
    for index, head in enumerate(heads):
        x, y = side.batch(10 * step + index)
        last = index == len(heads) - 1
        with nullcontext() if last else side.no_sync(model):
            loss = nn.functional.cross_entropy(model(x, head), y) / len(heads)
            loss.backward()


def _accumulated(heads_of: Callable[[int, int], list[int]], make: Any) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model: Any = Forked()
        model, optimizer = side.setup(model, make(model))
        for step in range(6):
            optimizer.zero_grad()
            _micro_batches(side, model, step, heads_of(step, side.rank))
            optimizer.step()

    return play


PATTERNS: dict[str, Callable[[int, int], list[int]]] = {
    "2_micro_batches": lambda step, rank: [0, 0],
    "3_micro_batches": lambda step, rank: [0, 0, 0],
    "unused_in_the_last": lambda step, rank: [1, 1, 0],
    "used_in_the_last_only": lambda step, rank: [0, 0, 1],
    "unused_in_the_last_of_one_rank": lambda step, rank: [1, rank % 2],
    "changing_number": lambda step, rank: [0] * (1 + step % 3),
    "changing_heads": lambda step, rank: [(step + i + rank) % 2 for i in range(3)],
}
for _name, _heads in PATTERNS.items():
    add(_accumulated(_heads, sgd), f"no_sync_{_name}_sgd")
add(_accumulated(PATTERNS["unused_in_the_last"], adamw), "no_sync_unused_in_the_last_adamw")


@scenario()
def accumulated_by_the_attribute_of_ddp(side: Side) -> None:
    """As nanoGPT and what was made from it have it."""
    model: Any = Forked()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        for index in range(3):
            model.require_backward_grad_sync = index == 2
            x, y = side.batch(10 * step + index)
            (nn.functional.cross_entropy(model(x), y) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def no_sync_with_clipping(side: Side) -> None:
    model: Any = Forked()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(5):
        optimizer.zero_grad()
        _micro_batches(side, model, step, [0, 1, 0])
        side.note("total norm", side.clip(model, optimizer, 0.05))
        optimizer.step()


@scenario()
def no_sync_with_evaluation_inside(side: Side) -> None:
    model: Any = Forked()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        optimizer.zero_grad()
        with side.no_sync(model):
            cross_entropy(model, *side.batch(10 * step)).backward()
            with torch.no_grad():
                side.note("output", model(side.batch(77)[0]))
        cross_entropy(model, *side.batch(10 * step + 1)).backward()
        optimizer.step()


@scenario()
def two_backwards_without_no_sync(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        optimizer.zero_grad()
        for half in range(2):
            cross_entropy(model, *side.batch(10 * step + half)).backward()
        optimizer.step()


@scenario()
def three_backwards_with_changing_heads(side: Side) -> None:
    model: Any = Forked()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(5):
        optimizer.zero_grad()
        for part, head in enumerate((1, 0, step % 2)):
            x, y = side.batch(10 * step + part)
            nn.functional.cross_entropy(model(x, head), y).backward()
        optimizer.step()


@scenario(Grid(strategies=BOTH))
def gradients_never_zeroed(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for step in range(6):
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.step()


def _zeroed(zero: Callable[[Any, Any], None], when: str) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model: Any = Forked()
        bare = model
        model, optimizer = side.setup(model, sgd(model))
        for step in range(6):
            x, y = side.batch(step)
            if when == "first":
                zero(bare, optimizer)
            out = model(x, step % 2)
            if when == "before_backward":
                zero(bare, optimizer)
            nn.functional.cross_entropy(out, y).backward()
            optimizer.step()
            if when == "after_step":
                zero(bare, optimizer)

    return play


ZEROS: dict[str, Callable[[Any, Any], None]] = {
    "to_none": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "to_zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by_model": lambda model, optimizer: model.zero_grad(),
    "by_model_to_zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
}
for _name, _zero in ZEROS.items():
    for _when in ("first", "before_backward", "after_step"):
        add(_zeroed(_zero, _when), f"zero_grad_{_name}_{_when}")


@scenario()
def batches_dropped_after_backward(side: Side) -> None:
    """As a loop does that skips a batch whose loss is not finite: no step, gradients zeroed."""
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(8):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        if step % 3 != 1:
            optimizer.step()


@scenario()
def forwards_without_backward(side: Side) -> None:
    """A training-mode forward whose loss is thrown away, in some iterations."""
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        optimizer.zero_grad()
        if step % 2 and side.is_subject:  # DDP refuses what is harmless here
            model(side.batch(50 + step)[0])
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.step()


@scenario(Grid(strategies=BOTH))
def two_steps_after_one_backward(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.step()
        optimizer.step()


@scenario()
def step_without_gradients(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    train(side, model, optimizer, range(3))
    optimizer.zero_grad()
    optimizer.step()


@scenario()
def gradients_changed_in_place(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        for p in bare.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5).add_(p.detach(), alpha=0.01)
        optimizer.step()


@scenario()
def gradients_replaced(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, adamw(model))
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        for p in bare.parameters():
            assert p.grad is not None
            p.grad = p.grad * 0.5 + 0.01
        optimizer.step()


def _exchanged(halves: int) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        bare = mlp()
        model, optimizer = side.setup(bare, sgd(bare))
        first, second = bare[0].bias, bare[2][0].bias  # type: ignore[index]
        for step in range(3):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for half in range(halves):
                cross_entropy(model, *side.batch(10 * step + half)).backward()
                first.grad, second.grad = second.grad, first.grad
            optimizer.step()

    return play


add(_exchanged(1), "gradients_exchanged_between_parameters")
add(_exchanged(2), "gradients_exchanged_and_added_to")


@scenario()
def gradients_removed_by_hand(side: Side) -> None:
    """Some parameters are left out of some steps by setting their gradient to None."""
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, adamw(model))
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        for index, p in enumerate(bare.parameters()):
            if index % 3 == step % 3:
                p.grad = None
        optimizer.step()


@scenario()
def smaller_last_batch(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for _epoch in range(2):
        train(side, model, optimizer, range(4), rows=4)
        train(side, model, optimizer, [4], rows=1)


@scenario(Grid(worlds=(2, 3)))
def smaller_last_batch_on_some_ranks(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    train(side, model, optimizer, range(4), rows=4)
    train(side, model, optimizer, [4], rows=1 + side.rank)


JOIN = Grid(worlds=(2, 3, 4))


def _joined(
    counts: Callable[[int], int], make: Any, epochs: int = 1, **options: Any
) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model = mlp()
        model, optimizer = side.setup(model, make(model))
        for epoch in range(epochs):
            with side.join(model, **options):
                first = 10 * epoch
                train(side, model, optimizer, range(first, first + counts(side.rank)))

    return play


def _plain_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


_LAST = {"find_unused": False, "state_of": "last"}
add(_joined(lambda rank: 3 + rank, sgd), "join_more_on_each_rank_sgd", JOIN, **_LAST)
add(_joined(lambda rank: 2 + 2 * rank, adamw), "join_more_on_each_rank_adamw", JOIN, **_LAST)
add(_joined(lambda rank: 3 * min(rank, 1), sgd), "join_nothing_on_rank_zero", JOIN, **_LAST)
add(_joined(lambda rank: 4, sgd), "join_even", JOIN, find_unused=False)
add(
    _joined(lambda rank: 6 - rank, _plain_sgd, epochs=2),
    "join_fewer_on_each_rank_two_epochs",
    JOIN,
    find_unused=False,
)


def _joined_with_batch_norm(counts: Callable[[int], int]) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model: Any = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))
        model, optimizer = side.setup(model, _plain_sgd(model))
        with side.join(model):
            train(side, model, optimizer, range(counts(side.rank)))

    return play


add(
    _joined_with_batch_norm(lambda rank: 2 + rank),
    "join_batch_norm_more_on_each_rank",
    JOIN,
    **_LAST,
)
add(
    _joined_with_batch_norm(lambda rank: 5 - rank),
    "join_batch_norm_fewer_on_each_rank",
    JOIN,
    **_LAST,
)


@scenario(JOIN, find_unused=False, state_of="last")
def join_with_accumulation(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    with side.join(model):
        for step in range(2 + side.rank):
            optimizer.zero_grad()
            with side.no_sync(model):
                cross_entropy(model, *side.batch(10 * step)).backward()
            cross_entropy(model, *side.batch(10 * step + 1)).backward()
            optimizer.step()


add(
    _joined(lambda rank: 2 + 2 * rank, adamw, divide_by_initial_world_size=False),
    "join_divides_by_those_with_batches",
    JOIN,
    **_LAST,
)


@scenario(JOIN, find_unused=False)
def join_disabled(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    with side.join(model, enable=False, throw_on_early_termination=True):
        train(side, model, optimizer, range(3))
        for step in range(side.rank):
            with side.no_sync(model):
                cross_entropy(model, *side.batch(10 + step)).backward()


@scenario(JOIN, find_unused=False)
def join_divides_by_all_again_afterwards(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, _plain_sgd(model))
    with side.join(model, divide_by_initial_world_size=False):
        train(side, model, optimizer, range(3 - min(side.rank, 1)))
    with side.join(model):
        train(side, model, optimizer, range(10, 12 + min(side.rank, 1)))


@scenario(Grid(worlds=(2, 3, 4), strategies=BOTH), find_unused=False, state_of="last")
def join_counts_batches_under_no_sync(side: Side) -> None:
    """Rank 0 runs out while the others only add up; they step on what they have added."""
    model = mlp()
    model, optimizer = side.setup(model, _plain_sgd(model))
    with side.join(model, divide_by_initial_world_size=False):
        for step in range(1 if side.rank == 0 else 3):
            optimizer.zero_grad()
            with side.no_sync(model) if step else nullcontext():
                cross_entropy(model, *side.batch(step)).backward()
            optimizer.step()
