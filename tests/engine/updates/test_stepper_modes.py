"""Work inside of `restored` does not notice in which modes it is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from wingbeat.engine.updates.stepper import Modes

CPU = torch.device("cpu")


class Functions(TorchFunctionMode):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """The same, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_inference_mode_is_left_and_entered_again() -> None:
    ambient = Modes(CPU)
    with torch.inference_mode():
        with ambient.restored():
            made = torch.ones(2)
        assert torch.is_inference_mode_enabled()
    assert not made.is_inference()


def test_restored_modes_record_no_graph() -> None:
    ambient = Modes(CPU)
    param = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        with ambient.restored():
            made = param * 2
        assert torch.is_grad_enabled()
    assert not made.requires_grad


@pytest.mark.parametrize("then", [(False, torch.bfloat16), (True, torch.bfloat16)])
@pytest.mark.parametrize(
    "now", [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)]
)
def test_restored_autocast_is_that_of_the_snapshot(
    then: tuple[bool, torch.dtype], now: tuple[bool, torch.dtype]
) -> None:
    a = torch.ones(2, 2)
    with torch.autocast("cpu", enabled=then[0], dtype=then[1]):
        ambient = Modes(CPU)
        wanted = (a @ a).dtype
    with torch.autocast("cpu", enabled=now[0], dtype=now[1]):
        before = (a @ a).dtype
        with ambient.restored():
            assert (a @ a).dtype is wanted
        assert (a @ a).dtype is before


def test_modes_entered_later_are_suspended_inside_and_restored() -> None:
    ambient = Modes(CPU)
    outer, inner, low = Functions(), Functions(), Dispatches()
    with outer, inner, low:
        with ambient.restored():
            outer.seen.clear()
            inner.seen.clear()
            low.seen.clear()
            torch.ones(2).add(1)
            assert not outer.seen + inner.seen + low.seen
        assert _get_current_function_mode_stack() == [outer, inner]
        assert _get_current_dispatch_mode_stack() == [low]


def test_modes_left_since_are_entered_inside_and_left_again() -> None:
    outer, inner, low = Functions(), Functions(), Dispatches()
    with outer, inner, low:
        ambient = Modes(CPU)
    other = Functions()
    with other:
        with ambient.restored():
            assert _get_current_function_mode_stack() == [outer, inner]
            for mode in (outer, inner, low):
                mode.seen.clear()
            torch.ones(2)
            assert outer.seen
            assert inner.seen
            assert low.seen
        assert _get_current_function_mode_stack() == [other]
        assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("inside", [True, False])
def test_an_exception_leaves_the_modes_as_they_were(inside: bool) -> None:
    function, low = Functions(), Dispatches()
    if inside:
        with function, low:
            ambient = Modes(CPU)
        with pytest.raises(ArithmeticError), ambient.restored():
            raise ArithmeticError
        assert not _get_current_function_mode_stack()
        assert not _get_current_dispatch_mode_stack()
        return
    ambient = Modes(CPU)
    with function, low, torch.inference_mode():
        with pytest.raises(ArithmeticError), ambient.restored():
            raise ArithmeticError
        assert _get_current_function_mode_stack() == [function]
        assert _get_current_dispatch_mode_stack() == [low]
        assert torch.is_inference_mode_enabled()


def test_function_transforms_are_suspended_inside() -> None:
    """A plain tensor made inside of ``torch.func.grad`` must not become a part of its level."""
    ambient = Modes(CPU)
    made = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        with ambient.restored():
            made.append(torch.zeros(2) + 1)
        return (x * x).sum()

    found = torch.func.grad(loss)(torch.ones(2))
    assert torch.equal(found, torch.full((2,), 2.0))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(made[0])
