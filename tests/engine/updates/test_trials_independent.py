"""Which optimizers can step on some parameters at a time, and the RNG state after a trial."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wingbeat.engine.updates.trials import preserve_rng_state, steps_independently


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((9, 3), (4,), (4,), ())]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.5}]),
    ],
)
def test_torchs_optimizers_step_independently(make: Any) -> None:
    assert steps_independently(make(_params()))


class Plain(torch.optim.Optimizer):
    """Gradient descent, from which others deviate."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1, "odd": False})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self.update(group, param)

    def update(self, group: dict[str, Any], param: Tensor) -> None:
        assert param.grad is not None
        param.sub_(param.grad, alpha=group["lr"])


class ByNorm(Plain):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


class Counting(Plain):
    """Counts steps in an attribute."""

    made = 0

    def step(self, closure: Any = None) -> None:
        self.made += 1
        super().step()


class InGroups(Plain):
    """Counts steps in its groups."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Idle(Plain):
    """Updates what it was made with, whatever stands in its groups."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.own = [p for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for param in self.own:
                if param.grad is not None:
                    param.sub_(param.grad)


class Shared(Plain):
    """Remembers something that belongs to no parameter."""

    def update(self, group: dict[str, Any], param: Tensor) -> None:
        super().update(group, param)
        self.state["all"]["seen"] = True


class Remembering(Plain):
    """Updates apart, but remembers how many were updated together."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["together"] = len(group["params"])


class RememberingMore(Plain):
    """Remembers of one that is updated alone that it was."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            if len(group["params"]) == 1:
                self.state[group["params"][0]]["alone"] = True


class Raising(Plain):
    """Wants to be given everything."""

    def step(self, closure: Any = None) -> None:
        if len(self.param_groups[0]["params"]) < 2:
            raise ValueError("where are the others?")
        super().step()


def test_a_plain_custom_optimizer_steps_independently() -> None:
    assert steps_independently(Plain(_params()))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ByNorm, "depends on the others"),
        (Counting, "outside of its state dict: made"),
        (InGroups, "in its param groups: k"),
        (Idle, "does not update the parameters of its param groups"),
        (Shared, "belongs to no parameter"),
        (Remembering, "the state of one parameter depends on the others"),
        (RememberingMore, "the state of one parameter depends on the others"),
        (Raising, "where are the others?"),
    ],
)
def test_dependent_optimizers_are_found_and_logged(
    kind: type[Plain], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wingbeat")
    assert not steps_independently(kind(_params()))
    assert f"optimizer {kind.__name__} cannot step on some of its parameters" in caplog.text
    assert why in caplog.text


def test_a_single_parameter_is_tried_with_a_second_one() -> None:
    assert not steps_independently(ByNorm([nn.Parameter(torch.ones(4))]))


def test_frozen_parameters_are_not_tried() -> None:
    """A dtype that no optimizer can train is no reason to refuse those that it can."""
    frozen = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    assert steps_independently(Plain([frozen, *_params()]))


def test_every_groups_settings_are_tried() -> None:
    class Fussy(Plain):
        def step(self, closure: Any = None) -> None:
            (group,) = self.param_groups
            if group["odd"] and len(group["params"]) == 1:
                group["params"][0].grad = torch.zeros_like(group["params"][0])
            super().step()

    first, *others = _params()
    optimizer = Fussy(others)
    assert steps_independently(optimizer)
    optimizer.add_param_group({"params": [first], "odd": True})
    assert not steps_independently(optimizer)


def test_a_trial_changes_neither_optimizer_nor_rng_state() -> None:
    params = _params()
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy((optimizer.state_dict(), [(p.detach(), p.grad) for p in params]))
    random = torch.get_rng_state()
    assert steps_independently(optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    after = optimizer.state_dict(), [(p.detach(), p.grad) for p in params]
    assert repr(after) == repr(before)


def test_rng_state_is_restored() -> None:
    before = torch.get_rng_state()
    with preserve_rng_state(torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_rng_state_is_preserved_by_one_thread_at_a_time() -> None:
    entered = threading.Event()

    def other() -> None:
        with preserve_rng_state(torch.device("cpu")):
            entered.set()

    thread = threading.Thread(target=other, daemon=True)
    with preserve_rng_state(torch.device("cpu")):
        thread.start()
        assert not entered.wait(0.05)
    thread.join(10.0)
    assert entered.is_set()
