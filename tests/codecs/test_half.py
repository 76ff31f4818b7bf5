"""Half precision: to the nearest, what is not finite stays so, and nothing finite overflows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.amounts import examples
from wingbeat.codecs import codec
from wingbeat.codecs.codec import HalfCodec

LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149
HALF = HalfCodec()

values = st.one_of(
    st.lists(st.floats(width=32), max_size=40),
    # Of one size each, so that the largest does not always hide the others.
    st.tuples(st.integers(-149, 126), st.lists(st.floats(-1.0, 1.0, width=32), max_size=40)).map(
        lambda drawn: [value * 2.0 ** drawn[0] for value in drawn[1]]
    ),
).map(lambda drawn: torch.tensor(drawn, dtype=torch.float32))


def encoded(x: Tensor, residual: Tensor | None = None) -> Tensor:
    payload = torch.empty(HALF.nbytes(x.numel()), dtype=torch.uint8)
    HALF.encode(x, payload, residual=residual)
    return payload


def decoded(payload: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), torch.nan)
    HALF.decode(payload, out)
    return out


def there_and_back(x: Tensor) -> Tensor:
    return decoded(encoded(x), x.numel())


def scale_of(payload: Tensor) -> float:
    return float(payload[:4].view(torch.float32))


def test_sizes() -> None:
    assert [HALF.nbytes(n) for n in (0, 1, 7)] == [0, 6, 18]
    assert HALF.nbytes(12, cols=4) == HALF.nbytes(12)
    assert (HALF.feedback, HALF.bytes_per_element) == (False, 2.0)


@settings(deadline=None, max_examples=examples(200))
@given(values)
def test_fp16_is_the_nearest_half_of_the_scaled_values(x: Tensor) -> None:
    before = x.clone()
    payload = encoded(x)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
    if not x.numel():
        return
    scale = scale_of(payload)
    finite = x[x.isfinite()].double().abs()
    peak = float(finite.max()) if finite.numel() else 0.0
    assert math.frexp(scale)[0] == 0.5
    assert 2.0**-126 <= scale <= 2.0**113
    if peak == 0.0:
        assert scale == 1.0
    elif scale > 2.0**-126:
        assert 2.0**14 <= peak / scale < 2.0**15
    else:
        assert peak / scale < 2.0**15
    exact = x.double().numpy() / scale
    if peak < LARGEST / 2:
        halves = payload[4:].view(torch.float16).numpy()
        np.testing.assert_array_equal(halves, exact.astype(np.float32).astype(np.float16))
    out = there_and_back(x)
    assert torch.equal(out.isfinite(), x.isfinite())
    special = ~x.isfinite()
    np.testing.assert_array_equal(out[special].numpy(), x[special].numpy())
    # Half of the last of 11 bits, or of float16's smallest; a whole one where it is limited.
    relative = 2.0**-10 if peak > LARGEST / 2 else 2.0**-11
    error = (out.double() - x.double())[~special].abs()
    assert (error <= torch.clamp(finite * relative, min=scale * 2.0**-25)).all()


@settings(deadline=None, max_examples=examples(60))
@given(values)
def test_a_device_that_is_not_asked_writes_the_same_bytes(x: Tensor) -> None:
    """On a GPU no branch depends on a value; the same way, taken on the CPU."""
    here = encoded(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_may_ask", lambda _: False)
        there = encoded(x)
    assert torch.equal(here, there)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_float_stays_finite_and_infinity_beside_it_infinite(sign: float) -> None:
    x = torch.tensor([LARGEST, LARGEST / 4, torch.inf, -torch.inf, torch.nan, 1.0]) * sign
    out = there_and_back(x)
    assert out[0] == sign * (2.0**128 - 2.0**117)
    assert out[1] == sign * 2.0**126
    assert out[2] == sign * torch.inf
    assert out[3] == -sign * torch.inf
    assert out[4].isnan()
    assert out[5] == 0.0


def test_denormals_keep_their_place() -> None:
    x = torch.tensor([SMALLEST, -3 * SMALLEST, 1000 * SMALLEST, 0.0])
    assert torch.equal(there_and_back(x), x)


def test_without_anything_finite_the_scale_is_one() -> None:
    for x in (torch.zeros(3), torch.tensor([torch.inf, torch.nan])):
        assert scale_of(encoded(x)) == 1.0


def test_negative_zero_keeps_its_sign() -> None:
    assert there_and_back(torch.tensor([-0.0, 2.0])).signbit().tolist() == [True, False]


@pytest.mark.parametrize("numel", [codec.CHUNK - 1, codec.CHUNK, 2 * codec.CHUNK + 3])
def test_chunks_are_seamless(numel: int) -> None:
    """The whole must be what its parts are; the scale is that of all."""
    x = torch.randn(numel)
    x[-1] = 7.0e5  # decides the scale, in the last chunk
    x[codec.CHUNK // 2] = torch.inf
    payload = encoded(x)
    expected = (x / 2.0**5).half().float() * 2.0**5
    assert torch.equal(decoded(payload, numel), expected)
    out = torch.randn(numel)
    expected = out + expected
    HALF.decode(payload, out, add=True)
    assert torch.equal(out, expected)


@settings(deadline=None, max_examples=examples(100))
@given(values)
def test_the_residual_is_what_the_receiver_misses(x: Tensor) -> None:
    residual = x.flip(0) * 0.37
    total = residual + x
    out = decoded(encoded(x, residual), x.numel())
    expected = torch.where(out.isfinite(), total - out, 0.0)
    assert torch.equal(residual, expected)
    assert not residual[~total.isfinite()].any()


@pytest.mark.gpu
def test_a_gpu_writes_the_same_bytes() -> None:
    x = torch.randn(100_003) * torch.logspace(-30, 10, 100_003)
    x[5], x[6] = torch.inf, torch.nan
    for numbers in (x, x.nan_to_num(0.0), torch.tensor([LARGEST, 1.0, torch.inf]), x[:0]):
        payload = torch.empty(HALF.nbytes(numbers.numel()), dtype=torch.uint8, device="cuda")
        HALF.encode(numbers.cuda(), payload)
        out = torch.empty(numbers.numel(), device="cuda")
        HALF.decode(payload, out)
        # Not the bytes of a NaN: which of its many patterns it has is the device's choice.
        np.testing.assert_array_equal(out.cpu().numpy(), there_and_back(numbers).numpy())
