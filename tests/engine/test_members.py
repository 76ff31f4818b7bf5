"""Parameters that were replaced or added since `distribute` are found, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wingbeat.engine.members import Members
from wingbeat.errors import UsageError


def rig() -> tuple[Any, torch.optim.SGD, Members]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Members(model, optimizer)


def test_a_replaced_parameter_is_named_with_its_shape() -> None:
    model, _, members = rig()
    members.check()
    model[1].weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(UsageError, match=r"parameter '1.weight', of shape \(3, 2\), is none that"):
        members.check()


def test_a_replaced_module_is_found() -> None:
    model, _, members = rig()
    model[0] = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"parameter '0.weight'"):
        members.check()


def test_a_parameter_of_the_optimizer_alone_is_found() -> None:
    _, optimizer, members = rig()
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(4)))
    with pytest.raises(UsageError, match=r"parameter 4 of group 0, of shape \(4,\), is new"):
        members.check()


def test_parameters_that_move_or_leave_are_taken() -> None:
    model, optimizer, members = rig()
    model[0], model[1] = model[1], model[0]
    members.check()
    optimizer.param_groups[0]["params"].pop()
    del model[1]
    members.check()


def test_a_new_parameter_that_needs_no_gradient_is_taken() -> None:
    model, _, members = rig()
    model[0].bias = nn.Parameter(torch.zeros(2), requires_grad=False)
    members.check()


def test_a_part_compiled_by_torchscript_is_taken() -> None:
    """Its ``_parameters`` is no dict, and another object at each access."""
    compiled = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model: Any = nn.Sequential(nn.Linear(2, 2), compiled)
    members = Members(model, torch.optim.SGD(model.parameters(), lr=0.1))
    members.check()
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UsageError, match=r"parameter '0.weight'"):
        members.check()
