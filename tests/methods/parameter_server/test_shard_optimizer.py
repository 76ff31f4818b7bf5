"""`ShardOptimizer`: an optimizer on slices, compared with the same on whole parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helpers.training import assert_same
from wingbeat.methods.parameter_server.protocol import RequestError
from wingbeat.methods.parameter_server.server_update import describe_optimizer, encode_groups
from wingbeat.methods.parameter_server.shard_optimizer import ShardOptimizer, SliceParameters

optim = torch.optim

MAKES: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.02),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.003, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": lambda p: optim.Adadelta(p),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
}

SIZES = (40, 1, 23)
CUTS = ((0, 17), (17, 50), (50, 64))


def snapshot(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def words_for(start: int, stop: int, dtype: str = "float32", state: Any = None) -> dict[str, Any]:
    pieces, begin = [], 0
    for slot, size in enumerate(SIZES):
        first, last = max(start, begin), min(stop, begin + size)
        if first < last:
            pieces.append([slot, 0, first - start, last - first])
        begin += size
    return {"dtype": dtype, "numel": stop - start, "pieces": pieces,
            "state": [state] * len(pieces)}  # fmt: skip


def bytes_of(values: torch.Tensor) -> bytearray:
    return bytearray(values.contiguous().view(torch.uint8).numpy().tobytes())


def optimizer_of(optimizer: Any) -> ShardOptimizer:
    made = ShardOptimizer(json.loads(describe_optimizer(optimizer, snapshot(optimizer)).text))
    made.set_options(json.loads(json.dumps(encode_groups(snapshot(optimizer)))), {})
    return made


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_step_on_slices_equals_step_on_whole_parameters(make: Any, dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = numbers(0, kind)
    params = [torch.nn.Parameter(p.clone()) for p in values.split(SIZES)]
    optimizer = make(params)
    server = optimizer_of(optimizer)
    held = [server.load(words_for(a, b, dtype), bytes_of(values[a:b])) for a, b in CUTS]
    for step in range(1, 5):
        grads = numbers(step, kind)
        used = {0, 2} if step == 2 else {0, 1, 2}
        for slot, (param, grad) in enumerate(zip(params, grads.split(SIZES), strict=True)):
            param.grad = grad.clone() if slot in used else None
        optimizer.step()
        for each, (a, b) in zip(held, CUTS, strict=True):
            array = np.frombuffer(bytes_of(grads[a:b]), np.uint8).copy()
            server.step(each, array, frozenset(used))
            assert each.memory.tobytes() == bytes_of(each.values)
    found = torch.cat([each.values for each in held])
    want = torch.cat([p.detach() for p in params])
    limit = 1e-2 if dtype == "bfloat16" else 1e-6
    torch.testing.assert_close(found, want, rtol=limit, atol=limit)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_exported_state_loads_and_continues(make: Any) -> None:
    values = numbers(0)
    optimizer = make([torch.nn.Parameter(p.clone()) for p in values.split(SIZES)])
    server = optimizer_of(optimizer)
    one = server.load(words_for(0, 64), bytes_of(values))
    every = frozenset({0, 1, 2})

    def step(on: ShardOptimizer, held: SliceParameters, seed: int) -> None:
        on.step(held, np.frombuffer(bytes_of(numbers(seed)), np.uint8).copy(), every)

    step(server, one, 1)
    step(server, one, 2)
    said, arrays = server.export_state(one)
    other = optimizer_of(optimizer)
    data = bytes_of(one.values) + b"".join(bytes(array) for array in arrays)
    two = other.load(json.loads(json.dumps({**words_for(0, 64), **said})), bytearray(data))
    assert two.nbytes == one.nbytes
    for seed in (3, 4):
        step(server, one, seed)
        step(other, two, seed)
    assert_same(one.values, two.values)
    assert_same(server.export_state(one)[0], other.export_state(two)[0])
    assert [bytes(a) for a in server.export_state(one)[1]] == [
        bytes(a) for a in other.export_state(two)[1]
    ]


def test_set_values_keeps_state_and_old_memory() -> None:
    values = numbers(0)
    optimizer = MAKES["momentum"]([torch.nn.Parameter(p.clone()) for p in values.split(SIZES)])
    server = optimizer_of(optimizer)
    held = server.load(words_for(0, 64), bytes_of(values))
    ones = np.ones(64, "f4")
    server.step(held, ones.copy(), frozenset({0}))
    before, memory = server.export_state(held), held.memory.copy()
    old = held.memory
    server.set_values(held, bytes_of(values))
    assert_same(held.values, values)
    assert server.export_state(held)[0] == before[0]
    server.copy_values(held)
    server.step(held, ones.copy(), frozenset({0, 1, 2}))
    assert old.tobytes() == memory.tobytes()
    assert (held.values != values).all()
    with pytest.raises(RequestError, match="received 8 bytes of parameters for a slice of 256"):
        server.set_values(held, bytearray(8))


def test_nbytes_counts_state_and_drop_frees_it() -> None:
    values = numbers(0)
    optimizer = MAKES["adam"]([torch.nn.Parameter(p.clone()) for p in values.split(SIZES)])
    server = optimizer_of(optimizer)
    held = server.load(words_for(0, 64), bytes_of(values))
    assert held.nbytes == 256
    server.step(held, np.ones(64, "f4"), frozenset({0, 1, 2}))
    assert held.nbytes == 256 + 3 * 256 + 3 * 4  # three averages, and a counter for each
    server.drop(held)
    assert not server._state


WRONG: list[dict[str, Any]] = [
    {"pieces": [[0, 0, 60, 5]]},
    {"pieces": [[0, 0, -1, 5]]},
    {"pieces": [[0, 0, 0, 0]]},
    {"pieces": [[-1, 0, 0, 5]]},
    {"pieces": [[0, 0, 0]]},
    {"pieces": []},
    {"dtype": "int8"},
    {"dtype": "qint8"},
    {"numel": 63},
    {"numel": 65},
    {"state": [{"a": {"each": "float32"}}]},
    {"state": [{"a": {"each": "spam"}}]},
    {"state": [{"a": {"all": {"spam": 1}}}]},
    {"state": [7]},
    {"state": None},
]


@pytest.mark.parametrize("changed", WRONG, ids=str)
def test_load_of_malformed_parameters_raises(changed: dict[str, Any]) -> None:
    optimizer = MAKES["sgd"]([torch.nn.Parameter(torch.zeros(64))])
    words = {"dtype": "float32", "numel": 64, "pieces": [[0, 0, 0, 64]], "state": [None]}
    server = optimizer_of(optimizer)
    server.load(words, bytes_of(numbers(0)))
    with pytest.raises(RequestError, match="malformed parameters"):
        server.load(words | changed, bytes_of(numbers(0)))


@pytest.mark.parametrize("groups", [7, [7], [{"lr": {"spam": 1}}]])
def test_set_options_of_malformed_settings_raises(groups: Any) -> None:
    server = optimizer_of(MAKES["sgd"]([torch.nn.Parameter(torch.zeros(4))]))
    with pytest.raises(RequestError, match="malformed settings"):
        server.set_options(groups, {})


class Assigning(torch.optim.SGD):
    """Puts new tensors in the place of old ones, and counts in the default dtype."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["count"] = torch.tensor(1.5)
                    param.data = param.data - group["lr"] * param.grad


def test_step_that_replaces_tensors_updates_slice() -> None:
    values = numbers(0)
    optimizer = Assigning([torch.nn.Parameter(p.clone()) for p in values.split(SIZES)], lr=0.5)
    server = optimizer_of(optimizer)
    held = server.load(words_for(0, 64), bytes_of(values))
    for _ in range(2):
        server.step(held, np.ones(64, "f4"), frozenset({0, 1, 2}))
    assert_same(held.values, values - 0.5 - 0.5)
    assert all(p.param.data_ptr() == held.values[p.offset :].data_ptr() for p in held.pieces)


def test_step_without_group_settings_raises() -> None:
    server = optimizer_of(MAKES["sgd"]([torch.nn.Parameter(torch.zeros(64))]))
    words = {"dtype": "float32", "numel": 64, "pieces": [[0, 3, 0, 64]], "state": [None]}
    held = server.load(words, bytes_of(numbers(0)))
    with pytest.raises(RequestError, match="no settings for param group 3"):
        server.step(held, np.ones(64, "f4"), frozenset({0}))
