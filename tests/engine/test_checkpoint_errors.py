"""Parts and peers that are not what they should be are refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.training import adamw, assert_same, distributed, engine, net, on, state_of, train
from wingbeat.errors import PeerError, RendezvousError, UsageError


def _parts(size: int = 2, steps: int = 2) -> list[Any]:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        train(model, optimizer, range(steps))
        return copy.deepcopy(optimizer.shard_state_dict())

    return on(size, body)


def _bigger() -> Any:
    model = net()
    model.head = torch.nn.Linear(7, 4)
    return model


def _grouped(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], amsgrad=True)


def _without(part: Any, name: str) -> Any:
    part["shards"].pop(name)
    return part


def _with_start(part: Any, start: int) -> Any:
    shard = part["shards"]["second.weight"]
    count = shard["stop"] - start
    shard["start"] = start
    shard["each"] = {key: torch.zeros(count) for key in shard["each"]}
    return part


def _damaged(part: Any) -> Any:
    part["shards"]["second.weight"]["each"]["exp_avg"] = torch.zeros(1)
    return part


def _of_other_kind(part: Any) -> Any:
    part["shards"]["second.weight"]["each"].pop("exp_avg")
    return part


BAD: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "no_list": (lambda p: p[0], r"load_shards\(dict\): pass a list"),
    "nothing": (lambda p: [], "pass a list"),
    "a_whole_state_dict": (lambda p: [{"state": {}, "param_groups": []}], r"parts\[0\] was not"),
    "fields_missing": (
        lambda p: [p[0], {k: v for k, v in p[1].items() if k != "shards"}],
        r"parts\[1\] was not",
    ),
    "one_missing": (lambda p: [p[1]], "part of rank 0 is missing"),
    "one_twice": (lambda p: [*p, p[1]], "rank 1 occurs more often"),
    "another_moment": (lambda p: [p[0], _parts(steps=3)[1]], "after 3 with 2"),
    "another_world": (lambda p: [p[0], _parts(3)[1]], "with 3; all parts .* number of workers"),
    "parameter_in_one_only": (
        lambda p: [p[0], _without(p[1], "second.weight")],
        r"elements \d+ to 90 of parameter 'second.weight' are in no part",
    ),
    "overlap": (
        lambda p: [p[0], _with_start(p[1], 40)],
        r"of parameter 'second.weight' are in two parts",
    ),
    "gap": (
        lambda p: [p[0], _with_start(p[1], 80)],
        r"to 79 of parameter 'second.weight' are in no part",
    ),
    "damaged": (lambda p: [p[0], _damaged(p[1])], "state of parameter 'second.weight' is damaged"),
    "other_kind": (lambda p: [p[0], _of_other_kind(p[1])], "different kinds in different parts"),
    "stranger": (
        lambda p: [{**p[0], "shards": {**p[0]["shards"], "x": {}}}, p[1]],
        "rank 0's part has parameter 'x'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_parts_are_refused_before_anything_changes(name: str) -> None:
    spoil, message = BAD[name]
    parts = spoil(_parts())

    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(3))
        before = state_of(optimizer)
        with pytest.raises(UsageError, match=message) as found:
            optimizer.load_shards(parts)
        assert "\n" not in str(found.value)
        assert_same(state_of(optimizer), before)

    on(2, body)


@pytest.mark.parametrize(
    ("model", "make", "message"),
    [
        (_bigger, adamw, r"has parameter 'head.weight' \(4, 7\) where rank 0's .* \(3, 7\)"),
        (net, _grouped, r"param groups of \[1, 8\] parameters, rank 0's part of \[9\]"),
    ],
)
def test_parts_of_another_model_or_other_groups_are_refused(
    model: Any, make: Any, message: str
) -> None:
    parts = _parts()

    def body(world: Any) -> None:
        _, optimizer = distributed(world, make, model())
        with pytest.raises(UsageError, match=message):
            optimizer.load_shards(parts)

    on(1, body)


def test_without_shards_there_are_no_parts() -> None:
    def body(world: Any) -> None:
        _, optimizer = distributed(world, shard_optimizer=False)
        with pytest.raises(UsageError, match=r"save optimizer.state_dict\(\) on rank 0"):
            optimizer.shard_state_dict()

    on(2, body)


def test_a_state_dict_that_one_rank_alone_asks_for_names_the_others() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(1))
        model.synchronize()
        if world.rank == 0:
            with pytest.raises(RendezvousError, match=r"rank 1 .*every rank must ask for it"):
                optimizer.state_dict()

    on(2, body, timeout=1.5)


def test_state_of_another_shape_is_refused() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(1))
        state = state_of(optimizer)
        state["state"][1]["exp_avg"] = torch.zeros(5)
        with pytest.raises(UsageError, match=r"'exp_avg' of parameter 'first.weight' .*\(5,\)"):
            optimizer.load_state_dict(state)

    on(2, body)


STEP_OF_TWO = {"all": {"tensor": ["float32", [2], [1.0], False]}}


@pytest.mark.parametrize(
    "sent",
    [
        7,
        [[{"exp_avg": {"each": "float33"}}, [0]]],
        [[{"exp_avg": {"each": "float32"}}, [99]]],
        [[{"exp_avg": {"each": "float32"}}, ["0"]]],
        [[{"step": STEP_OF_TWO}, [0]]],
        [[{"step": {"some": 1}}, [0]]],
        [[{"step": 1.0}, [0]]],
    ],
)
def test_malformed_state_of_a_peer_is_refused(sent: Any) -> None:
    _hear(sent, "rank 1 sent a malformed optimizer state")


def test_peers_with_other_state_are_named() -> None:
    _hear([[{"exp_avg": {"each": "float32"}}, [1]]], "another optimizer state of .*'first.weight'")


def _hear(sent: Any, message: str) -> None:
    """Have rank 0 hear ``sent`` from rank 1; the other waits in vain."""

    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(1))
        model.synchronize()
        if world.rank == 0:
            own = engine(model).world
            exchange = own.exchange
            own.exchange = lambda what, value: [exchange(what, value)[0], sent]
        with pytest.raises(PeerError, match=message if world.rank == 0 else "all-gather"):
            optimizer.state_dict()

    on(2, body, timeout=1.5)
