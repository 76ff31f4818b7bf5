"""A model in one buffer: what is put in comes out, whatever the dtypes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.flat import FlatModel
from wingbeat.types import Span


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def test_fragments_are_contiguous() -> None:
    model = FlatModel([params((2, 3), ()), params((4,))])
    assert model.spans == [Span(0, 7), Span(7, 11)]
    assert model.part(0, 2) == Span(0, 11)
    assert model.flat.dtype is torch.float32


def test_write_restores_what_read_copied() -> None:
    first, second = params((2, 3), ()), params((4,), dtype=torch.bfloat16)
    model = FlatModel([first, second])
    before = [p.detach().clone() for p in (*first, *second)]
    model.read()
    with torch.no_grad():
        for param in (*first, *second):
            param.zero_()
    model.write(1, 2)
    assert not any(param.any() for param in first)
    assert torch.equal(second[0], before[2])
    model.write()
    assert all(torch.equal(a, b) for a, b in zip((*first, *second), before, strict=True))


def test_float64_loses_nothing() -> None:
    precise = params((3,), dtype=torch.float64)
    model = FlatModel([precise, params((2,))])
    before = precise[0].detach().clone()
    model.read()
    model.write()
    assert torch.equal(precise[0], before)


def test_read_follows_present_strides_and_data() -> None:
    param = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model = FlatModel([[param]])
    model.read()
    assert model.flat[:6].tolist() == [0, 3, 1, 4, 2, 5]
    param.data = torch.zeros(3, 2)  # as who swaps in a moving average does
    model.add(0, 1)
    assert param.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_buffers_follow_the_fragments_and_changed_shapes_are_refused() -> None:
    kept = {"mean": torch.ones(2)}
    model = FlatModel([params((3,))], lambda: list(kept.values()))
    model.read(0, 1)
    assert model.flat[3:5].tolist() == [0, 0]
    model.read()
    assert model.flat[3:5].tolist() == [1, 1]
    kept["mean"] = torch.full((2,), 5.0)  # another tensor under the same name
    model.write()
    assert kept["mean"].tolist() == [1, 1]
    kept["mean"] = torch.ones(7)
    with pytest.raises(UsageError, match="buffers have other shapes"):
        model.read()


def test_a_number_is_last() -> None:
    model = FlatModel([params((3,))], lambda: [torch.ones(2)])
    model.number.fill_(7)
    model.read()
    assert model.flat.numel() == 6
    assert model.flat[-1] == 7
    assert model.trained == Span(0, 3)


def test_holds_compares_parameters_with_values() -> None:
    first, second = params((2, 3)), params((4,), dtype=torch.bfloat16)
    model = FlatModel([first, second])
    model.read()
    before = model.flat[6:10].clone()
    assert model.holds(before, 1, 2)
    assert model.holds(before + 1e-6, 1, 2), "that is less than a bf16 can say"
    with torch.no_grad():
        second[0][3] += 1
    assert not model.holds(before, 1, 2)


def test_values_are_split_by_parameter() -> None:
    model = FlatModel([params((2, 3), ()), params((4,))])
    parts = model.split(torch.arange(11.0))
    assert [part.shape for part in parts] == [(2, 3), (), (4,)]
    assert parts[1] == 6
    assert parts[2].tolist() == [7, 8, 9, 10]


def test_it_is_narrow_if_a_parameter_has_fewer_bits() -> None:
    assert not FlatModel([params((2,))]).narrow
    assert FlatModel([params((2,)), params((2,), dtype=torch.bfloat16)]).narrow
    assert FlatModel([params((2,)), params((2,), dtype=torch.float64)]).narrow
    assert not FlatModel([params((2,), dtype=torch.float64)]).narrow
