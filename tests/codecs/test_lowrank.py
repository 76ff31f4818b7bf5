"""Low rank: near the best approximation of that rank; the residual has what is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.amounts import examples
from wingbeat.codecs.codec import SketchCodec
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.topk import TopKCodec
from wingbeat.errors import UsageError

SKETCH = SketchCodec(8)

NEAR = 1.1
"""Times the error of the best approximation; measured on 1,800 small matrices: 1.08 at most."""

SHAPES = [(60, 90), (90, 60), (80, 80)]

SPECTRA = {
    "1/sqrt(j)": lambda j: j**-0.5,
    "1/j": lambda j: 1 / j,
    "1/j^2": lambda j: j**-2.0,
    "0.9^j": lambda j: 0.9**j,
    "0.5^j": lambda j: 0.5**j,
    "flat": lambda j: j**0.0,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and wait for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encoded(codec: LowRankCodec, x: Tensor, residual: Tensor | None = None) -> Tensor:
    cols = x.shape[1]
    payload = torch.empty(codec.nbytes(x.numel(), cols), dtype=torch.uint8)
    flat = residual if residual is None else residual.view(-1)
    codec.encode(x.reshape(-1), payload, residual=flat, cols=cols)
    return payload


def decoded(codec: LowRankCodec, payload: Tensor, shape: tuple[int, int]) -> Tensor:
    out = torch.full((shape[0] * shape[1],), torch.nan)
    codec.decode(payload, out, cols=shape[1])
    return out.view(shape)


def there_and_back(codec: LowRankCodec, x: Tensor) -> Tensor:
    assert codec.nbytes(x.numel(), x.shape[1]) < codec.inner.nbytes(x.numel()) / 2
    return decoded(codec, encoded(codec, x), (x.shape[0], x.shape[1]))


def with_spectrum(rows: int, cols: int, singular: Tensor, seed: int) -> Tensor:
    """A matrix with these singular values, in random directions."""
    generator = torch.Generator().manual_seed(seed)
    count = singular.numel()
    left = torch.linalg.qr(torch.randn(rows, count, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(cols, count, generator=generator, dtype=torch.float64)).Q
    return (left * singular.double() @ right.T).float()


# -- how near ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(60))
@given(
    rows=st.integers(30, 120),
    cols=st.integers(30, 120),
    rank=st.integers(1, 6),
    spectrum=st.sampled_from(sorted(SPECTRA)),
    seed=st.integers(0, 10_000),
)
def test_the_error_is_near_that_of_the_best_approximation(
    rows: int, cols: int, rank: int, spectrum: str, seed: int
) -> None:
    codec = LowRankCodec(rank)
    assume(codec.nbytes(rows * cols, cols) < 2 * rows * cols)
    singular = SPECTRA[spectrum](torch.arange(1, min(rows, cols) + 1.0))
    x = with_spectrum(rows, cols, singular, seed)
    best = torch.linalg.svdvals(x.double())[rank:].norm()
    error = (there_and_back(codec, x) - x).double().norm()
    assert error <= NEAR * best + 1e-6 * x.norm()


@settings(deadline=None, max_examples=examples(40))
@given(
    shape=st.sampled_from(SHAPES),
    true_rank=st.integers(1, 5),
    range_=st.sampled_from([1.0, 1e-2, 1e-4]),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 10_000),
)
def test_what_has_that_rank_arrives_exactly(
    shape: tuple[int, int], true_rank: int, range_: float, exponent: int, seed: int
) -> None:
    singular = torch.logspace(0, torch.tensor(range_).log10(), true_rank)
    x = with_spectrum(*shape, singular, seed) * 2.0**exponent
    error = (there_and_back(LowRankCodec(5), x) - x).norm()
    assert error <= 3e-6 * x.norm()


@pytest.mark.parametrize("seed", range(10))
def test_small_singular_values_are_not_lost_beside_large_ones(seed: int) -> None:
    """Their squares would be, in float32: this one's is 1e-8 of the others'."""
    x = with_spectrum(600, 900, torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-4]), seed)
    assert (there_and_back(LowRankCodec(5), x) - x).norm() <= 5e-6


def test_more_iterations_come_nearer() -> None:
    x = with_spectrum(150, 200, 1 / torch.arange(1, 151.0), seed=3)
    errors = [
        float((there_and_back(LowRankCodec(8, iterations=count), x) - x).norm())
        for count in range(3)
    ]
    best = float(torch.linalg.svdvals(x)[8:].norm())
    assert best < errors[2] < errors[1] < errors[0]
    assert errors[2] < 1.01 * best


@pytest.mark.parametrize("shape", [(200, 900), (900, 200)])
def test_sketched_factors_add_little_error(shape: tuple[int, int]) -> None:
    x = with_spectrum(*shape, 1 / torch.arange(1, 201.0), seed=5)
    dense = (there_and_back(LowRankCodec(4), x) - x).norm()
    sketched = (there_and_back(LowRankCodec(4, SKETCH), x) - x).norm()
    # 8 bits have a relative squared error of some 2e-4, and there are two factors.
    assert sketched**2 <= dense**2 + 1e-3 * x.norm() ** 2
    assert encoded(LowRankCodec(4, SKETCH), x).numel() < encoded(LowRankCodec(4), x).numel() / 2.5


# -- extremes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exponent", [-149 + 12, -120, -80, 80, 120, 124])
def test_the_extremes_of_float32_neither_overflow_nor_vanish(
    shape: tuple[int, int], exponent: int
) -> None:
    singular = torch.tensor([2.0, 0.5, 0.25])
    x = (with_spectrum(*shape, singular, seed=1).double() * 2.0**exponent).float()
    error = (there_and_back(LowRankCodec(3), x).double() - x.double()).abs().max()
    rounding = 2.0**-149
    assert error <= 1e-5 * x.double().abs().max() + 2 * rounding


@pytest.mark.parametrize("shape", SHAPES)
def test_neither_factor_of_a_huge_matrix_overflows(shape: tuple[int, int]) -> None:
    out = there_and_back(LowRankCodec(2), torch.full(shape, -3e38))
    torch.testing.assert_close(out, torch.full(shape, -3e38), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inner", [LowRankCodec(3).inner, SKETCH], ids=["dense", "sketch"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(
    shape: tuple[int, int], inner: SketchCodec, bad: float
) -> None:
    clean = torch.randn(1, 1) * torch.randn(shape[0], 1) * torch.randn(1, shape[1])
    x = clean.repeat(3, 5)
    x[7, 11] = bad
    x[9, 0] = -bad
    out = there_and_back(LowRankCodec(3, inner), x)
    assert out.isnan().all(dim=1).nonzero().flatten().tolist() == [7, 9]
    rest = [row for row in range(x.shape[0]) if row not in (7, 9)]
    bound = 1e-5 if inner is not SKETCH else 3e-2
    assert (out[rest] - x[rest]).norm() <= bound * x[rest].norm()


def test_everything_nan_arrives_as_nan() -> None:
    assert there_and_back(LowRankCodec(2), torch.full((40, 50), torch.nan)).isnan().all()


# -- feedback ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [LowRankCodec(3).inner, SKETCH], ids=["dense", "sketch"])
def test_with_feedback_all_is_sent_in_the_end(inner: SketchCodec) -> None:
    """What came and the residual are what went in; and the residual is bounded."""
    codec = LowRankCodec(4, inner)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 160, generator=generator)
    got, residual = torch.zeros(64 * 160), torch.zeros_like(x)
    rounds = 40
    for _ in range(rounds):
        codec.decode(encoded(codec, x, residual), got, add=True, cols=160)
    total = rounds * x
    torch.testing.assert_close(got.view_as(x) + residual, total, rtol=0, atol=1e-3)
    first = (there_and_back(codec, x) - x).norm()
    assert (got.view_as(x) / rounds - x).norm() < first / 3


def test_whether_feedback_is_wanted_is_the_inner_codecs_choice() -> None:
    assert LowRankCodec(4).feedback
    assert LowRankCodec(4, SKETCH).feedback
    assert not LowRankCodec(4, SketchCodec(8, feedback=False)).feedback


# -- the rule, and the interface --------------------------------------------------------------


@settings(deadline=None, max_examples=examples(200))
@given(
    rows=st.integers(1, 3000),
    cols=st.integers(0, 3000),
    rank=st.integers(1, 32),
    inner=st.sampled_from([LowRankCodec(1).inner, SKETCH, SketchCodec(1), TopKCodec(0.01)]),
)
def test_factors_are_used_where_they_are_less_than_half(
    rows: int, cols: int, rank: int, inner: SketchCodec
) -> None:
    numel = rows * max(1, cols)
    whole = inner.nbytes(numel)
    factors = inner.nbytes(rows * rank) + inner.nbytes(cols * rank)
    size = LowRankCodec(rank, inner).nbytes(numel, cols)
    if cols and rank < min(rows, cols) and factors <= whole / 2 - 4:
        assert factors <= size < factors + 4
    elif not cols or factors >= whole / 2:
        assert size == whole
    assert size <= whole


def test_the_second_factor_begins_at_a_multiple_of_four_and_gaps_are_zero() -> None:
    codec, x = LowRankCodec(3, SKETCH), torch.randn(401, 503)
    first, second = SKETCH.nbytes(401 * 3), SKETCH.nbytes(503 * 3)
    assert first % 4 == 3
    payload = torch.full((first + 1 + second,), 255, dtype=torch.uint8)
    codec.encode(x.view(-1), payload, cols=503)
    assert payload[first] == 0


@pytest.mark.parametrize(("numel", "cols"), [(0, 0), (0, 8), (1, 0), (100, 100), (48, 8), (777, 0)])
@pytest.mark.parametrize("inner", [LowRankCodec(1).inner, SKETCH], ids=["dense", "sketch"])
def test_the_inner_codec_does_what_is_no_large_matrix(
    numel: int, cols: int, inner: SketchCodec
) -> None:
    codec, x = LowRankCodec(2, inner), torch.randn(numel)
    residuals = [0.1 * torch.ones(numel) for _ in range(2)]
    payloads = [
        torch.empty(size, dtype=torch.uint8)
        for size in (codec.nbytes(numel, cols), inner.nbytes(numel))
    ]
    codec.encode(x, payloads[0], residual=residuals[0], cols=cols)
    inner.encode(x, payloads[1], residual=residuals[1])
    assert torch.equal(*payloads)
    assert torch.equal(*residuals)
    outs = [torch.ones(numel) for _ in range(2)]
    codec.decode(payloads[0], outs[0], add=True, cols=cols)
    inner.decode(payloads[1], outs[1], add=True)
    assert torch.equal(*outs)


def test_malformed_payloads_are_refused_and_nothing_is_written() -> None:
    codec = LowRankCodec(2, TopKCodec(0.1))
    payload = encoded(codec, torch.randn(300, 200))
    out = torch.ones(300 * 200)
    # The block counts of the second factor's top-k, which follow its 40 values.
    start = codec.nbytes(300 * 200, 200) - TopKCodec(0.1).nbytes(200 * 2)
    payload[start + 4 * 40] += 1
    with pytest.raises(ValueError, match="payload"):
        codec.decode(payload, out, cols=200)
    assert torch.equal(out, torch.ones_like(out))


def test_elements_that_are_not_whole_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="5400 elements are not whole rows of cols=91"):
        LowRankCodec(2).nbytes(60 * 90, 91)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rank=0: allowed are whole numbers from 1"):
        LowRankCodec(0)
    with pytest.raises(UsageError, match=r"iterations=-1: allowed are whole numbers from 0"):
        LowRankCodec(4, iterations=-1)


@pytest.mark.gpu
def test_a_gpu_comes_as_near() -> None:
    x = with_spectrum(120, 300, 1 / torch.arange(1, 121.0), seed=4)
    codec = LowRankCodec(4)
    payload = torch.empty(codec.nbytes(x.numel(), 300), dtype=torch.uint8, device="cuda")
    codec.encode(x.view(-1).cuda(), payload, cols=300)
    out = torch.empty(x.numel(), device="cuda")
    codec.decode(payload, out, cols=300)
    best = torch.linalg.svdvals(x)[4:].norm()
    assert (out.cpu().view_as(x) - x).norm() <= NEAR * best
    for bad in (0.0, torch.nan):
        codec.encode(torch.full_like(out, bad), payload, cols=300)
        codec.decode(payload, out, cols=300)
        assert torch.equal(out.isnan(), torch.full_like(out, bad).isnan())
