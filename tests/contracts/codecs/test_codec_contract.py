"""What every codec keeps to, alone and in a `Coding`; a new one is a line in `CODECS`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.amounts import examples
from wingbeat.codecs import Codec, Coding
from wingbeat.codecs.codec import Bf16Codec, Dense, HalfCodec, SketchCodec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.topk import TopKCodec
from wingbeat.types import Span

CODECS: dict[str, Callable[[], Codec]] = {
    "dense": Dense,
    "fp16": HalfCodec,
    "bf16": Bf16Codec,
    "sketch": SketchCodec,
    "sketch of 3 bits": lambda: SketchCodec(3),
    "sketch of 1 bit": lambda: SketchCodec(1),
    "sketch as in the paper": lambda: SketchCodec(6, split="count", level="ends"),
    "top-k": lambda: TopKCodec(0.02),
    "top-k with momentum": lambda: TopKCodec(0.1, momentum=0.9),
    "top-k, sketched": lambda: TopKCodec(0.05, bits=2),
    "top-k of all": lambda: TopKCodec(1.0),
    "low rank, dense": lambda: LowRankCodec(3),
    "low rank, fp16": lambda: LowRankCodec(3, HalfCodec()),
    "low rank, sketch": lambda: LowRankCodec(3, SketchCodec(8)),
    "low rank, top-k": lambda: LowRankCodec(3, TopKCodec(0.1)),
}

COLS = 64
"""Columns, where the elements are the rows of a matrix."""

SHAPES = [(0, 0), (1, 0), (5, 0), (5003, 0), (0, COLS), (COLS, COLS), (150 * COLS, COLS)]
"""Elements and columns: nothing, as little as there is, and enough for every codec to compress."""

LARGE = SHAPES[3], SHAPES[6]

LARGEST = torch.finfo(torch.float32).max
TINY = 2.0**-132
"""What may be lost of a value that is a denormal number."""

Shape = tuple[int, int]

everywhere = pytest.mark.parametrize("shape", SHAPES, ids=str)
where_it_compresses = pytest.mark.parametrize("shape", LARGE, ids=str)


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]()


def values(shape: Shape, seed: int = 0, scale: float = 1e-3) -> Tensor:
    """Few large values among many small ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape[0], generator=generator) ** 3 * scale


def encoded(codec: Codec, x: Tensor, shape: Shape, residual: Tensor | None = None) -> Tensor:
    payload = torch.full((codec.nbytes(*shape),), 170, dtype=torch.uint8)
    codec.encode(x, payload, residual=residual, cols=shape[1])
    return payload


def decoded(codec: Codec, payload: Tensor, shape: Shape) -> Tensor:
    out = torch.full((shape[0],), torch.nan)
    codec.decode(payload, out, cols=shape[1])
    return out


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def test_equal_settings_are_equal_codecs() -> None:
    for make in CODECS.values():
        assert make() == make()
        assert hash(make()) == hash(make())


@everywhere
def test_nothing_is_changed_but_the_payload(codec: Codec, shape: Shape) -> None:
    x = values(shape)
    before, state = x.clone(), torch.get_rng_state()
    payload = encoded(codec, x, shape)
    sent = payload.clone()
    decoded(codec, payload, shape)
    assert torch.equal(bits(x), bits(before))
    assert torch.equal(payload, sent)
    assert torch.equal(torch.get_rng_state(), state)


@everywhere
def test_equal_values_give_equal_bytes_and_every_byte_is_written(
    codec: Codec, shape: Shape
) -> None:
    """What was in memory before does not travel."""
    x = values(shape)
    first, second = (
        torch.full((codec.nbytes(*shape),), filled, dtype=torch.uint8) for filled in (0, 255)
    )
    codec.encode(x, first, cols=shape[1])
    codec.encode(x.clone(), second, residual=torch.zeros_like(x), cols=shape[1])
    assert torch.equal(first, second)


def test_nothing_takes_no_bytes(codec: Codec) -> None:
    assert codec.nbytes(0) == codec.nbytes(0, COLS) == 0


@where_it_compresses
def test_no_payload_is_larger_than_the_values(codec: Codec, shape: Shape) -> None:
    assert codec.nbytes(*shape) <= 4 * shape[0]


@everywhere
@pytest.mark.parametrize("more", [-1, 1, 4])
def test_a_payload_of_another_size_is_refused_and_nothing_is_written(
    codec: Codec, shape: Shape, more: int
) -> None:
    size = codec.nbytes(*shape) + more
    if size < 0:
        return
    x, residual, out = values(shape), values(shape, seed=1), torch.ones(shape[0])
    payload = torch.full((size,), 170, dtype=torch.uint8)
    with pytest.raises(ValueError, match="payload"):
        codec.encode(x, payload, residual=residual, cols=shape[1])
    with pytest.raises(ValueError, match="payload"):
        codec.decode(payload, out, cols=shape[1])
    assert (payload == 170).all()
    assert torch.equal(residual, values(shape, seed=1))
    assert (out == 1.0).all()


@everywhere
def test_zeros_stay_zeros(codec: Codec, shape: Shape) -> None:
    residual = torch.zeros(shape[0])
    payload = encoded(codec, torch.zeros(shape[0]), shape, residual)
    assert not decoded(codec, payload, shape).any()
    assert not residual.any()


