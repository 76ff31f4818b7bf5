"""Conversion and addition of 16-bit payloads, compared with torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wingbeat import _native
from wingbeat.methods.parameter_server.aggregator import _BLOCK as BLOCK
from wingbeat.methods.parameter_server.aggregator import (
    ITEMSIZE,
    Array,
    add_payloads,
    narrow,
    sum_dtype,
    widen,
)

TORCH = {name: getattr(torch, name) for name in ITEMSIZE}


@pytest.fixture(autouse=True, params=[False, True], ids=["fastest", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with all instruction sets there are."""
    _native.prefer_portable(request.param)
    yield
    _native.prefer_portable(False)


every = pytest.mark.parametrize("dtype", ITEMSIZE)

SPECIAL = [
    0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 1.2e-38,
    3.4e38, -3.4e38, 3.3895e38, 3.3953e38, 65504.0, 65519.9, 65520.0, 6e-8, 2.98e-8, 3e-8,
    1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8 + 2**-20,
]  # fmt: skip
"""Zeros, what is not finite, denormals, ends of ranges, and ties of bfloat16 and float16."""


def payload_of(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


def as_torch(found: Array, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(found.tobytes()), dtype=TORCH[dtype])


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit by bit, but that one NaN is as good as another."""
    assert found.dtype == wanted.dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    there = ~wanted.isnan()
    assert torch.equal(found.view(bits)[there], wanted.view(bits)[there])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widen_of_all_16_bit_values_equals_torch(dtype: str) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(TORCH[dtype])
    wide = widen(payload_of(values), dtype)
    assert wide.dtype == np.float32
    assert_same(as_torch(wide, "float32"), values.float())
    assert_same(as_torch(narrow(wide, dtype), dtype), values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_narrow_rounds_like_torch(dtype: str, bits: list[int]) -> None:
    ties = [b & 0xFFFF0000 | 0x8000 for b in bits] + [b & 0xFFFFE000 | 0x1000 for b in bits]
    total = np.array([*bits, *ties], dtype=np.uint32).view(np.float32)
    total = np.concatenate([total, np.array(SPECIAL, dtype=np.float32)])
    wanted = torch.from_numpy(total.copy()).to(TORCH[dtype])
    assert_same(as_torch(narrow(total, dtype), dtype), wanted)


@every
def test_add_payloads_equals_torch_without_warnings(dtype: str) -> None:
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(TORCH[dtype])
    others = values.flip(0).clone()
    total = widen(payload_of(values), dtype).copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # overflow and inf - inf are for the workers to see
        add_payloads(total, (payload_of(others),), dtype)
        narrow(total.copy(), dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    assert total.dtype == sum_dtype(dtype)
    assert_same(as_torch(total, str(wide)[6:]), values.to(wide) + others.to(wide))


@every
def test_widen_and_narrow_of_same_dtype_do_not_copy(dtype: str) -> None:
    values = torch.arange(8.0).to(TORCH[dtype])
    wide = widen(payload_of(values), dtype)
    own = sum_dtype(dtype).itemsize == ITEMSIZE[dtype]
    assert np.shares_memory(wide, values.view(torch.uint8).numpy()) == own
    assert (narrow(wide, dtype) is wide) == own
    assert narrow(wide, dtype).nbytes == 8 * ITEMSIZE[dtype]


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_add_payloads_of_several_equals_one_at_a_time(dtype: str, numel: int) -> None:
    rng = np.random.default_rng(numel)
    drawn = [
        rng.standard_normal(numel).astype("f4") * 10.0 ** rng.integers(-4, 5) for _ in range(4)
    ]
    payloads = [
        memoryview(narrow(each.astype(sum_dtype(dtype)), dtype)).cast("B") for each in drawn
    ]
    one = np.full(numel, 7.0, sum_dtype(dtype))
    for number, payload in enumerate(payloads):
        add_payloads(one, (payload,), dtype, begin=number == 0)
    wanted = widen(payloads[0], dtype).copy()
    for payload in payloads[1:]:
        wanted = wanted + widen(payload, dtype)
    assert one.tobytes() == wanted.tobytes()
    for split in range(1, 5):
        together = np.full(numel, 7.0, sum_dtype(dtype))
        add_payloads(together, payloads[:split], dtype, begin=True)
        if split < 4:
            add_payloads(together, payloads[split:], dtype)
        assert together.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_writes_to_out(dtype: str) -> None:
    wide = np.random.default_rng(0).standard_normal(2 * BLOCK + 3).astype("f4")
    fresh = narrow(wide, dtype)
    out = np.zeros_like(fresh)
    assert narrow(wide, dtype, out) is out
    assert out.tobytes() == fresh.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widen_of_unaligned_payload_works(dtype: str) -> None:
    values = torch.arange(100.0).to(TORCH[dtype])
    moved = memoryview(b"?" + bytes(payload_of(values)))[1:]
    assert widen(moved, dtype).tolist() == values.tolist()


@every
def test_add_and_narrow_of_wrong_size_or_dtype_raise(dtype: str) -> None:
    total, payload = np.zeros(4, sum_dtype(dtype)), memoryview(bytes(3 * ITEMSIZE[dtype]))
    with pytest.raises(ValueError, match="payload of 3 elements; the sum has 4"):
        add_payloads(total, (payload,), dtype)
    if dtype in ("float16", "bfloat16"):
        half = narrow(total, dtype)
        with pytest.raises(ValueError, match="out has 3 elements; the sum has 4"):
            narrow(total, dtype, half[:3])
        with pytest.raises(ValueError, match="must be flat"):
            narrow(total, dtype, np.zeros(4, np.int8))
        with pytest.raises(ValueError, match="must be flat float32"):
            narrow(total.astype("f8"), dtype)
        with pytest.raises(ValueError, match="must be flat float32"):
            add_payloads(np.zeros(8, "f4")[::2], (memoryview(bytes(8)),), dtype)
