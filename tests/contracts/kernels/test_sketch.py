"""Sketches: what arrives, what is left, and what never happens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.amounts import examples
from wingbeat.kernels import layout

from . import data
from .rig import Kernels, relative_error, same_bits, same_values

BITS = range(1, 9)
WAYS = [(split, level) for split in ("error", "count") for level in ("mean", "ends")]
SIZES = (0, 1, 2, 341, 342, 1001, 65535, 65536, 65537)


def ids(way: tuple[str, str]) -> str:
    return "-".join(way)


def round_trip(kernels: Kernels, x: Tensor, bits: int, split: str, level: str) -> Tensor:
    payload = kernels.sketch(x, bits, split=split, level=level)
    return kernels.sketch_decode(payload, x.numel(), bits)


def assert_as_good(ours: Tensor, theirs: Tensor, x: Tensor, split: str) -> None:
    """Equal where integers decide; else the error within 1%. Broken values in the same places."""
    assert torch.equal(ours.isnan(), theirs.isnan())
    if split == "count":
        scale = float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12 * scale, equal_nan=True)
    else:
        want = relative_error(theirs, x)
        assert math.isclose(relative_error(ours, x), want, rel_tol=0.01, abs_tol=1e-12)


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("name", data.ALL)
def test_as_the_reference(
    fast: Kernels, reference: Kernels, name: str, way: tuple[str, str]
) -> None:
    x = data.values(name, 1001)
    for bits in BITS:
        theirs = round_trip(reference, x, bits, *way)
        assert_as_good(round_trip(fast, x, bits, *way), theirs, x, way[0])


@pytest.mark.parametrize("n", SIZES)
def test_sizes(fast: Kernels, reference: Kernels, n: int) -> None:
    x = data.values("student", n)
    for bits in (1, 3, 8):
        for split in ("error", "count"):
            theirs = round_trip(reference, x, bits, split, "mean")
            assert_as_good(round_trip(fast, x, bits, split, "mean"), theirs, x, split)


@pytest.mark.parametrize("bits", BITS)
def test_lengths_around_whole_bytes(kernels: Kernels, reference: Kernels, bits: int) -> None:
    """Every alignment of the last code, and what pads it is zero."""
    for n in range(600, 617):
        x = data.values("laplace", n)
        payload = kernels.sketch(x, bits, split="count")
        decoded = kernels.sketch_decode(payload, n, bits)
        assert same_bits(decoded, reference.sketch_decode(payload, n, bits))
        used = (n * bits - 1) % 8 + 1
        assert int(payload[-1]) >> used == 0


@pytest.mark.parametrize("bits", BITS)
def test_raw_where_it_is_smaller(kernels: Kernels, bits: int) -> None:
    """The last raw size keeps every bit, broken values included; the next one is a sketch."""
    n = max(n for n in range(400) if layout.sketch_is_raw(n, bits))
    x = torch.cat([data.values("nan", n), data.values("infinite", n)])[-n:]
    residual = torch.zeros(n)
    payload = kernels.sketch(x, bits, residual=residual)
    assert payload.numel() == 4 * n
    assert same_bits(kernels.sketch_decode(payload, n, bits), x)
    assert same_bits(residual, torch.zeros(n))
    x = data.values("normal", n + 1)
    assert kernels.sketch(x, bits).numel() < 4 * (n + 1)
    assert relative_error(round_trip(kernels, x, bits, "error", "mean"), x) < 1.0


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("normal", {8: 1.2e-4, 4: 0.013, 2: 0.13}),
        ("laplace", {8: 2.0e-4, 4: 0.019, 2: 0.19}),
        ("student", {8: 1.0e-3, 4: 0.10, 2: 0.85}),
    ],
)
def test_error_is_small(kernels: Kernels, name: str, limits: dict[int, float]) -> None:
    """Near the least that so many levels allow; the paper's equal counts are far from it."""
    x = data.values(name, 65536)
    for bits, limit in limits.items():
        ours = relative_error(round_trip(kernels, x, bits, "error", "mean"), x)
        paper = relative_error(round_trip(kernels, x, bits, "count", "ends"), x)
        assert ours < limit
        assert ours < paper


