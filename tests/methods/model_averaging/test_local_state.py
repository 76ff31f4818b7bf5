"""What a worker that comes back to a job of averaged models takes over."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wingbeat
from helpers.returning import again, dies
from helpers.training import engine, net, on, sgd, train, weights
from wingbeat.errors import PeerError, UsageError
from wingbeat.integrations import checkpoint
from wingbeat.methods.model_averaging import build, service
from wingbeat.strategies import parse
from wingbeat.transport import loopback
from wingbeat.transport.detector import Deadlines

PATIENCE = 60.0


def lives_of(model: Any) -> Any:
    """The model's `LiveState`."""
    return engine(model).update._averager.session.snapshot.__self__


def flat(model: Any, kind: str) -> torch.Tensor:
    tensors = engine(model).update.tensors()[kind]
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_that_copies_state_makes_the_outer_step_under_way(
    delay: int, momentum: float
) -> None:
    """Rank 1 is as if it had been away; afterwards both share one model, and the same velocity."""
    models: dict[int, Any] = {}
    under_way = threading.Event()

    def body(world: Any) -> tuple[Any, ...]:
        model = net(world.rank)
        strategy = wingbeat.DiLoCo(every=2, delay=delay, outer_momentum=momentum, encrypted=False)
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        models[world.rank] = model
        train(
            model, optimizer, range(3)
        )  # the first turn of both, which is taken over in the third step
        update = engine(model).update
        if world.rank == 0:
            begin = update._averager.begin
            update._averager.begin = lambda *given: (begin(*given), under_way.set())
            train(model, optimizer, range(3, 4))
        else:
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(7.0)
                for kept in update._kinds().values():
                    kept.fill_(9.0)
            update._moved = update._known = update._given = False  # as in a process that begins
            assert under_way.wait(PATIENCE)
            lives_of(model).put(lives_of(models[0]).written())
        train(model, optimizer, range(4, 5))
        found = [flat(model, "shared"), flat(model, "velocity")]
        steps = update.steps
        wingbeat.synchronize(model)
        return (*found, steps, weights(model))

    (shared, velocity, steps, _), other = on(2, body, timeout=PATIENCE)
    torch.testing.assert_close(other[0], shared, rtol=0, atol=0)
    torch.testing.assert_close(other[1], velocity, rtol=0, atol=0)
    assert bool(velocity.any()) == bool(momentum)
    assert (steps, other[2]) == (5, 5)


def test_a_worker_that_copies_state_between_turns_shares_it() -> None:
    """Its model has moved from the shared one since, and is not taken for it."""
    models: dict[int, Any] = {}
    both = threading.Barrier(2)

    def body(world: Any) -> list[torch.Tensor]:
        model = net(world.rank)
        strategy = wingbeat.DiLoCo(every=4, encrypted=False)
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        models[world.rank] = model
        update = engine(model).update
        train(model, optimizer, range(6))  # a turn, and two steps of each worker's own
        both.wait(PATIENCE)
        if world.rank == 1:
            for kept in update._kinds().values():
                kept.fill_(9.0)
            update._moved = update._known = update._given = False  # as in a process that begins
            lives_of(model).put(lives_of(models[0]).written())
        both.wait(PATIENCE)
        train(model, optimizer, range(6, 9))
        found = [flat(model, "shared"), flat(model, "velocity")]
        wingbeat.synchronize(model)
        return found

    (shared, velocity), other = on(2, body, timeout=PATIENCE)
    torch.testing.assert_close(other[0], shared, rtol=0, atol=0)
    torch.testing.assert_close(other[1], velocity, rtol=0, atol=0)


def test_a_state_of_another_training_is_refused() -> None:
    def body(world: Any) -> None:
        model = net()
        strategy = wingbeat.LocalSGD(every=4, encrypted=False)
        model, _ = wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)
        lives = lives_of(model)
        update = engine(model).update
        for numbers in ([-1], [], ["1"], 3, [1, 2, 3]):
            update.handed = lambda numbers=numbers: ([], numbers)
            payload = lives.written()
            del update.handed
            with pytest.raises(PeerError, match="for the steps that were made"):
                lives.put(payload)
        assert update.steps == 0

    on(2, body, timeout=PATIENCE)


def refuses_to_load(model: Any, optimizer: Any, states: Any, folder: Path) -> None:
    """All ways to load something, one at a time."""
    ways: dict[str, Callable[[], object]] = {
        r"load_residuals\(\)": lambda: optimizer.load_residuals([]),
        r"load_shards\(\)": lambda: optimizer.load_shards([]),
        r"checkpoint.load\(\)": lambda: checkpoint.load(model, optimizer, folder),
    }
    if engine(model).compression.residuals is not None:
        ways["loading residuals"] = lambda: checkpoint.load_residuals(optimizer, folder)
    for target, state in zip((model, optimizer), states, strict=True):
        with pytest.raises(UsageError, match=r"load_state_dict\(\) on rank 2, which was started"):
            target.load_state_dict(state)
    for what, load in ways.items():
        with pytest.raises(UsageError, match=rf"^{what} on rank 2, which was started again"):
            load()


