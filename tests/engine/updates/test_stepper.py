"""Steps of an optimizer on some parameters, and the arguments of a call of step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from wingbeat.engine.gradients.bucket import Slot
from wingbeat.engine.updates.stepper import StepArguments, Stepper
from wingbeat.errors import UsageError


def _params(count: int = 2) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(3)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(3)
    return params


def _partial(optimizer: torch.optim.Optimizer) -> Stepper:
    return Stepper(optimizer, type(optimizer).step)


def test_a_step_uses_the_settings_of_the_snapshot() -> None:
    """Also a learning rate that is a tensor, which a scheduler changes in place."""
    first, second = _params()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.25}], lr=rate)
    partial = _partial(optimizer)
    snapshot = partial.snapshot()
    rate.fill_(100.0)
    optimizer.param_groups[1]["lr"] = 100.0
    partial.step([first, second], snapshot)
    assert torch.equal(first.detach(), torch.full((3,), 0.5))
    assert torch.equal(second.detach(), torch.full((3,), 0.75))


def test_a_step_updates_only_the_given_parameters() -> None:
    first, second = _params()
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    groups = optimizer.param_groups
    partial = _partial(optimizer)
    partial.step([second, nn.Parameter(torch.ones(3))], partial.snapshot())
    assert torch.equal(first.detach(), torch.ones(3))
    assert torch.equal(second.detach(), torch.zeros(3))
    assert optimizer.param_groups is groups


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_global_hooks_are_detected(register: Any) -> None:
    partial = _partial(torch.optim.SGD(_params()))
    assert not partial.hooked
    handle = register(lambda *_: None)
    try:
        assert partial.hooked
    finally:
        handle.remove()
    assert not partial.hooked


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_one_optimizer_are_detected_and_not_run_in_parts(when: str) -> None:
    params = _params()
    optimizer = torch.optim.SGD(params)
    partial = _partial(optimizer)
    calls: list[Any] = []
    getattr(optimizer, f"register_step_{when}_hook")(lambda opt, *_: calls.append(opt))
    assert partial.hooked
    partial.step(params[:1], partial.snapshot())
    assert not calls
    partial.run_hooks(when)
    assert calls == [optimizer]


def test_global_hooks_run_once_around_a_step_in_parts() -> None:
    params = _params()
    optimizer = torch.optim.SGD(params)
    partial = _partial(optimizer)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre of all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post of all")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        partial.run_hooks("pre")
        partial.step(params[:1], partial.snapshot())
        partial.step(params[1:], partial.snapshot())
        partial.run_hooks("post")
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["pre of all", "pre", "post", "post of all"]


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError


def test_an_exception_in_a_part_leaves_the_optimizer_as_it_was() -> None:
    params = _params()
    optimizer = Failing(params, lr=1.0)
    optimizer.register_step_post_hook(lambda *_: None)
    before = dict(optimizer.__dict__)
    partial = _partial(optimizer)
    with pytest.raises(ArithmeticError):
        partial.step(params[:1], partial.snapshot())
    assert all(optimizer.__dict__[key] is value for key, value in before.items())
    assert not partial.stepping


@pytest.mark.parametrize("kind", [torch.optim.SGD, Failing])
def test_a_step_in_parts_runs_with_the_optimizers_own_class(kind: Any) -> None:
    """Properties of the class that `distribute` gives it would be read for each parameter."""
    seen: list[type] = []

    class Own(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            seen.append(type(self))
            super().step()

    class Upgraded(Own):
        @property
        def state(self) -> Any:
            raise AssertionError

    params = _params()
    optimizer = Own(params, lr=1.0)
    partial = _partial(optimizer)
    optimizer.__class__ = Upgraded
    with contextlib.suppress(ArithmeticError):
        partial.step(params[:1], partial.snapshot())
    assert seen == [Own]
    assert type(optimizer) is Upgraded


def test_the_optimizers_own_code_may_call_itself() -> None:
    partial = _partial(torch.optim.SGD(_params()))
    with partial.inside():
        with partial.inside():
            pass
        assert partial.stepping
    assert not partial.stepping


def test_a_parameter_moved_to_another_group_is_detected() -> None:
    first, second = _params()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    partial = _partial(optimizer)
    partial.refuse_regrouped()
    for group, params in zip(optimizer.param_groups, ([second], [first]), strict=True):
        group["params"] = params
    with pytest.raises(UsageError, match="hold other parameters than at distribute"):
        partial.refuse_regrouped()
    partial.refresh()
    partial.refuse_regrouped()


def test_slots_of_parameters_that_leave_the_optimizer_are_not_owned_from_the_next_step_on() -> None:
    params = _params()
    optimizer = torch.optim.SGD(params[:1], lr=1.0)
    partial = _partial(optimizer)
    slots = [Slot(i, f"p{i}", param) for i, param in enumerate(params)]
    partial.follow(slots)
    assert [slot.owned for slot in slots] == [True, False]
    optimizer.param_groups[0]["params"] = params[1:]
    partial.snapshot()
    assert [slot.owned for slot in slots] == [False, True]


def test_the_arguments_of_a_call_are_forgotten_after_it_also_where_it_raises() -> None:
    """Otherwise a later step that no call asked for would get them."""
    stepper = _partial(torch.optim.SGD(_params(), lr=0.5))

    def served() -> None:
        with stepper.calling(StepArguments(kwargs={"bs": 64})):
            raise RuntimeError(f"others: {stepper.arguments.others}")

    with pytest.raises(RuntimeError, match="others: True"):
        served()
    assert not stepper.arguments.others


def usual(self: Any, closure: Any = None, bs: int = 1) -> None:
    """As most optimizers have it."""


def behind(self: Any, bs: int, closure: Any = None) -> None:
    """The closure comes second."""


def without(self: Any, bs: Any) -> None:
    """No closure at all."""


def anything(self: Any, *args: Any, **kwargs: Any) -> None:
    """As a wrapper around another step."""


def evaluate() -> float:
    return 1.0


def other() -> float:
    return 2.0


@pytest.mark.parametrize(
    ("step", "args", "kwargs"),
    [
        (usual, (evaluate,), {}),
        (usual, (evaluate, 3), {}),
        (usual, (), {"closure": evaluate}),
        (usual, (), {"bs": 3, "closure": evaluate}),
        (behind, (3, evaluate), {}),
        (anything, (evaluate, 3), {"bs": 3}),
    ],
)
def test_a_closure_is_found_and_replaced_in_its_position(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = StepArguments(step, args, kwargs)
    assert given.closure is evaluate
    assert given.others == (len(args) + len(kwargs) > 1)
    assert given.with_closure(evaluate) == (args, kwargs)
    replaced, named = given.with_closure(other)
    assert [*replaced, *named.values()].count(other) == 1
    assert evaluate not in (*replaced, *named.values())


@pytest.mark.parametrize(
    ("step", "args", "kwargs"),
    [
        (usual, (None, 3), {}),
        (usual, (), {"bs": 3}),
        (behind, (3,), {}),
        (without, (evaluate,), {}),
        (anything, (3,), {}),
    ],
)
def test_arguments_without_a_closure_are_passed_unchanged(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = StepArguments(step, args, kwargs)
    assert given.closure is None
    assert given.others
    assert given.with_closure(None) == (args, kwargs)


def test_a_call_without_arguments_accepts_a_closure() -> None:
    assert not StepArguments().others
    assert not StepArguments(usual, (None,)).others
    assert StepArguments().with_closure(None) == ((), {})
    assert StepArguments().with_closure(other) == ((other,), {})


def test_arguments_are_refused_by_their_text_in_one_line() -> None:
    given = StepArguments(usual, (None,), {"bs": "two\nlines"})
    with pytest.raises(UsageError, match=r"step\(None, bs='two.*use wingbeat.DeAR\(\)") as caught:
        given.refuse_others("with shard_optimizer", "wingbeat.DeAR()")
    assert "\n" not in str(caught.value)
    StepArguments(usual, (evaluate,)).refuse_others("with shard_optimizer", "wingbeat.DeAR()")
