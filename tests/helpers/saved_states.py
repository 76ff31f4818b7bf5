"""Saved states of training as JSON, and optimizers that load them: for tests with damaged states.

`torch.load(weights_only=True)` of a file from elsewhere may return any nesting of dicts, lists,
numbers, texts and tensors. As JSON, such values can be spoilt like all others.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

import wingbeat
from helpers.training import adamw, engine, net, sgd, train
from wingbeat.engine import checkpoint
from wingbeat.engine.updates.json_values import decode, dtype_of, encode
from wingbeat.transport import loopback

CPU = torch.device("cpu")
_KEPT: list[Any] = []
"""Models, without which an optimizer's connections end."""


def to_json(value: Any) -> Any:
    """A value as JSON; `from_json` undoes it."""
    if isinstance(value, dict):
        return {"dict": {key: to_json(item) for key, item in value.items()}}
    if isinstance(value, list):
        return {"list": [to_json(item) for item in value]}
    return encode(value)


def from_json(data: Any) -> Any:
    """A value, or a ValueError if no state has this form; ``odd`` are tensors of other kinds."""
    if isinstance(data, dict) and len(data) == 1:
        [(kind, inside)] = data.items()
        if kind == "dict" and isinstance(inside, dict):
            return {key: from_json(item) for key, item in inside.items()}
        if kind == "list" and isinstance(inside, list):
            return [from_json(item) for item in inside]
        if kind == "odd":
            return _odd(inside)
    return decode(data, CPU)


def _odd(inside: Any) -> torch.Tensor:
    try:
        kind, dtype, shape = inside
        if not all(type(n) is int and 0 <= n <= 100 for n in shape) or len(shape) > 4:
            raise ValueError
        if kind == "meta":
            return torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        if kind == "sparse":
            return torch.zeros(shape, dtype=dtype_of(dtype)).to_sparse()
        if kind == "expanded":
            return torch.ones((), dtype=dtype_of(dtype)).expand(shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError("malformed tensor") from error
    raise ValueError("malformed tensor")


@functools.cache
def trained(name: str) -> list[Any]:
    """Workers' optimizers after three steps; their threads have ended."""
    strategy = {
        "sketch": lambda: wingbeat.AllReduce(compression="sketch@4"),
        "lowrank": lambda: wingbeat.AllReduce(compression="lowrank@2"),
        "momentum": lambda: wingbeat.AllReduce(compression="topk@0.1:momentum=0.9"),
        "shards": lambda: wingbeat.DeAR(shard_optimizer=True),
        "outer": lambda: wingbeat.DiLoCo(),
    }[name]()

    size = 1 if name == "shards" else 2
    done = threading.Barrier(size, timeout=60)

    def body(world: Any) -> Any:
        model = net()
        plain = functools.partial(torch.optim.SGD, lr=0.1)
        make = {"shards": adamw, "momentum": plain}.get(name, sgd)
        model, optimizer = wingbeat.distribute(
            model, make(model.parameters()), strategy, world=world
        )
        train(model, optimizer, range(3))
        done.wait()
        if name == "outer":  # its group generator would run on
            world.close()
        return model, optimizer

    made = loopback.run(loopback.worlds(size), body)
    _KEPT.extend(made)
    return [optimizer for _, optimizer in made]


def residual_parts(name: str) -> Any:
    """What `residual_state_dict` has returned on all workers, as JSON."""
    return to_json([each.residual_state_dict() for each in trained(name)])


def shard_parts() -> Any:
    """What `shard_state_dict` has returned on all workers, as JSON."""
    return to_json([copy.deepcopy(each.shard_state_dict()) for each in trained("shards")])


def extra_state(name: str) -> Any:
    """The entry ``wingbeat`` of a state dict, as JSON."""
    return to_json(checkpoint.export_extra(engine(trained(name)[0])))


def load_residuals(name: str, data: Any) -> None:
    """Load residuals; those that were accepted must be finite."""
    optimizer = trained(name)[0]
    optimizer.load_residuals(data)
    _check_finite(optimizer.residual_state_dict())


def load_shards(data: Any) -> None:
    """Load shards; they must come out as they went in."""
    optimizer = trained("shards")[0]
    optimizer.load_shards(data)
    assert type(optimizer.shard_state_dict()["steps"]) is int


def load_extra(name: str, data: Any) -> None:
    """Load extra state; what was accepted must be finite."""
    found = engine(trained(name)[0])
    checkpoint.check_extra(found, data)
    checkpoint.load_extra(found, data)
    _check_finite(checkpoint.export_extra(found))


def reader(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Have ``load`` read JSON; JSON that is no state is left out."""

    def read(data: Any) -> None:
        try:
            value = from_json(data)
        except (ValueError, RecursionError):
            return
        load(value)

    return read


def _check_finite(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        assert bool(value.isfinite().all()), "a value that is not finite was loaded"
    elif isinstance(value, dict):
        for each in value.values():
            _check_finite(each)
