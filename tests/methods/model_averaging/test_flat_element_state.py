"""What an optimizer remembers of each element: what is found, and what has no average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.flat import ElementState

MODEL = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(2, 1)})


def state_of(optimizer: torch.optim.Optimizer) -> ElementState:
    return ElementState(optimizer, {p: name for name, p in MODEL.named_parameters()})


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), set()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.AdamW(p), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.0)), {"exp_avg", "exp_avg_sq"}),
        (
            lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
            {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
        ),
        (lambda p: torch.optim.RMSprop(p, centered=True), {"square_avg", "grad_avg"}),
        (lambda p: torch.optim.Adagrad(p), {"sum"}),
        (lambda p: torch.optim.NAdam(p), {"exp_avg", "exp_avg_sq"}),
    ],
)
def test_state_per_element_is_found_before_the_first_step(
    make: Callable[[Any], Any], names: set[str]
) -> None:
    optimizer = make(MODEL.parameters())
    before = [p.detach().clone() for p in MODEL.parameters()]
    random = torch.get_rng_state()
    state = state_of(optimizer)
    for param in MODEL.parameters():
        assert set(state.names(param)) == names
        assert set(state.names(param).values()) <= {torch.float32}
    assert not any("exp_avg" in kept for kept in optimizer.state.values())
    assert all(torch.equal(a, b) for a, b in zip(MODEL.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_state_of_groups_follows_their_settings() -> None:
    groups = [
        {"params": list(MODEL["a"].parameters()), "momentum": 0.9},
        {"params": [MODEL["b"].weight]},
    ]
    state = state_of(torch.optim.SGD(groups, lr=0.1))
    assert set(state.names(MODEL["a"].bias)) == {"momentum_buffer"}
    assert not state.names(MODEL["b"].weight)
    assert not state.names(MODEL["b"].bias), "it is another optimizer's"


def test_a_step_counter_of_a_scalar_parameter_is_not_per_element() -> None:
    scalar = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.AdamW([scalar])
    state = ElementState(optimizer, {scalar: "scalar"})
    scalar.grad = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.state[scalar]["step"].shape == scalar.shape
    assert set(state.values(scalar)) == {"exp_avg", "exp_avg_sq"}


class Keeps(torch.optim.SGD):
    """Has ``kept`` in its state after a step."""

    def __init__(self, params: Any, kept: Callable[[torch.Tensor], Any]) -> None:
        self.kept = kept
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["kept"] = self.kept(param)


class Outside(torch.optim.SGD):
    """Wraps another optimizer, which does the work."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.inner = torch.optim.AdamW(params)
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Loose(torch.optim.SGD):
    """Remembers what belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["loose"] = {"norm": 1.0}
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot be averaged: it keeps lists of earlier"),
        (
            lambda p: torch.optim.Adafactor(p),
            r"Adafactor cannot .* 'row_var' is of shape \(3, 1\) where the parameter's is \(3, 5\)",
        ),
        (lambda p: Keeps(p, lambda w: w.to(torch.uint8)), "'kept' is uint8"),
        (lambda p: Keeps(p, lambda w: w.to(torch.complex64)), "'kept' is complex64"),
        (lambda p: Keeps(p, lambda w: w.detach().flatten().repeat(2)), "'kept' is of shape"),
        (lambda p: Keeps(p, lambda w: [w.detach()]), "'kept' is a list"),
        (lambda p: Keeps(p, lambda w: nn.Parameter(w.clone())), "'kept' is a Parameter"),
        (Outside, "does not update the parameters of its param groups by itself"),
        (Loose, "has state that belongs to no parameter"),
        (lambda p: torch.optim.SparseAdam(list(p)), "cannot be tried on a small tensor: Runtime"),
    ],
)
def test_state_that_cannot_be_averaged_is_refused_in_one_line(
    make: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        state_of(make(MODEL.parameters()))
    assert "\n" not in str(refused.value)
    assert "leave average_state out" in str(refused.value)


def test_numbers_and_strings_are_not_averaged() -> None:
    optimizer = Keeps(MODEL.parameters(), lambda _: (0.9, "name", None))
    assert not state_of(optimizer).names(MODEL["a"].weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.update(exp_avg=kept["exp_avg"].to(torch.uint8)), "'exp_avg' .* uint8"),
        (lambda kept: kept.update(exp_avg=torch.ones(2)), r"'exp_avg' .* of shape \(2,\)"),
        (lambda kept: kept.update(more=torch.ones(3, 4)), "'more' .* is present, and was absent"),
    ],
)
def test_state_of_another_kind_than_was_tried_is_refused_when_it_appears(
    change: Callable[[Any], None], said: str
) -> None:
    optimizer = torch.optim.AdamW(MODEL.parameters())
    state = state_of(optimizer)
    weight = MODEL["a"].weight
    for param in MODEL.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert set(state.values(weight)) == {"exp_avg", "exp_avg_sq"}
    change(optimizer.state[weight])
    with pytest.raises(UsageError, match=said) as refused:
        state.values(weight)
    assert "'a.weight'" in str(refused.value)
    with pytest.raises(UsageError, match=said):
        state_of(optimizer)
