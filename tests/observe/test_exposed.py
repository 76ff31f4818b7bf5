from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.observe.events import Event
from wingbeat.observe.exposed import (
    clip,
    exposed_ns,
    exposed_per_iteration,
    iterations,
    union,
    without,
)


def event(what: str, begin: int, end: int, worker: int = 0) -> Event:
    return Event(worker, -1, what, begin, end, 0, "compute")


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(intervals)
def test_union_holds_the_same_instants_and_is_disjoint(given_: list[tuple[int, int]]) -> None:
    made = union(given_)
    instants = {t for begin, end in given_ for t in range(begin, end)}
    assert {t for begin, end in made for t in range(begin, end)} == instants
    assert all(a[1] < b[0] for a, b in pairwise(made))
    assert sum(end - begin for begin, end in made) == len(instants)


@given(intervals, intervals)
def test_what_is_left_is_what_is_in_no_hole(
    some: list[tuple[int, int]], holes: list[tuple[int, int]]
) -> None:
    inside = {i for begin, end in some for i in range(begin, end)}
    cut = {i for begin, end in holes for i in range(begin, end)}
    left = without(some, holes)
    assert {i for begin, end in left for i in range(begin, end)} == inside - cut
    assert all(a[1] < b[0] for a, b in pairwise(left))


@given(intervals, st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_clip_keeps_what_is_inside(given_: list[tuple[int, int]], window: tuple[int, int]) -> None:
    inside = {t for b, e in union(given_) for t in range(b, e)} & set(range(*window))
    assert {t for b, e in clip(union(given_), window) for t in range(b, e)} == inside


def test_only_waits_are_exposed_and_overlaps_count_once() -> None:
    events = [
        event("all_reduce", 0, 100),
        event("wait", 10, 30),
        event("wait", 20, 40),
        event("wait", 50, 55),
    ]
    assert exposed_ns(events) == 35


def test_no_events_are_no_exposed_time() -> None:
    assert exposed_ns([]) == 0
    assert iterations([]) == []
    assert exposed_per_iteration([]) == []


def test_iterations_end_where_steps_end() -> None:
    events = [
        event("forward", 5, 10),
        event("step", 18, 20),
        event("forward", 21, 30),
        event("step", 38, 40),
        event("forward", 41, 44),
    ]
    assert iterations(events) == [(5, 20), (20, 40)]


def test_without_steps_everything_is_one_iteration() -> None:
    assert iterations([event("forward", 5, 10), event("backward", 10, 30)]) == [(5, 30)]


def test_a_wait_across_a_step_is_shared_between_its_iterations() -> None:
    events = [
        event("forward", 0, 10),
        event("step", 10, 20),
        event("wait", 15, 27),
        event("step", 30, 40),
    ]
    assert exposed_per_iteration(events) == [5, 7]


@pytest.mark.parametrize("function", [exposed_ns, iterations, exposed_per_iteration])
def test_several_workers_are_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(UsageError, match=r"several workers \[0, 2\]"):
        function([event("wait", 0, 1), event("wait", 0, 1, worker=2)])
