"""Parameters keep their dtype and device once they are distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wingbeat.engine.gradients.convert import check_kind, overlapping, refuse_conversion
from wingbeat.errors import UsageError

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
def test_what_leaves_the_kind_alone_is_not(keep: Any) -> None:
    refuse_conversion(PARAMS, keep)


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 3).double(), torch.ones(3, 2), torch.ones(2, 3, device="meta")],
)
def test_a_parameter_that_was_converted_all_the_same_is_named(other: torch.Tensor) -> None:
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
