"""Coming and going: what `distribute`, `release` and `shutdown` leave behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import wingbeat

from ..compare import assert_same_on_every_rank, difference
from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import LARGE, TINY, Grid, Rig, check
from ..sides import (
    INIT_TIMEOUT,
    WingbeatSide,
    bring_world_up,
    make_strategy,
    take_world_down,
)

SETTLE = 10.0
"""Seconds in which threads and sockets have to be gone."""


class Net(nn.Module):
    """A model with hooks of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)
        self.calls = 0
        self.first.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.norm(self.first(x))))
        return out


def _side(rig: Rig) -> WingbeatSide:
    return WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)


def _hooks(model: nn.Module) -> dict[str, int]:
    """How many hooks of every kind there are, modules and parameters together."""
    kinds = [
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_post_accumulate_grad_hooks",
    ]
    owners: list[Any] = [*model.modules(), *model.parameters()]
    return {kind: sum(len(getattr(o, kind, None) or ()) for o in owners) for kind in kinds}


@check(Grid(worlds=(1, 2, 3)))
def objects_stay_what_they_were(rig: Rig) -> None:
    model, side = Net(), _side(rig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keys, repr_before = list(model.state_dict()), repr(optimizer)
    m, o = side.setup(model, optimizer)
    assert m is model
    assert o is optimizer
    assert isinstance(model, Net)
    assert isinstance(optimizer, torch.optim.SGD)
    assert list(model.state_dict()) == keys
    ours = {"wingbeat"} if rig.strategy_name.endswith("coded") else set()  # residuals
    assert optimizer.state_dict().keys() == {"param_groups", "state"} | ours
    assert optimizer.state_dict()["param_groups"][0].keys() == (
        torch.optim.SGD(Net().parameters(), lr=0.1).state_dict()["param_groups"][0].keys()
    )
    train(side, m, o, range(2))
    assert model.calls == 2, f"the user's own forward hook ran {model.calls} times in 2 forwards"
    assert "momentum" in repr_before
    assert "momentum" in repr(optimizer)
    side.leave()


@check(Grid(worlds=(1, 2, 3)))
def release_gives_plain_objects_back(rig: Rig) -> None:
    model: Any = Net()
    optimizer: Any = adamw(model)
    hooks, attributes = _hooks(model), set(vars(model))
    types = [type(model), type(optimizer), *(type(m) for m in model.modules())]
    optimizer_attributes = set(vars(optimizer))
    side = _side(rig)
    side.setup(model, optimizer)
    train(side, model, optimizer, range(3))
    wingbeat.release(model, optimizer)
    side.trained.clear()
    assert [type(model), type(optimizer), *(type(m) for m in model.modules())] == types
    assert _hooks(model) == hooks
    assert set(vars(model)) == attributes
    assert set(vars(optimizer)) - optimizer_attributes <= {"_opt_called"}
    assert_same_on_every_rank(model.state_dict(), "after release")
    _trains_as_a_plain_copy_does(model, optimizer)


def _trains_as_a_plain_copy_does(model: Any, optimizer: Any) -> None:
    """On this rank's own data, which no other rank sees."""
    twin = Net()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    twin_optimizer = adamw(twin)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3):
        generator = torch.Generator().manual_seed(7 * step + int(os.environ["RANK"]))
        x = torch.randn(4, 8, generator=generator)
        y = torch.tensor([0, 1, 2, 0])
        for m, o in ((model, optimizer), (twin, twin_optimizer)):
            o.zero_grad()
            cross_entropy(m, x, y).backward()
            o.step()
    for name, value in twin.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@check()
def release_between_backward_and_step(rig: Rig) -> None:
    """What was reduced so far is whole afterwards, so the plain step is the same everywhere."""
    side, model = _side(rig), mlp()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    optimizer.zero_grad()
    cross_entropy(model, *side.batch(2)).backward()
    wingbeat.release(model, optimizer)
    side.trained.clear()
    optimizer.step()
    assert_same_on_every_rank(model.state_dict(), "a plain step after release")


@check()
def distribute_again_after_release(rig: Rig) -> None:
    side, model = _side(rig), mlp()
    optimizer = sgd(model)
    for first in (0, 10, 20):
        side.setup(model, optimizer)
        train(side, model, optimizer, range(first, first + 3))
        side.leave()
    assert_same_on_every_rank(model.state_dict(), "after three rounds")


@check()
def a_released_model_is_collected(rig: Rig) -> None:
    alive = _train_and_forget(rig, release=True)
    _assert_collected(alive)


@check()
def a_forgotten_model_is_collected(rig: Rig) -> None:
    """Without release, as when a function that trains returns."""
    alive = _train_and_forget(rig, release=False)
    dist.barrier()
    _assert_collected(alive)


def _train_and_forget(rig: Rig, release: bool) -> list[weakref.ref[Any]]:
    side, model = _side(rig), mlp()
    model, optimizer = side.setup(model, adamw(model))
    train(side, model, optimizer, range(3))
    model.synchronize()
    if release:
        wingbeat.release(model, optimizer)
    return [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]


def _assert_collected(alive: list[weakref.ref[Any]]) -> None:
    gc.collect()
    names = ("model", "optimizer", "parameter")
    kept = [name for name, ref in zip(names, alive, strict=True) if ref() is not None]
    holders = [
        type(h).__name__ for ref in alive if ref() is not None for h in gc.get_referrers(ref())
    ]
    assert not kept, f"still alive: {kept}, held by {holders[:8]}"