@pytest.mark.parametrize(
    "strategy",
    [
        "ripples:encrypted=false",
        "diloco:every=3,encrypted=false",
        "diloco:every=3,quorum=3,grace=0.2,encrypted=false",  # rounds wait until it is back
        "localsgd:every=2,compression=topk@0.5,encrypted=false",
    ],
)
def test_a_restarted_worker_refuses_to_load_older_state(strategy: str, tmp_path: Path) -> None:
    """As a script does that loads its checkpoint whenever there is one."""
    back = threading.Event()

    def goes_on(world: Any, model: Any, optimizer: Any) -> dict[str, Any]:
        left = 6
        while left:
            left -= back.is_set()
            train(model, optimizer, range(1))
        assert not engine(model).copied, "it has made steps of its own"
        wingbeat.synchronize(model)
        model.load_state_dict(model.state_dict())  # with all the others
        optimizer.load_state_dict(optimizer.state_dict())
        checkpoint.load_residuals(optimizer, tmp_path)
        return weights(model)

    def body(world: Any) -> dict[str, Any]:
        def made() -> tuple[Any, Any]:
            model = net(world.rank)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            return wingbeat.distribute(model, optimizer, parse(strategy), world=world)

        model, optimizer = made()
        checkpoint.save_residuals(optimizer, tmp_path)
        if world.rank != 2:
            return goes_on(world, model, optimizer)
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(3))
        dies(engine(model).update._averager.session)
        world = again(world)
        model, optimizer = made()
        given = weights(model)
        try:
            refuses_to_load(model, optimizer, states, tmp_path)
        finally:
            back.set()
        for name, value in weights(model).items():
            assert torch.equal(value, given[name])
        assert optimizer.state, "the moments of another worker"
        return goes_on(world, model, optimizer)

    for each in (found := on(3, body, timeout=PATIENCE)):
        for name, value in each.items():
            assert torch.equal(value, found[0][name])


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco:every=2,encrypted=false",
        "diloco:every=4,fragments=2,delay=1,encrypted=false",
        "diloco:every=2,quorum=2,grace=0.1,alpha=0.5,delay=1,encrypted=false",
        "localsgd:every=2,compression=topk@0.5,encrypted=false",
    ],
)
def test_a_worker_left_out_copies_the_others_model(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has missed outer steps: what it makes of later ones alone is another model for ever."""
    asleep, back = threading.Event(), threading.Event()

    class Hasty(Deadlines):
        def is_overdue(self, peer: int, now: float) -> bool:
            return peer == 1 and asleep.is_set()

    monkeypatch.setattr(service, "Deadlines", Hasty)

    def body(world: Any) -> tuple[int, dict[str, Any]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = wingbeat.distribute(model, optimizer, parse(strategy), world=world)
        train(model, optimizer, range(8))
        update = engine(model).update
        if world.rank == 1:
            asleep.set()
            while asleep.is_set():
                assert not back.wait(0.01)
            train(model, optimizer, range(4))
            back.set()
        while not back.is_set():
            train(model, optimizer, range(1))
            if update.steps > 40:
                asleep.clear()
        assert update.steps > 40, "also where the other one was left out"
        optimizer.param_groups[0]["lr"] = 0.0
        until(model, optimizer, 200)
        return update.steps, {kind: flat(model, kind) for kind in ("shared", "velocity")}

    found = on(3, body, timeout=PATIENCE)
    for steps, kinds in found:
        assert steps == found[0][0]
        for kind, values in kinds.items():
            assert values.isfinite().all()
            torch.testing.assert_close(values, found[0][1][kind], rtol=0, atol=0)


def until(model: Any, optimizer: Any, steps: int) -> None:
    """Train until so many are made: who takes over a state goes on from its number."""
    while engine(model).update.steps < steps:
        train(model, optimizer, range(1))


@pytest.mark.parametrize("must_fetch", [True, False])
def test_worker_that_was_excluded_logs_an_event_and_copies_a_model(
    must_fetch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    copied: list[object] = []
    client = SimpleNamespace(stale=True)
    session: Any = SimpleNamespace(
        must_fetch=must_fetch, fetch_state=lambda *, join: join, client=client
    )
    state: Any = SimpleNamespace(put=lambda value, keep: copied.append((value, keep)))
    build._copy_state(loopback.worlds(2)[1], session, state, join=True)
    lines = [
        "rank 1: groups continued without this worker, which took too long: it copies a peer's "
        "model [event=excluded rank=1 incarnation=0]"
    ]
    assert (caplog.messages, copied) == ((lines, [(True, False)]) if must_fetch else ([], []))
