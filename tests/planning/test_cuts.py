"""Thresholds and the places where classes change are two ways to say the same."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.methods.parameter_server.slicing import priority_classes
from wingbeat.planning.thresholds import (
    cuts_from_thresholds,
    format_division,
    thresholds_from_cuts,
    valid_cuts,
)
from wingbeat.types import LayerPositions

LEVELS = st.lists(st.floats(0, 1), max_size=3).map(lambda levels: sorted(set(levels))[::-1])


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    layers, classes = draw(st.integers(1, 50)), draw(st.integers(2, 4))
    cuts = draw(st.sets(st.integers(0, layers - 1), max_size=classes - 1)) - {0}
    return tuple(sorted(cuts)), layers, classes


def order(levels: list[float] | tuple[float, ...], layers: int) -> list[int]:
    """Who goes first: the classes without those that are empty."""
    classes = priority_classes(LayerPositions(tuple(range(1, layers + 1)), layers), levels)
    return [sorted(set(classes)).index(each) for each in classes]


@given(divisions())
def test_thresholds_from_cuts_round_trip_is_equal(division) -> None:
    cuts, layers, classes = division
    levels = thresholds_from_cuts(cuts, layers, classes)
    assert len(levels) == classes - 1
    assert all(a > b for a, b in itertools.pairwise((1.0, *levels, 0.0)))
    assert cuts_from_thresholds(levels, layers) == cuts
    classes_of = priority_classes(LayerPositions(tuple(range(1, layers + 1)), layers), levels)
    assert classes_of[layers - 1] == classes - 1, "what is left over is not urgent"
    ends = (0, *cuts, layers)
    assert [len(list(same)) for _, same in itertools.groupby(classes_of)] == [
        stop - start for start, stop in itertools.pairwise(ends)
    ]


@given(LEVELS, LEVELS, st.integers(1, 40))
def test_cuts_same_layer_order_gives_same_candidate(
    some: list[float], others: list[float], layers: int
) -> None:
    same = order(some, layers) == order(others, layers)
    assert (cuts_from_thresholds(some, layers) == cuts_from_thresholds(others, layers)) is same


def test_cuts_exact_threshold_is_not_exceeded() -> None:
    assert cuts_from_thresholds([0.3], 10) == (6,)
    assert cuts_from_thresholds([0.0], 10) == (9,)
    assert cuts_from_thresholds([1.0], 10) == ()


def test_valid_cuts_rise_and_leave_both_sides() -> None:
    assert valid_cuts((), 1, 2)
    assert valid_cuts((1, 4), 5, 3)
    wrong = [((0,), 5, 2), ((5,), 5, 2), ((2, 1), 5, 3), ((1, 1), 5, 3), ((1, 2), 5, 2)]
    assert not any(valid_cuts(*each) for each in wrong)


def test_format_division_omits_empty_classes() -> None:
    assert format_division((), 7) == "7"
    assert format_division((3,), 7) == "3 + 4"
