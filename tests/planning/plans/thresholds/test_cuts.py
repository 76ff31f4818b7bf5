"""Thresholds and the places where classes change are two ways to say the same."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.planning.plans.thresholds.cuts import cuts_of, divided, fits, levels_of
from wingbeat.servers.tables import Places, PriorityTable

LEVELS = st.lists(st.floats(0, 1), max_size=3).map(lambda levels: sorted(set(levels))[::-1])


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    layers, classes = draw(st.integers(1, 50)), draw(st.integers(2, 4))
    cuts = draw(st.sets(st.integers(0, layers - 1), max_size=classes - 1)) - {0}
    return tuple(sorted(cuts)), layers, classes


def order(levels: list[float] | tuple[float, ...], layers: int) -> list[int]:
    """Who goes first: the classes without those that are empty."""
    table = PriorityTable(Places(tuple(range(1, layers + 1)), layers), levels)
    classes = [table[place] for place in range(layers)]
    return [sorted(set(classes)).index(each) for each in classes]


@given(divisions())
def test_thresholds_make_the_cuts_that_they_were_made_for(division) -> None:
    cuts, layers, classes = division
    levels = levels_of(cuts, layers, classes)
    assert len(levels) == classes - 1
    assert all(a > b for a, b in itertools.pairwise((1.0, *levels, 0.0)))
    assert cuts_of(levels, layers) == cuts
    table = PriorityTable(Places(tuple(range(1, layers + 1)), layers), levels)
    assert table[layers - 1] == classes - 1, "what is left over is not urgent"
    ends = (0, *cuts, layers)
    assert [len(list(same)) for _, same in itertools.groupby(table[p] for p in range(layers))] == [
        stop - start for start, stop in itertools.pairwise(ends)
    ]


@given(LEVELS, LEVELS, st.integers(1, 40))
def test_thresholds_are_the_same_candidate_if_all_layers_keep_their_order(
    some: list[float], others: list[float], layers: int
) -> None:
    same = order(some, layers) == order(others, layers)
    assert (cuts_of(some, layers) == cuts_of(others, layers)) is same


def test_a_level_that_is_met_exactly_is_not_exceeded() -> None:
    assert cuts_of([0.3], 10) == (6,)
    assert cuts_of([0.0], 10) == (9,)
    assert cuts_of([1.0], 10) == ()


def test_cuts_have_to_rise_and_to_leave_something_on_both_sides() -> None:
    assert fits((), 1, 2)
    assert fits((1, 4), 5, 3)
    wrong = [((0,), 5, 2), ((5,), 5, 2), ((2, 1), 5, 3), ((1, 1), 5, 3), ((1, 2), 5, 2)]
    assert not any(fits(*each) for each in wrong)


def test_classes_without_buckets_are_not_written() -> None:
    assert divided((), 7) == "7"
    assert divided((3,), 7) == "3 + 4"
