"""Wrong use: one line that names the value, on every rank, before anything hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import wingbeat
from wingbeat.collectives import Collectives
from wingbeat.errors import MismatchError, PeerError, UsageError
from wingbeat.strategies import parse
from wingbeat.transport.world import current

from ..models import cross_entropy, mlp, sgd, train
from ..registry import DIVIDED, LARGE, TINY, Grid, Rig, check
from ..sides import (
    INIT_TIMEOUT,
    WingbeatSide,
    bring_world_up,
    make_strategy,
    take_world_down,
)

ONE = Grid(worlds=(2,), mbs=(LARGE,))
COLLECTIVE = r"(all|reduce|broad)[-_ ]?(reduce|scatter|gather|cast)"


def refused(kind: type[Exception], call: Callable[[], Any], *words: str) -> str:
    """Assert that ``call`` raises ``kind`` in one line that contains all ``words``."""
    try:
        call()
    except kind as error:
        text = str(error)
        assert "\n" not in text.strip(), f"more than one line: {text!r}"
        missing = [word for word in words if word.lower() not in text.lower()]
        assert not missing, f"{text!r} does not mention {missing}"
        return text
    raise AssertionError(f"{kind.__name__} was not raised")


def _still_works(rig: Rig) -> None:
    """After a refusal the same world goes on training."""
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model = mlp()
    train(side, *side.setup(model, sgd(model)), range(2))
    side.leave()


@check(ONE)
def distribute_twice(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model = mlp()
    optimizer = sgd(model)
    side.setup(model, optimizer)
    refused(UsageError, lambda: wingbeat.distribute(model, optimizer, rig.strategy), "distribut")
    train(side, model, optimizer, range(2))
    side.leave()


@check(ONE)
def optimizer_of_another_model(rig: Rig) -> None:
    bring_world_up()
    model, other = mlp(), mlp()
    optimizer = sgd(other)
    refused(UsageError, lambda: wingbeat.distribute(model, optimizer, rig.strategy), "optimizer")
    mixed = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    refused(UsageError, lambda: wingbeat.distribute(model, mixed, rig.strategy), "optimizer")
    assert type(model) is nn.Sequential, "a refused model must stay plain"
    _still_works(rig)


@check(ONE)
def strategy_of_the_wrong_kind(rig: Rig) -> None:
    bring_world_up()
    model = mlp()
    optimizer = sgd(model)
    give: Any = wingbeat.distribute
    refused(UsageError, lambda: give(model, optimizer, "deer"), "deer", "dear")
    refused(UsageError, lambda: give(model, optimizer, wingbeat.DeAR), "strategy=DeAR)", "DeAR()")
    refused(UsageError, lambda: give(model, optimizer, 25.0), "25.0")
    refused(UsageError, lambda: give("resnet", optimizer, rig.strategy), "model", "Module")
    refused(UsageError, lambda: give(model, model, rig.strategy), "optimizer")
    refused(UsageError, lambda: give(optimizer, model, rig.strategy), "model")
    _still_works(rig)


@check(ONE)
def strategy_values_out_of_range(rig: Rig) -> None:
    bad: Any
    for cls in (wingbeat.AllReduce, wingbeat.DeAR):
        for bad in (0, -1.0, float("nan"), float("inf"), "25", None):
            refused(UsageError, lambda cls=cls, bad=bad: cls(mb=bad), "mb", str(bad))  # type: ignore[misc]
        refused(UsageError, lambda cls=cls: cls(topology="rign"), "rign", "ring")  # type: ignore[misc]


@check(ONE)
def nothing_to_train(rig: Rig) -> None:
    bring_world_up()
    model = mlp()
    optimizer = sgd(model)
    for p in model.parameters():
        p.requires_grad_(False)
    refused(UsageError, lambda: wingbeat.distribute(model, optimizer, rig.strategy), "grad")


class Sparse(nn.Module):
    """A table whose gradients are sparse, which no module says."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.zeros(10, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.words, sparse=True)


@check(ONE)
def sparse_gradients_that_no_module_announces(rig: Rig) -> None:
    bring_world_up()
    model: Any = Sparse()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = wingbeat.distribute(model, optimizer, rig.strategy)
    loss = model(torch.tensor([1, 2])).sum()
    refused(UsageError, loss.backward, "words", "sparse", "torch.nn.Embedding")


