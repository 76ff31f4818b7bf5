"""The average of two models: equal bits on both, or an equal sum."""

from __future__ import annotations

import pytest
import torch

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.pair_averager import PairBuffer

NUMEL = 1001
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def made(
    seed: int, dtype: torch.dtype, wire: torch.dtype | None = None
) -> tuple[torch.Tensor, PairBuffer]:
    buffer = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return buffer, PairBuffer(buffer, wire, chunk_bytes=1024)


def averaged(one: PairBuffer, other: PairBuffer) -> None:
    """As two workers do: the first has asked. Parts may come in any order."""
    for chunk in reversed(range(len(one.spans))):
        sent = bytes(one.model_chunk(chunk))
        assert other.is_valid_chunk(chunk, len(sent))
        other.average_with(chunk, memoryview(sent))
    other.apply(is_requester=False)
    for chunk in range(len(one.spans)):
        one.receive_average(chunk, memoryview(bytes(other.average_chunk(chunk))))
    one.apply(is_requester=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_average_gives_both_equal_bits(dtype: torch.dtype) -> None:
    (a, one), (b, other) = made(1, dtype), made(2, dtype)
    wanted = (a + b) * 0.5
    averaged(one, other)
    assert torch.equal(a, wanted)
    assert torch.equal(b, wanted)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_narrow_dtype_keeps_the_sum_and_small_steps(wire: torch.dtype) -> None:
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


def test_narrow_dtype_halves_the_bytes_and_no_wider_one_is_used() -> None:
    _, narrow = made(1, torch.float32, torch.bfloat16)
    _, same = made(1, torch.bfloat16, torch.bfloat16)
    assert sum(len(narrow.model_chunk(p)) for p in range(len(narrow.spans))) == 2 * NUMEL
    assert sum(len(same.model_chunk(p)) for p in range(len(same.spans))) == 2 * NUMEL
    with pytest.raises(UsageError, match=r"wire = torch\.int8: allowed are bfloat16, float16"):
        made(1, torch.float32, torch.int8)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_discard_leaves_model_and_unsent_messages_unchanged(wire: torch.dtype | None) -> None:
    (a, one), (b, other) = made(1, torch.float32, wire), made(2, torch.float32, wire)
    _, third = made(3, torch.float32, wire)
    before = b.clone()
    other.average_with(0, memoryview(bytes(one.model_chunk(0))))
    underway = other.average_chunk(0)
    said = bytes(underway)
    other.discard()
    other.average_with(0, memoryview(bytes(third.model_chunk(0))))
    assert bytes(underway) == said, "it may not have left yet"
    assert torch.equal(b, before)
    averaged(one, other)
    assert torch.allclose(b, (a + b) / 2, atol=2e-2)


def test_chunk_of_wrong_size_is_invalid() -> None:
    _, buffer = made(1, torch.float32)
    assert buffer.is_valid_chunk(0, 1024)
    assert buffer.is_valid_chunk(3, 4 * (NUMEL - 3 * 256))
    assert not buffer.is_valid_chunk(0, 1020)
    assert not buffer.is_valid_chunk(3, 1024)
    assert not buffer.is_valid_chunk(4, 0)
    assert not PairBuffer(torch.empty(0), None).is_valid_chunk(0, 0)


def test_parameters_that_require_gradients_are_averaged() -> None:
    a, b = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    averaged(PairBuffer(a, None), PairBuffer(b, None))
    assert a.tolist() == b.tolist() == [0.5] * 4
    assert a.requires_grad