@where_it_compresses
@pytest.mark.parametrize("scale", [TINY / 4, 1e-30, 1.0, 1e30, LARGEST])
def test_what_is_finite_arrives_finite_and_is_no_larger(
    codec: Codec, shape: Shape, scale: float
) -> None:
    """Denormal numbers, and the largest there are; nothing gets the wrong size."""
    x = values(shape).clamp(-1e-3, 1e-3) * 1e3 * scale
    out = decoded(codec, encoded(codec, x, shape), shape)
    assert out.isfinite().all()
    assert out.abs().max() <= 1.01 * x.double().abs().max() + TINY
    error = (out.double() - x.double()).norm()
    assert error <= 1.01 * x.double().norm() + shape[0] ** 0.5 * TINY


@where_it_compresses
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_arrives_so_and_harms_no_other_row(
    codec: Codec, shape: Shape, bad: float
) -> None:
    x = values(shape)
    places = [7, shape[0] - 3]
    x[places[0]] = bad
    x[places[1]] = -bad
    residual = torch.zeros_like(x)
    out = decoded(codec, encoded(codec, x, shape, residual), shape)
    assert not out[places].isfinite().any()
    row = max(1, shape[1])
    broken = (~out.isfinite()).view(-1, row).any(dim=1).nonzero().flatten().tolist()
    assert broken == [place // row for place in places]
    assert residual.isfinite().all()
    assert not residual[places].any()
    again = decoded(codec, encoded(codec, values(shape), shape, residual), shape)
    assert again.isfinite().all()


@everywhere
def test_the_residual_is_what_the_receiver_misses(codec: Codec, shape: Shape) -> None:
    x, residual = values(shape), values(shape, seed=1)
    total = x + residual
    out = decoded(codec, encoded(codec, x, shape, residual), shape)
    scale = float(total.abs().amax()) if shape[0] else 0.0
    torch.testing.assert_close(out + residual, total, rtol=0, atol=2e-6 * scale)
    assert torch.equal(x, values(shape))


@where_it_compresses
def test_with_a_residual_nothing_is_lost_over_many_rounds(codec: Codec, shape: Shape) -> None:
    put_in, got = torch.zeros(2, shape[0], dtype=torch.float64)
    residual = torch.zeros(shape[0])
    for round_ in range(8):
        x = values(shape, seed=round_, scale=1.0)
        put_in += x
        got += decoded(codec, encoded(codec, x, shape, residual), shape)
    lost = (put_in - got - residual).abs().max()
    assert lost <= 1e-5 * put_in.abs().max()


@everywhere
def test_decoding_adds_to_what_is_there(codec: Codec, shape: Shape) -> None:
    payload = encoded(codec, values(shape, scale=1.0), shape)
    base = values(shape, seed=2, scale=1.0)
    want, out = base + decoded(codec, payload, shape), base.clone()
    codec.decode(payload, out, add=True, cols=shape[1])
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=examples(60))
@given(
    name=st.sampled_from(sorted(CODECS)),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**16),
    share=st.sampled_from([0.0, 0.01, 1.0]),
    add=st.booleans(),
)
def test_any_bytes_are_read_or_refused_and_then_nothing_is_written(
    name: str, shape: Shape, seed: int, share: float, add: bool
) -> None:
    """A payload of which a share is random; nothing beyond the output is written either."""
    codec = CODECS[name]()
    payload = encoded(codec, values(shape), shape)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, payload.shape, generator=generator, dtype=torch.uint8)
    hit = torch.rand(payload.shape, generator=generator) < share
    payload = torch.where(hit, noise, payload)
    guarded = torch.full((shape[0] + 2,), 3.0)
    refused = False
    try:
        codec.decode(payload, guarded[1:-1], add=add, cols=shape[1])
    except ValueError:
        refused = True
    assert guarded[0] == guarded[-1] == 3.0
    assert not refused or (guarded == 3.0).all()


def test_a_malformed_payload_is_refused_in_a_line_that_says_payload() -> None:
    """Of the codecs here only top-k can get one; its counts are all ones in every bit."""
    codec, shape = TopKCodec(0.02), SHAPES[3]
    payload = torch.full((codec.nbytes(*shape),), 255, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^[^\n]*payload[^\n]*$"):
        decoded(codec, payload, shape)


@where_it_compresses
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_widened_before_and_rounded_once_after(
    codec: Codec, shape: Shape, dtype: torch.dtype
) -> None:
    before = 10  # elements of another region
    span = Span(before, before + shape[0])
    coding = Coding([Region(Span(0, before), Dense()), Region(span, codec, shape[1])])
    buffer = torch.cat([torch.ones(before), values(shape, scale=1.0)]).to(dtype)
    payload = torch.empty(coding.room(span), dtype=torch.uint8)
    coding.encode(buffer, span, payload)
    size = codec.nbytes(*shape)
    assert torch.equal(payload[:size], encoded(codec, buffer[before:].float(), shape))
    wide = decoded(codec, payload[:size], shape)
    for add in (False, True):
        out = torch.full_like(buffer, 2.0)
        coding.decode(payload, out, span, add=add)
        want = (wide + 2.0 if add else wide).to(dtype)
        torch.testing.assert_close(out[before:], want, rtol=1e-5, atol=1e-5)
        assert (out[:before] == 2.0).all()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_empty_payload_may_be_misaligned(kind: str) -> None:
    """A part without elements may begin anywhere in a message."""
    codec, out, payload = CODECS[kind](), torch.empty(0), torch.zeros(3, dtype=torch.uint8)[1:1]
    codec.encode(torch.empty(0), payload, residual=torch.empty(0))
    for add in (False, True):
        codec.decode(payload, out, add=add)