@check(ONE)
def no_init(rig: Rig) -> None:
    bring_world_up()
    take_world_down()
    model = mlp()
    optimizer = sgd(model)
    refused(UsageError, lambda: wingbeat.distribute(model, optimizer, rig.strategy), "init")
    _still_works(rig)


@check(ONE)
def unknown_interface(rig: Rig) -> None:
    bring_world_up()
    take_world_down()
    refused(UsageError, lambda: wingbeat.init(interfaces=["lo9"], timeout=10.0), "lo9", "'lo'")
    _still_works(rig)


@check(ONE)
def init_with_a_bad_timeout(rig: Rig) -> None:
    bring_world_up()
    take_world_down()
    bad: Any
    for bad in (0.0, -3.0, float("nan"), "soon"):
        refused(UsageError, lambda bad=bad: wingbeat.init(timeout=bad), "timeout", str(bad))  # type: ignore[misc]
    _still_works(rig)


@check(ONE)
def add_param_group_after_distribute(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    late = {"params": list(nn.Linear(3, 3).parameters())}
    refused(UsageError, lambda: optimizer.add_param_group(late), "add_param_group")
    assert len(optimizer.param_groups) == 1
    train(side, model, optimizer, range(2))
    side.leave()


@check(Grid(worlds=(2,), strategies=("dear", *DIVIDED), mbs=(LARGE,)))
def an_optimizer_that_evaluates_the_loss_again(rig: Rig) -> None:
    bring_world_up()
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    refused(
        UsageError,
        lambda: wingbeat.distribute(model, optimizer, rig.strategy),
        "LBFGS",
        "AllReduce",
    )
    _still_works(rig)


@check(ONE)
def clip_with_a_bad_norm(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    cross_entropy(model, *side.batch(0)).backward()
    refused(UsageError, lambda: optimizer.clip_grad_norm_(-1.0), "max_norm", "-1")
    refused(UsageError, lambda: optimizer.clip_grad_norm_(1.0, norm_type=0.0), "norm_type")
    optimizer.step()
    side.leave()


@check(ONE)
def release_of_what_is_not_distributed(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    plain = mlp()
    plain_optimizer = sgd(plain)
    refused(UsageError, lambda: wingbeat.release(plain, plain_optimizer), "distribut")
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    refused(UsageError, lambda: wingbeat.release(model, plain_optimizer))
    train(side, model, optimizer, range(2))
    side.leave()


def _odd_one(rig: Rig) -> bool:
    return rig.rank == rig.size - 1


def _other_shape(rig: Rig) -> tuple[nn.Module, str]:
    model = mlp()
    if _odd_one(rig):
        model[3] = nn.Linear(24, 4)
    return model, "3.weight"


def _other_dtype(rig: Rig) -> tuple[nn.Module, str]:
    model = mlp()
    if _odd_one(rig):
        model[2].bfloat16()
    return model, "2.0.weight"


def _other_name(rig: Rig) -> tuple[nn.Module, str]:
    name = "scale" if _odd_one(rig) else "scales"
    model = mlp()
    model.register_parameter(name, nn.Parameter(torch.ones(3)))
    return model, "scale"


def _one_more(rig: Rig) -> tuple[nn.Module, str]:
    model = mlp()
    if _odd_one(rig):
        model.append(nn.LayerNorm(3))
    return model, "4.weight"


def _other_buffer(rig: Rig) -> tuple[nn.Module, str]:
    model = mlp()
    model.register_buffer("table", torch.zeros(4 if _odd_one(rig) else 5))
    return model, "table"


def _frozen_elsewhere(rig: Rig) -> tuple[nn.Module, str]:
    model = mlp()
    model[0].weight.requires_grad_(not _odd_one(rig))
    return model, "0.weight"


MISMATCHES = (
    _other_shape,
    _other_dtype,
    _other_name,
    _one_more,
    _other_buffer,
    _frozen_elsewhere,
)


@check(Grid(worlds=(2, 3), mbs=(TINY,)))
def models_that_differ_between_ranks(rig: Rig) -> None:
    bring_world_up()
    for make in MISMATCHES:
        model, name = make(rig)
        optimizer = sgd(model)
        give: Any = lambda m=model, o=optimizer: wingbeat.distribute(m, o, rig.strategy)  # noqa: E731
        try:
            refused(MismatchError, give, name, "rank")
        except AssertionError as error:
            raise AssertionError(f"{make.__name__.strip('_')}: {error}") from error
        assert type(model) is nn.Sequential, f"{make.__name__}: a refused model must stay plain"
        dist.barrier()
    _still_works(rig)


@check(Grid(worlds=(2, 3), strategies=("dear",), mbs=(LARGE,)))
def strategies_that_differ_between_ranks(rig: Rig) -> None:
    """Another bucket size on one rank would be another order of collectives: a hang."""
    bring_world_up()
    for odd in (wingbeat.AllReduce(), wingbeat.DeAR(mb=3.0)):
        model = mlp()
        optimizer = sgd(model)
        mine = odd if _odd_one(rig) else wingbeat.DeAR()
        refused(MismatchError, lambda m=model, o=optimizer, s=mine: wingbeat.distribute(m, o, s))  # type: ignore[misc]
        dist.barrier()
    _still_works(rig)


def victim_of(name: str, mb: float, where: str, how: str, victim: int, timeout: float) -> float:
    """In processes of their own: ``victim`` dies or stops; the others must say who and where.

    Returns the seconds that the survivor waited.
    """
    world = wingbeat.init(timeout=timeout)
    model: Any = mlp(hidden=64)
    optimizer: Any = sgd(model)
    wingbeat.distribute(model, optimizer, make_strategy(name, mb))
    side = WingbeatSide(world.rank, world.size)
    train(side, model, optimizer, range(2))
    dist.barrier()
    if world.rank == victim:
        _fall(model, side, where, how)
    begin = time.monotonic()
    try:
        for step in range(2, 100):
            train(side, model, optimizer, [step])
        model.synchronize()
    except PeerError as error:
        waited = time.monotonic() - begin
        text = str(error)
        assert "\n" not in text.strip(), f"more than one line: {text!r}"
        assert re.search(rf"rank {victim}\b", text), f"{text!r} does not name rank {victim}"
        assert re.search(COLLECTIVE, text), f"{text!r} does not name the collective"
        return waited
    raise AssertionError("training went on without one of its workers")


def _fall(model: Any, side: WingbeatSide, where: str, how: str) -> None:
    """End or stop this process, right away or in the middle of a backward."""

    def act(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

    if where == "between":
        act()
    model[2].register_full_backward_hook(act)
    cross_entropy(model, *side.batch(2)).backward()


@check(Grid(worlds=(3,), strategies=("allreduce",), mbs=(LARGE,)))
def calls_that_differ_are_named_by_all_at_once(rig: Rig) -> None:
    """Over sockets, where the wait is in the extension until it is woken."""
    bring_world_up()
    collectives = Collectives(current())
    buffer, begin = torch.ones(1000), time.monotonic()

    def call() -> None:
        if rig.rank == 1:
            collectives.all_gather(buffer, label="norms").wait()
        else:
            collectives.all_reduce(buffer, bucket=3).wait()

    words = "all-gather of norms (1000 elements, float32)", "all-reduce of bucket 3 (1000 elements"
    refused(PeerError, call, *words, "same calls")
    assert time.monotonic() - begin < INIT_TIMEOUT / 3
    take_world_down()


def works_alone(strategies: list[str], timeout: float) -> None:
    """Rank 1 works alone for longer than the timeout, under each strategy: all go on after it."""
    world = wingbeat.init(timeout=timeout)
    for name in strategies:
        model: Any = mlp()
        optimizer: Any = sgd(model)
        made = parse(name) if ":" in name else make_strategy(name, LARGE)
        wingbeat.distribute(model, optimizer, made)
        side = WingbeatSide(world.rank, world.size)
        train(side, model, optimizer, range(2))
        if world.rank == 1:
            time.sleep(1.6 * timeout)
        train(side, model, optimizer, range(2, 4))
        wingbeat.synchronize(model)
        flat = torch.cat([param.detach().flatten() for param in model.parameters()])
        both = [torch.zeros_like(flat) for _ in range(world.size)]
        dist.all_gather(both, flat)
        assert torch.equal(*both), name
        wingbeat.release(model, optimizer)
