"""The engine's hooks on modules, and on parameters behind users' hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import TINY_MB, engine
from wingbeat.engine.hooks import LastGradHook
from wingbeat.transport import loopback


class Layers(nn.Module):
    """With a forward of its own: that of ``nn.Sequential`` is never compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    "strategy", [wingbeat.AllReduce(mb=TINY_MB), wingbeat.DeAR(plan="fixed", mb=TINY_MB)]
)
def test_a_compiled_forward_is_one_graph(strategy: Any) -> None:
    """Hooks of the modules inside would cut it in pieces."""

    def body(world: Any) -> Any:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return wingbeat.distribute(model, optimizer, strategy, world=world)

    (model, _), _ = made = loopback.run(loopback.worlds(2), body)
    graphs = []

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([node.op for node in graph.graph.nodes].count("call_function"))
        return graph.forward

    torch.compiler.reset()
    try:
        run = torch.compile(model, backend=counting)
        for _ in range(2):  # nothing travels before a backward
            run(torch.ones(2, 4))
    finally:
        torch.compiler.reset()
    assert graphs == [6]
    assert not engine(model).hooks._inner
    assert made


def _noting(calls: list[str], name: str) -> Callable[[Any], None]:
    return lambda _param: calls.append(name)


def _run(param: nn.Parameter, calls: list[str]) -> list[str]:
    calls.clear()
    param.sum().backward()
    return list(calls)


def test_hooks_registered_before_and_after_come_first() -> None:
    param, calls = nn.Parameter(torch.ones(2)), list[str]()
    param.register_post_accumulate_grad_hook(_noting(calls, "before"))
    last = LastGradHook(param, _noting(calls, "last"))
    handle = param.register_post_accumulate_grad_hook(_noting(calls, "after"))
    param.register_post_accumulate_grad_hook(_noting(calls, "later"))
    assert _run(param, calls) == ["before", "after", "later", "last"]
    handle.remove()
    assert _run(param, calls) == ["before", "later", "last"]
    last.remove()
    assert _run(param, calls) == ["before", "later"]
    last.remove()  # once more is no error
    param.register_post_accumulate_grad_hook(_noting(calls, "new"))
    assert _run(param, calls) == ["before", "later", "new"]


def test_last_grad_hook_alone_runs_until_removed() -> None:
    param, calls = nn.Parameter(torch.ones(2)), list[str]()
    last = LastGradHook(param, _noting(calls, "last"))
    assert _run(param, calls) == ["last"]
    last.remove()
    assert _run(param, calls) == []


def _user_hook(_param: Any) -> None:
    """At module level, so that it can be pickled."""


def test_copies_have_the_users_hooks_only() -> None:
    param, calls = nn.Parameter(torch.ones(2)), list[str]()
    LastGradHook(param, _noting(calls, "last"))
    param.register_post_accumulate_grad_hook(_user_hook)
    hooks: Any = param._post_accumulate_grad_hooks
    assert list(copy.copy(hooks).values()) == [_user_hook]
    assert list(pickle.loads(pickle.dumps(hooks)).values()) == [_user_hook]
    assert len(hooks) == 2
