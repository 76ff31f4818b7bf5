from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.planning.bucket_size import Sample, size_at, suggest
from wingbeat.types import Tuning

MB = 2**20


def tuning(search: str, **kwargs: int) -> Tuning:
    return Tuning(search=search, **{"low_bytes": MB, "high_bytes": 100 * MB, **kwargs})


def walk(rule: Tuning, start: int = 25 * MB) -> list[int]:
    """All the sizes that a search tries when every one is equally fast."""
    samples = [Sample(start, 1.0)]
    while len(samples) < rule.trials:
        samples.append(Sample(suggest(rule, samples)[0], 1.0))
    return [sample.bucket_bytes for sample in samples]


def test_grid_is_even_in_logarithm_and_start_replaces_nearest_point() -> None:
    start, *tried = walk(tuning("grid", trials=10))
    assert start == 25 * MB
    exponents = [math.log(size / MB, 100) * 9 for size in tried]
    assert exponents == pytest.approx([0, 1, 2, 3, 4, 5, 7, 8, 9], abs=1e-5)


@pytest.mark.parametrize(
    ("start", "expected"), [(MB, [10 * MB, 100 * MB]), (400 * MB, [MB, 10 * MB])]
)
def test_grid_start_at_or_beyond_end_replaces_that_end(start, expected) -> None:
    assert walk(tuning("grid", trials=3), start)[1:] == expected


def test_random_search_spreads_over_logarithm_of_range() -> None:
    tried = walk(tuning("random", trials=2001))[1:]
    below = sum(size < 10 * MB for size in tried) / len(tried)
    assert below == pytest.approx(0.5, abs=0.05)
    assert min(tried) < 1.1 * MB
    assert max(tried) > 90 * MB


@pytest.mark.parametrize("search", ["random", "grid", "bo"])
def test_search_same_samples_give_same_answer(search: str) -> None:
    rule = tuning(search, trials=5)
    assert walk(rule) == walk(rule)
    assert len(set(walk(rule))) == 5


def test_search_suggests_ends_and_not_sizes_next_to_them() -> None:
    tried = walk(tuning("bo", trials=10))
    assert {MB, 100 * MB} <= set(tried)
    assert not [s for s in tried if MB < s < 1.02 * MB or 98 * MB < s < 100 * MB]


@given(
    search=st.sampled_from(["random", "grid", "bo"]),
    low=st.integers(1, 2**32),
    width=st.integers(0, 2**32),
    start=st.integers(1, 2**32),
    trials=st.integers(1, 4),
)
def test_search_suggestions_are_within_range(search, low, width, start, trials) -> None:
    rule = tuning(search, low_bytes=low, high_bytes=low + width, trials=trials)
    for size in walk(rule, start)[1:]:
        assert isinstance(size, int)
        assert low <= size <= low + width


@given(st.integers(1, 2**40), st.integers(0, 2**40), st.floats(0, 1))
def test_size_at_is_within_range(low: int, width: int, share: float) -> None:
    assert (
        low
        <= size_at(tuning("grid", low_bytes=low, high_bytes=low + width), share)
        <= (low + width)
    )
