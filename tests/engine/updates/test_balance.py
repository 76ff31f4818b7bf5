"""Whole tensors divided among workers: the most that one has to do is the least possible."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.engine.updates.balance import blocks, divide, work
from wingbeat.types import Span


@given(st.lists(st.integers(0, 9), max_size=7), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_no_other_division_in_order_has_less_for_the_busiest(
    costs: list[int], loads: list[int]
) -> None:
    after = list(loads)
    counts = divide(costs, after)
    assert sum(counts) == len(costs)
    assert len(counts) == len(loads)
    assert sum(after) == sum(loads) + sum(costs)
    best = min(
        max(
            load + sum(costs[a:b])
            for load, a, b in zip(loads, (0, *cuts), (*cuts, len(costs)), strict=True)
        )
        for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), len(loads) - 1)
    )
    assert max(after) == best


def test_buckets_that_follow_make_up_for_those_before() -> None:
    loads = [0, 0, 0]
    counts = [divide([5], loads) for _ in range(6)]
    assert loads == [10, 10, 10]
    assert {tuple(each) for each in counts} == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


@given(st.lists(st.integers(0, 9), max_size=7), st.lists(st.integers(0, 3), min_size=1))
def test_blocks_lie_end_to_end_and_cover_the_buffer(lengths: list[int], counts: list[int]) -> None:
    counts[-1] += max(0, len(lengths) - sum(counts))
    found = blocks(lengths, counts, sum(lengths) + 5)
    assert found[0].start == 0
    assert found[-1].stop == sum(lengths) + 5
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))
    assert len(found) == len(counts)


def test_a_matrix_costs_its_elements_times_its_shorter_side() -> None:
    assert work((3, 5)) == work((5, 3)) == 45
    assert work((4, 3, 2)) == 24 * 4
    assert work((7,)) == 7
    assert work(()) == 1
    assert work((0, 3)) == 0
    assert blocks([], [0], 4) == (Span(0, 4),)
