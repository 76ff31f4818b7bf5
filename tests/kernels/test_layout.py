"""Sizes of payloads: what they are made of, and that raw values take their place in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.kernels import layout


def test_sketch_is_a_table_and_codes() -> None:
    assert layout.sketch_bytes(1_000_000, 8) == 4 * 256 + 1_000_000
    assert layout.sketch_bytes(1_000_001, 4) == 4 * 16 + 500_001
    assert layout.sketch_bytes(1_000_001, 3) == 4 * 8 + 375_001
    assert layout.table_bytes(4) == 64


def test_topk_is_values_counts_and_offsets() -> None:
    assert layout.topk_bytes(65536, 100) == 600 + 4
    assert layout.topk_bytes(65537, 100) == 600 + 8
    assert [layout.blocks_of(n) for n in (0, 1, 65536, 65537)] == [0, 1, 1, 2]


@pytest.mark.parametrize("bits", range(1, 9))
def test_nothing_costs_nothing_and_one_value_is_raw(bits: int) -> None:
    assert layout.sketch_bytes(0, bits) == 0
    assert layout.sketch_bytes(1, bits) == 4
    assert layout.sketch_is_raw(1, bits)
    assert layout.topk_bytes(0, 0) == 0
    assert layout.topk_bytes(1, 1) == 4


@settings(deadline=None, max_examples=examples(200))
@given(n=st.integers(0, 10**10), bits=st.integers(1, 8), share=st.floats(0.0, 1.0))
def test_never_larger_than_raw(n: int, bits: int, share: float) -> None:
    k = layout.count_of(n, share)
    for nbytes, raw in (
        (layout.sketch_bytes(n, bits), layout.sketch_is_raw(n, bits)),
        (layout.topk_bytes(n, k), layout.topk_is_raw(n, k)),
    ):
        assert (nbytes == 4 * n) is raw
        assert nbytes <= 4 * n


def test_a_tie_is_raw() -> None:
    """Values are exact, so they win where both cost the same."""
    assert 4 * 164 == 4 * 2**7 + 164 * 7 / 8 + 0.5
    assert layout.sketch_is_raw(164, 7)
    assert not layout.sketch_is_raw(165, 7)
    assert 4 * 28 == 6 * 18 + 4
    assert layout.topk_is_raw(28, 18)
    assert not layout.topk_is_raw(28, 17)


@pytest.mark.parametrize(
    ("n", "density", "k"),
    [(1000, 0.01, 10), (1000, 0.0, 1), (1, 0.001, 1), (0, 0.5, 0), (7, 1.0, 7), (1000, 0.0149, 15)],
)
def test_count_of(n: int, density: float, k: int) -> None:
    assert layout.count_of(n, density) == k


@pytest.mark.parametrize("density", [-0.1, 1.1, float("nan"), float("inf")])
def test_density_out_of_range(density: float) -> None:
    with pytest.raises(ValueError, match="density"):
        layout.count_of(10, density)


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ValueError, match="bits"):
        layout.sketch_bytes(10, bits)


@pytest.mark.parametrize(("n", "k"), [(10, 0), (10, 11), (0, 1), (10, -1)])
def test_k_out_of_range(n: int, k: int) -> None:
    with pytest.raises(ValueError, match="k is"):
        layout.topk_bytes(n, k)


def test_a_negative_size() -> None:
    with pytest.raises(ValueError, match="n is -1"):
        layout.sketch_bytes(-1, 8)
    with pytest.raises(ValueError, match="n is -1"):
        layout.topk_bytes(-1, 1)
    with pytest.raises(ValueError, match="n is -1"):
        layout.count_of(-1, 0.1)