@check()
def a_copy_is_independent(rig: Rig) -> None:
    side, model = _side(rig), mlp()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    twin: Any = copy.deepcopy(model)
    before = {n: v.clone() for n, v in twin.state_dict().items()}
    train(side, model, optimizer, range(2, 4))
    for name, value in twin.state_dict().items():
        assert torch.equal(value, before[name]), f"training changed the copy's {name}"
    if rig.rank == 0:  # a copy takes no part in communication: one rank may use it alone
        cross_entropy(twin, *side.batch(9)).backward()
        assert twin[0].weight.grad is not None
    train(side, model, optimizer, range(4, 6))
    side.leave()


@check(Grid(worlds=(2,), mbs=(LARGE,)))
def a_released_model_pickles(rig: Rig) -> None:
    side, model = _side(rig), Net()
    side.setup(model, sgd(model))
    train(side, *side.trained[0], range(2))
    side.leave()
    twin = pickle.loads(pickle.dumps(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


@check(Grid(worlds=(1, 2, 3), mbs=(TINY,)))
def shutdown_leaves_no_thread_port_or_file(rig: Rig) -> None:
    """The first rounds warm torch up; after that each round ends with what it began with."""
    _one_round(rig)
    _one_round(rig)
    before = _belongings()
    _one_round(rig)
    _wait_until(lambda: _grown(before) == {}, lambda: f"left behind: {_grown(before)}")
    # Threads without work end after two seconds.
    _wait_until(lambda: _threads() == [], lambda: f"threads after shutdown: {_threads()}")


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t is not threading.main_thread()]


def _one_round(rig: Rig) -> None:
    bring_world_up()
    side, model = _side(rig), mlp()
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(3))
    side.leave()
    take_world_down()
    gc.collect()
    dist.barrier()


def _belongings() -> dict[str, int]:
    me = psutil.Process()
    listening = [c for c in me.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    return {"ports": len(listening), "threads": me.num_threads(), "files": me.num_fds()}


def _grown(before: dict[str, int]) -> dict[str, int]:
    # A thread that was ending may have held a link that only the collector frees.
    gc.collect()
    now = _belongings()
    return {kind: now[kind] - count for kind, count in before.items() if now[kind] > count}


def _wait_until(done: Callable[[], bool], message: Callable[[], str]) -> None:
    until = time.monotonic() + SETTLE
    while not done():
        assert time.monotonic() < until, message()
        time.sleep(0.05)


@check(Grid(worlds=(2,), mbs=(LARGE,)))
def shutdown_twice_and_without_init(rig: Rig) -> None:
    bring_world_up()
    take_world_down()
    wingbeat.shutdown()


@check(Grid(worlds=(2,), mbs=(TINY,)))
def shutdown_without_release(rig: Rig) -> None:
    """A script that just ends: shutdown finishes what is pending, with equal weights."""
    side, model = _side(rig), mlp()
    weight: Any = model[0].weight
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(3))
    take_world_down()
    assert_same_on_every_rank({"0.weight": weight}, "after shutdown")


def without_a_default_group(name: str, mb: float) -> None:
    """In fresh processes: init makes the default group, shutdown closes what init made."""
    assert not dist.is_initialized()
    world = wingbeat.init(timeout=INIT_TIMEOUT)
    assert dist.is_initialized()
    assert (world.rank, world.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    model: Any = mlp()
    optimizer: Any = sgd(model)
    wingbeat.distribute(model, optimizer, make_strategy(name, mb))
    side = WingbeatSide(world.rank, world.size)
    train(side, model, optimizer, range(3))
    assert_same_on_every_rank(model.state_dict(), "after training")
    wingbeat.release(model, optimizer)
    wingbeat.shutdown()
    assert not dist.is_initialized(), "shutdown left the default group that init had made"
    # Threads without work end after two seconds.
    _wait_until(lambda: _threads() == [], lambda: f"threads after shutdown: {_threads()}")
    me = psutil.Process()
    ports: Callable[[], list[Any]] = lambda: [  # noqa: E731
        c for c in me.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN
    ]
    _wait_until(lambda: not ports(), lambda: f"still listening: {ports()}")


def save_in_the_middle(name: str, mb: float, folder: str) -> None:
    """Train eight steps; rank 0 saves after the fourth, and the result after the eighth."""
    side = WingbeatSide(dist.get_rank(), dist.get_world_size(), strategy=make_strategy(name, mb))
    torch.manual_seed(5)
    model: Any = mlp()
    model, optimizer = side.setup(model, adamw(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(8):
        train(side, model, optimizer, [step])
        schedule.step()
        if step in (3, 7):
            states = [model.state_dict(), optimizer.state_dict(), schedule.state_dict()]
            if side.rank == 0:
                torch.save(states, f"{folder}/{name}-{mb}-{step}.pt")
    side.leave()


def resume_and_compare(name: str, mb: float, folder: str) -> None:
    """In fresh processes: load what was saved, train the rest, end with the same bits."""
    side = WingbeatSide(dist.get_rank(), dist.get_world_size(), strategy=make_strategy(name, mb))
    torch.manual_seed(77 + side.rank)
    model: Any = mlp()
    model, optimizer = side.setup(model, adamw(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model_state, optimizer_state, schedule_state = torch.load(f"{folder}/{name}-{mb}-3.pt")
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    schedule.load_state_dict(schedule_state)
    for step in range(4, 8):
        train(side, model, optimizer, [step])
        schedule.step()
    wanted, _, _ = torch.load(f"{folder}/{name}-{mb}-7.pt")
    for key, value in model.state_dict().items():
        found = difference(value, wanted[key], 1e-6)
        assert found < 1e-6, f"{key} differs by {found:.1e} after resuming"
    side.leave()
