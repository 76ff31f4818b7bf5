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
from helpers.training import TINY_MB, engine, net, on, sgd, train
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.hooks import Arrivals, LastGradHook
from wingbeat.errors import UsageError
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


class Arriving:
    """Three parameters of one bucket, and the calls of the engine for their gradients."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.slots = [Slot(i, f"p{i}", param) for i, param in enumerate(self.params)]
        self.bucket = Bucket(0, self.slots)
        self.called: list[int] = []
        self.arrivals = Arrivals(self._call, self.slots)
        self.arrivals.watch([self.bucket])

    def _call(self, param: Tensor) -> None:
        self.called.append(next(i for i, each in enumerate(self.params) if each is param))

    def backward(self, *order: int) -> list[int]:
        """Make gradients in this order; return those for which the engine was called."""
        self.called.clear()
        for index in order:
            self.params[index].sum().backward()
        return self.called


def test_only_the_watched_gradient_calls_the_engine_while_others_are_listed() -> None:
    case = Arriving()
    assert case.backward(0, 1, 2) == [0, 1, 2]
    case.arrivals.begin()
    assert case.backward(1, 0, 2) == [2]
    assert case.arrivals.add(case.slots[2])
    case.arrivals.end()
    assert case.backward(0, 1, 2) == [0, 1, 2]


def test_an_incomplete_bucket_watches_a_gradient_that_is_missing() -> None:
    """From then on that one, as long as the order stays the same."""
    case = Arriving()
    case.arrivals.begin()
    assert case.backward(0, 2) == [2]
    assert not case.arrivals.add(case.slots[2])
    assert case.backward(1) == [1]
    assert case.arrivals.add(case.slots[1])
    case.arrivals.end()
    case.arrivals.begin()
    assert case.backward(0, 2, 1) == [1]
    assert case.arrivals.add(case.slots[1])


@pytest.mark.parametrize("order", [(0, 0), (1, 0, 1)])
def test_a_listed_gradient_that_arrives_twice_is_refused(order: tuple[int, ...]) -> None:
    case = Arriving()
    case.arrivals.begin()
    case.backward(*order)
    with pytest.raises(UsageError, match=f"'p{order[0]}' got its gradient twice"):
        case.arrivals.end()


def test_an_abandoned_backward_leaves_nothing_listed() -> None:
    case = Arriving()
    case.arrivals.begin()
    case.backward(0, 1)
    case.arrivals.abandon()
    assert case.backward(0) == [0]
    case.arrivals.begin()
    case.backward(2)
    assert not case.arrivals.add(case.slots[2])


@pytest.mark.parametrize("strategy", [wingbeat.AllReduce(), wingbeat.DeAR(plan="fixed")])
def test_a_backward_calls_the_engine_once_for_its_begin_and_once_for_each_bucket(
    strategy: Any,
) -> None:
    def body(world: Any) -> None:
        model = net()
        model.use_spare = True
        optimizer = sgd(model.parameters())
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        train(model, optimizer, range(3))
        found, calls = engine(model), []
        call = found.on_grad
        found.on_grad = lambda param: (calls.append(param), call(param))
        train(model, optimizer, range(3, 6))
        assert len(found.slots) == 9
        assert len(calls) == 3 * (1 + len(found.buckets))

    on(2, body)
