"""What servers that update refuse, in one line on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wingbeat
from helpers.server_update import distributed, strategy
from helpers.training import (
    Make,
    backward,
    net,
    on,
    train,
)
from wingbeat.errors import MismatchError, UsageError


class Together(torch.optim.SGD):
    """Looks at the whole of a parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data -= group["lr"] * param.grad / (param.grad.norm() + 1)


class Remembering(torch.optim.SGD):
    """Needs an attribute that cannot be told of in numbers."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.scale = lambda: 2.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data -= group["lr"] * param.grad * self.scale()


def _local() -> Any:
    class Local(torch.optim.SGD):
        pass

    return Local


class InTheScript(torch.optim.SGD):
    """As if it were defined in the file that is run."""


InTheScript.__module__ = "__main__"


def _with_function(params: Any) -> Any:
    made = torch.optim.SGD(params, lr=0.1)
    made.param_groups[0]["policy"] = len
    return made


REFUSED: dict[str, tuple[Make, str]] = {
    "whole parameters": (
        lambda params: Together(params, lr=0.1),
        r"update=\"server\": the work of optimizer Together cannot be divided among the servers: "
        r"it does not treat each element of a parameter alone; use update=\"worker\"",
    ),
    "an attribute": (
        lambda params: Remembering(params, lr=0.1),
        "Remembering .*AttributeError: .*'scale'",
    ),
    "a local class": (
        lambda params: _local()(params, lr=0.1),
        r"Local is defined in .*_local.<locals>.Local, which a server cannot import: move",
    ),
    "a class of the script": (
        lambda params: InTheScript(params, lr=0.1),
        "InTheScript is defined in __main__ as InTheScript, which a server cannot import",
    ),
    "a function": (_with_function, r"setting 'policy' of the optimizer's group 0: .*; allowed are"),
    "several losses": (lambda params: torch.optim.LBFGS(params), "LBFGS"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_unsupported_optimizer_raises_before_server_starts(make: Make, words: str) -> None:
    def body(world: Any) -> None:
        model = net()
        optimizer = make(model.parameters())
        kind = type(optimizer)
        with pytest.raises(UsageError, match=words) as caught:
            wingbeat.distribute(model, optimizer, strategy(), world=world)
        assert "\n" not in str(caught.value)
        assert type(optimizer) is kind

    on(2, body)


def test_different_optimizers_between_ranks_raise() -> None:
    def body(world: Any) -> None:
        model = net()
        params = list(model.parameters())
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = torch.optim.SGD(params if world.rank else groups, lr=0.1)
        with pytest.raises(MismatchError, match="param groups"):
            wingbeat.distribute(model, optimizer, strategy(), world=world)

    on(2, body)


def test_different_calls_between_ranks_raise() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        backward(model, world.rank, 2)
        with pytest.raises(UsageError, match=r"rank 0 calls optimizer.step\(\) while rank 1 drops"):
            optimizer.step() if world.rank == 0 else optimizer.zero_grad()

    on(2, body)


def test_accumulation_after_step_raises() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(UsageError, match=r"optimizer\.step\(\): .*zero_grad\(\)"):
            optimizer.step()
        backward(model, world.rank, 2)
        with pytest.raises(
            UsageError, match=r'update="server" a step uses .* zero_grad\(\) of the optimizer that'
        ):
            optimizer.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match="zero_grad"):
            backward(model, world.rank, 3)
        with pytest.raises(UsageError, match="zero_grad"):
            optimizer.step()
        train(model, optimizer, range(2, 4))

    on(2, body)


class Breaking(torch.optim.SGD):
    """Fails when its learning rate says so."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["lr"] == 13.0:
            raise ValueError("thirteen\nis too much")
        return super().step(closure)


def test_server_failure_raises_on_all_ranks() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world, lambda params: Breaking(params, lr=0.1))
        train(model, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 13.0
        words = (
            r"rank \d: server \d \(started by rank \d\): optimizer Breaking: ValueError: thirteen$"
        )
        with pytest.raises(wingbeat.errors.PeerError, match=words):
            train(model, optimizer, range(2, 4))

    on(2, body)
