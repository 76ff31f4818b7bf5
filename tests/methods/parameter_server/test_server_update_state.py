"""State of an optimizer that servers apply: saved, loaded, copied, and at the end."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import wingbeat
from helpers.server_update import distributed, strategy
from helpers.training import (
    TINY_MB,
    adamw,
    assert_same,
    backward,
    engine,
    net,
    on,
    sgd,
    state_of,
    train,
    weights,
)
from wingbeat.engine.updates.divided import DividedState
from wingbeat.errors import UsageError


def test_save_on_one_rank_succeeds() -> None:
    def body(world: Any, update: str) -> Any:
        model, optimizer = distributed(world, update=update)
        train(model, optimizer, range(3))
        state = state_of(optimizer) if world.rank == 1 else None
        train(model, optimizer, range(3, 5))
        return state

    want = on(2, lambda world: body(world, "worker"))
    assert_same(on(2, lambda world: body(world, "server"))[1], want[1])


@pytest.mark.parametrize("into", ["server", "worker"])
def test_resumed_run_gives_same_bits(into: str) -> None:
    def first(world: Any) -> Any:
        model, optimizer = distributed(world)
        train(model, optimizer, range(3))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(model, optimizer, range(3, 6))
        return file.getvalue(), weights(model), state_of(optimizer)

    def second(world: Any, saved: bytes, when: str) -> Any:
        found = torch.load(io.BytesIO(saved))
        model = net(5)
        optimizer = adamw(model.parameters())
        pairs = [(model, found["model"]), (optimizer, found["optimizer"])]
        if when == "before":
            [each.load_state_dict(state) for each, state in pairs]
        model, optimizer = wingbeat.distribute(model, optimizer, strategy(into), world=world)
        if when == "later":
            train(model, optimizer, range(7, 9))
        if when != "before":
            [each.load_state_dict(state) for each, state in pairs]
        train(model, optimizer, range(3, 6))
        return weights(model), state_of(optimizer)

    saved, *want = on(3, first)[0]
    for when in ("before", "after", "later"):
        for result in on(3, lambda world, when=when: second(world, saved, when)):
            assert_same(result, tuple(want))


def test_state_loads_with_other_dtypes_and_in_parts() -> None:
    """Parts of a run with a divided optimizer, too."""

    def divided_run(world: Any) -> Any:
        model = net()
        made = adamw(model.parameters())
        chosen = wingbeat.DeAR(plan="fixed", mb=TINY_MB, shard_optimizer=True)
        model, optimizer = wingbeat.distribute(model, made, chosen, world=world)
        train(model, optimizer, range(3))
        return copy.deepcopy(optimizer.shard_state_dict()), state_of(optimizer)

    results = on(2, divided_run)
    parts = [part for part, _ in results]

    def body(world: Any) -> Any:
        _model, optimizer = distributed(world)
        optimizer.load_shards(parts)
        assert len(vars(optimizer)["state"]) == 0
        with pytest.raises(UsageError, match="the servers have the whole state"):
            optimizer.shard_state_dict()
        return state_of(optimizer)["state"]

    assert_same(on(3, body)[0], results[0][1]["state"])


def test_optimizer_copy_has_complete_state() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        assert not optimizer.state
        train(model, optimizer, range(3))
        assert isinstance(optimizer.state, DividedState)
        with pytest.raises(UsageError, match=r"servers have it; call optimizer\.state_dict"):
            list(optimizer.state)
        with pytest.raises(UsageError, match="no worker has all"):
            optimizer.state = {}
        twin = copy.deepcopy(optimizer)
        assert type(twin) is torch.optim.AdamW
        assert_same(twin.state_dict(), state_of(optimizer))
        assert len(vars(optimizer)["state"]) == 0
        train(model, optimizer, range(3, 5))

    on(3, body)


def test_release_restores_complete_state() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        train(model, optimizer, range(3))
        state = state_of(optimizer)
        wingbeat.release(model, optimizer)
        assert type(optimizer) is torch.optim.AdamW
        assert_same(state_of(optimizer), state)
        unused = set(model.spare.parameters())
        assert set(optimizer.state) == set(model.parameters()) - unused
        train(model, optimizer, [9], rank=0)
        return weights(model)

    results = on(2, body)
    assert_same(results[0], results[1])


def test_shutdown_keeps_current_parameters() -> None:
    def body(world: Any, update: str) -> Any:
        model, optimizer = distributed(world, update=update)
        raw = list(torch.nn.Module.parameters(model))
        train(model, optimizer, range(3))
        if update == "worker":
            model.synchronize()
        return model, raw

    want = [p.detach().clone() for p in on(3, lambda world: body(world, "worker"))[0][1]]
    for model, raw in on(3, lambda world: body(world, "server")):
        assert not any(bucket.due for bucket in engine(model).buckets)
        assert_same([torch.Tensor.detach(p) for p in raw], want)


def test_uneven_batches_are_supported() -> None:
    def body(world: Any, update: str) -> Any:
        model, optimizer = distributed(world, sgd, update=update)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        with model.join():
            for step in range((1, 5, 4)[world.rank]):
                train(model, optimizer, [step])
                if step == 2:
                    optimizer.zero_grad()
                    backward(model, world.rank, 60)
                    optimizer.clip_grad_norm_(0.01)
                    optimizer.step()
                with torch.no_grad():
                    for param in model.parameters():
                        param.clamp_(-0.3, 0.3)
                scheduler.step()
        return weights(model)

    want = on(3, lambda world: body(world, "worker"))
    got = on(3, lambda world: body(world, "server"))
    for result in got:
        assert_same(result, want[1], 1e-6)
