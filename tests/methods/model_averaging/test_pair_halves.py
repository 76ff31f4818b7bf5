"""The average of two models: the same bits on both, or the same sum."""

from __future__ import annotations

import pytest
import torch

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.pair_averager import Halves

NUMEL = 1001
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def made(
    seed: int, dtype: torch.dtype, wire: torch.dtype | None = None
) -> tuple[torch.Tensor, Halves]:
    buffer = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return buffer, Halves(buffer, wire, piece_bytes=1024)


def averaged(one: Halves, other: Halves) -> None:
    """As two workers do: the first has asked. Parts may come in any order."""
    for piece in reversed(range(len(one.spans))):
        sent = bytes(one.model(piece))
        assert other.fits(piece, len(sent))
        other.meet(piece, memoryview(sent))
    other.adopt(asked=False)
    for piece in range(len(one.spans)):
        one.take(piece, memoryview(bytes(other.answer(piece))))
    one.adopt(asked=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_have_the_mean_with_the_same_bits(dtype: torch.dtype) -> None:
    (a, one), (b, other) = made(1, dtype), made(2, dtype)
    wanted = (a + b) * 0.5
    averaged(one, other)
    assert torch.equal(a, wanted)
    assert torch.equal(b, wanted)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_a_narrow_wire_keeps_the_sum_and_what_a_step_has_added(wire: torch.dtype) -> None:
    (a, one), (b, other) = made(1, torch.float32, wire), made(2, torch.float32, wire)
    total, wanted = a.double() + b.double(), (a + b) / 2
    averaged(one, other)
    assert torch.allclose(a.double() + b.double(), total, rtol=0, atol=1e-6)
    assert torch.allclose(a, wanted, atol=2e-2)
    assert not torch.equal(a, a.to(wire).float()), "models are not rounded"
    b += 1e-6  # less than the last bit of any parameter on the wire
    for _ in range(50):
        averaged(one, other)
    assert float((a.double() + b.double() - total).mean()) == pytest.approx(1e-6, rel=0.05)


def test_a_narrow_wire_takes_half_the_bytes_and_no_wider_one_is_used() -> None:
    _, narrow = made(1, torch.float32, torch.bfloat16)
    _, same = made(1, torch.bfloat16, torch.bfloat16)
    assert sum(len(narrow.model(p)) for p in range(len(narrow.spans))) == 2 * NUMEL
    assert sum(len(same.model(p)) for p in range(len(same.spans))) == 2 * NUMEL
    with pytest.raises(UsageError, match=r"wire = torch\.int8: allowed are bfloat16, float16"):
        made(1, torch.float32, torch.int8)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_what_is_dropped_leaves_model_and_messages_as_they_were(wire: torch.dtype | None) -> None:
    (a, one), (b, other) = made(1, torch.float32, wire), made(2, torch.float32, wire)
    _, third = made(3, torch.float32, wire)
    before = b.clone()
    other.meet(0, memoryview(bytes(one.model(0))))
    underway = other.answer(0)
    said = bytes(underway)
    other.drop()
    other.meet(0, memoryview(bytes(third.model(0))))
    assert bytes(underway) == said, "it may not have left yet"
    assert torch.equal(b, before)
    averaged(one, other)
    assert torch.allclose(b, (a + b) / 2, atol=2e-2)


def test_only_parts_of_the_right_size_fit() -> None:
    _, halves = made(1, torch.float32)
    assert halves.fits(0, 1024)
    assert halves.fits(3, 4 * (NUMEL - 3 * 256))
    assert not halves.fits(0, 1020)
    assert not halves.fits(3, 1024)
    assert not halves.fits(4, 0)
    assert not Halves(torch.empty(0), None).fits(0, 0)


def test_parameters_that_want_gradients_are_averaged_all_the_same() -> None:
    a, b = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    averaged(Halves(a, None), Halves(b, None))
    assert a.tolist() == b.tolist() == [0.5] * 4
    assert a.requires_grad