@pytest.mark.parametrize("bits", [3, 5, 8])
@pytest.mark.parametrize("level", ["mean", "ends"])
def test_few_values_have_their_own_codes(kernels: Kernels, bits: int, level: str) -> None:
    """Each arrives as the middle of its bin: half of 2**-7 above."""
    x = data.values("few_values", 1001)
    assert same_values(
        round_trip(kernels, x, bits, "error", level), x.double().mul(1 + 2**-8).float()
    )


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("name", ["all_zero", "mostly_zero", "some_zero", "everything"])
def test_zeros_arrive_as_zeros(kernels: Kernels, name: str, way: tuple[str, str]) -> None:
    x = data.values(name, 1001)
    for bits in BITS:
        if (x == 0).sum() << bits < x.numel():
            continue
        decoded = round_trip(kernels, x, bits, *way)
        assert bool((decoded[x == 0] == 0.0).all())
        if bits > 2:
            others = x.isfinite() & (x != 0)
            assert bool((decoded[others] != 0.0).all())


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("name", data.BROKEN)
def test_broken_values_harm_only_themselves(
    kernels: Kernels, name: str, way: tuple[str, str]
) -> None:
    x = data.values(name, 1001)
    finite = x.isfinite()
    healthy = torch.where(finite, x, 0.0)
    for bits in BITS:
        residual = torch.zeros(1001)
        payload = kernels.sketch(x, bits, residual=residual, split=way[0], level=way[1])
        decoded = kernels.sketch_decode(payload, 1001, bits)
        assert torch.equal(decoded.isnan(), ~finite)
        assert bool(decoded[finite].isfinite().all())
        assert bool(residual.isfinite().all())
        assert bool((residual[~finite] == 0.0).all())
    if finite.any():
        without = relative_error(round_trip(kernels, healthy, 8, *way), healthy)
        assert relative_error(decoded, x) <= 1.1 * without


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("name", data.ALL)
def test_residual_is_what_did_not_arrive(kernels: Kernels, name: str, way: tuple[str, str]) -> None:
    x, residual = data.values(name, 1001), 0.1 * data.values("student", 1001, seed=2)
    for bits in (1, 4, 8):
        acc = x + residual
        payload = kernels.sketch(x, bits, residual=residual, split=way[0], level=way[1])
        left = acc - kernels.sketch_decode(payload, 1001, bits)
        assert same_values(residual, torch.where(left.isfinite(), left, 0.0))


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_nothing_is_lost_over_many_rounds(kernels: Kernels, bits: int) -> None:
    n, rounds = 1001, 20
    residual = torch.zeros(n)
    sent, wanted = torch.zeros(2, n, dtype=torch.float64)
    for seed in range(rounds):
        x = data.values("student", n, seed=seed + 10)
        sent += kernels.sketch_decode(kernels.sketch(x, bits, residual=residual), n, bits)
        wanted += x
    assert float(residual.abs().max()) > 0.0
    # Two roundings a round, of numbers no larger than the largest that ever was.
    allowed = 2 * rounds * 2**-24 * float(wanted.abs().max() + residual.abs().max())
    assert float((sent + residual - wanted).abs().max()) <= allowed


def test_a_broken_value_is_gone_the_round_after(kernels: Kernels) -> None:
    n, residual = 1001, torch.zeros(1001)
    kernels.sketch(data.values("everything", n), 8, residual=residual)
    payload = kernels.sketch(data.values("normal", n), 8, residual=residual)
    assert bool(kernels.sketch_decode(payload, n, 8).isfinite().all())


def test_a_residual_cannot_overflow(kernels: Kernels) -> None:
    """The levels of opposite extremes that share a code are further off than a float reaches."""
    x = torch.full((1001,), 3.4e38)
    x[::100] = -3.4e38
    residual = torch.zeros(1001)
    kernels.sketch(torch.where(torch.arange(1001) == 7, torch.nan, x), 1, residual=residual)
    assert bool(residual.isfinite().all())


@pytest.mark.parametrize("n", [5, 1001])
def test_adding(kernels: Kernels, n: int) -> None:
    x, onto = data.values("normal", n), data.values("normal", n, seed=3)
    payload = kernels.sketch(x, 4)
    decoded = kernels.sketch_decode(payload, n, 4)
    assert same_bits(kernels.sketch_decode(payload, n, 4, onto=onto), onto + decoded)


@settings(deadline=None, max_examples=examples(60))
@given(bits=st.integers(1, 8), n=st.integers(0, 700), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_are_a_sketch(
    kernels: Kernels, reference: Kernels, bits: int, n: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    nbytes = layout.sketch_bytes(n, bits)
    payload = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)
    ours = kernels.sketch_decode(payload, n, bits)
    assert same_values(ours, reference.sketch_decode(payload, n, bits))


@settings(deadline=None, max_examples=examples(60))
@given(
    pool=st.lists(st.floats(width=32), min_size=1, max_size=40),
    n=st.integers(345, 400),
    bits=st.integers(1, 8),
    way=st.sampled_from(WAYS),
)
def test_any_values(
    kernels: Kernels, reference: Kernels, pool: list[float], n: int, bits: int, way: tuple[str, str]
) -> None:
    """Whatever there is, in whatever proportion, arrives near where it was and within its range."""
    pick = (torch.rand(n, generator=torch.Generator().manual_seed(n)) ** 2 * len(pool)).long()
    x = torch.tensor(pool)[pick]
    decoded = round_trip(kernels, x, bits, *way)
    assert_as_good(decoded, round_trip(reference, x, bits, *way), x, way[0])
    finite = x.isfinite()
    assert torch.equal(decoded.isnan(), ~finite)
    if finite.any():
        # A bin's ends lie up to 2**-7 beyond its values; zero's up to 2**-133.
        reach = x[finite].abs().max().double() * (1 + 2**-7) + 2.0**-133
        assert bool((decoded[finite].double().abs() <= reach).all())
