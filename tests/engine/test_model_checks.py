"""Models and optimizers that cannot be distributed, or have changed since."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.engine.gradients.bucket import check_kind
from wingbeat.engine.model_checks import (
    ParameterCheck,
    refuse_conversion,
    refuse_ddp_wrapping,
    refuse_wrapped,
    refuse_wrapper_around,
)
from wingbeat.engine.updates.update import overlapping
from wingbeat.errors import UsageError


def rig() -> tuple[Any, torch.optim.SGD, ParameterCheck]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, ParameterCheck(model, optimizer)


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


def test_parameters_that_move_or_leave_are_allowed() -> None:
    model, optimizer, members = rig()
    model[0], model[1] = model[1], model[0]
    members.check()
    optimizer.param_groups[0]["params"].pop()
    del model[1]
    members.check()


def test_a_new_frozen_parameter_is_allowed() -> None:
    model, _, members = rig()
    model[0].bias = nn.Parameter(torch.zeros(2), requires_grad=False)
    members.check()


def test_a_torchscript_submodule_is_allowed() -> None:
    """Its ``_parameters`` is no dict, and another object at each access."""
    compiled = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model: Any = nn.Sequential(nn.Linear(2, 2), compiled)
    members = ParameterCheck(model, torch.optim.SGD(model.parameters(), lr=0.1))
    members.check()
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UsageError, match=r"parameter '0.weight'"):
        members.check()


def test_a_wrapper_is_refused_by_name_wherever_it_is() -> None:
    inner = nn.DataParallel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="the model is wrapped in DataParallel"):
        refuse_wrapped(inner)
    with pytest.raises(UsageError, match=r"module '1' of the model is wrapped in DataParallel"):
        refuse_wrapped(nn.Sequential(nn.Linear(2, 2), inner))
    refuse_wrapped(nn.Sequential(nn.Linear(2, 2)))


def test_only_a_model_inside_of_the_active_wrapper_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another model's DDP, in whose forward this one is used, is none of its business."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    refuse_wrapper_around(model)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", nn.Sequential(model))
    with pytest.raises(UsageError, match="averaged twice"):
        refuse_wrapper_around(model)
    refuse_wrapper_around(other)


def test_only_reads_by_ddp_are_refused() -> None:
    class Model:
        @property
        def ignored(self) -> Any:
            return refuse_ddp_wrapping()

    with pytest.raises(AttributeError):
        _ = Model().ignored


PARAMS = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]


@pytest.mark.parametrize(
    ("convert", "what"),
    [
        (lambda t: t.half(), "cannot become float16 on cpu"),
        (lambda t: t.double(), "parameters of this model are float32 on cpu, and cannot become"),
        (lambda t: t.to("meta"), "on meta after distribute"),
    ],
)
def test_another_dtype_or_device_is_refused(convert: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        refuse_conversion(PARAMS, convert)


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t.cpu(), lambda t: t.clone(), id])
def test_a_conversion_to_the_same_kind_is_allowed(keep: Any) -> None:
    refuse_conversion(PARAMS, keep)


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 3).double(), torch.ones(3, 2), torch.ones(2, 3, device="meta")],
)
def test_a_converted_parameter_is_named(other: torch.Tensor) -> None:
    check_kind("head.weight", torch.ones(2, 3), torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"'head\.weight' was float32 \(2, 3\) on cpu at"):
        check_kind("head.weight", other, torch.zeros(2, 3))


def test_parameters_side_by_side_do_not_overlap() -> None:
    flat = torch.zeros(10)
    assert overlapping([flat[5:], flat[:5], torch.zeros(3), flat[3:3]]) is None
    assert overlapping([flat[4:], torch.zeros(3), flat[:5]]) == (0, 2)
    # To the last element of a column, and not to the end of its rows.
    table = torch.zeros(4, 3)
    assert overlapping([table[:2, 1], table[2:, 1]]) is None
