"""Iterations whose parts are known, and what must hold for any."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.observe.events import Event
from wingbeat_lab.bench.breakdown import Parts, breakdown, per_iteration


def event(what: str, begin: int, end: int, worker: int = 0) -> Event:
    """Times in milliseconds."""
    lane = "eth0" if what in ("reduce_scatter", "all_gather", "all_reduce") else "compute"
    return Event(worker, -1, what, begin * 10**6, end * 10**6, 0, lane)


def milliseconds(parts: Parts) -> dict[str, float]:
    """The parts that are not zero."""
    names = Parts.__slots__
    out: dict[str, Any] = {name[:-2]: round(1e3 * getattr(parts, name), 6) for name in names}
    return {name: value for name, value in out.items() if value}


# Forward from 1 to 21 stands still for 2..12 and updates 12..14; the reduce-scatter that began in
# the iteration before ends at 6, and another one begins at 9 on a second link and ends at 10.
DEAR = [
    event("reduce_scatter", -5, 6),
    event("reduce_scatter", 9, 10),
    event("all_gather", 6, 16),
    event("wait", 2, 12),
    event("update", 12, 14),
    event("forward", 1, 21),
    event("backward", 21, 40),
    event("wait", 38, 39),
    event("step", 41, 42),
]


def test_a_wait_for_an_average_of_models_is_one_for_a_whole_all_reduce() -> None:
    [parts] = per_iteration([event("average", 0, 9), event("wait", 4, 9), event("step", 3, 10)])
    assert milliseconds(parts)["all_reduce"] == 5


def test_a_wait_belongs_to_the_reduce_scatter_under_way_or_else_to_the_all_gather() -> None:
    [parts] = per_iteration(reversed(DEAR))  # in any order
    # The iteration begins with its first event, at -5.
    assert milliseconds(parts) == {
        "forward": 20 - 10 - 2,
        "backward": 19 - 1,
        "reduce_scatter": 4 + 1,
        "all_gather": 10 - 5 + 1,
        "update": 2,
        "other": 6 + 2,
    }
    assert parts.total_s == pytest.approx(0.047)
    assert parts.exposed_s == pytest.approx(0.011)


def test_breakdown_counts_whole_all_reduces_separately() -> None:
    own = [
        event("forward", 0, 10),
        event("backward", 10, 40),
        event("all_reduce", 15, 40),
        event("wait", 30, 40),
        event("update", 40, 42),
        event("step", 40, 42),
    ]
    [parts] = per_iteration(own)
    assert milliseconds(parts) == {"forward": 10, "backward": 20, "all_reduce": 10, "update": 2}


def test_encoding_is_no_part_of_the_backward_that_waits_for_it() -> None:
    own = [
        event("backward", 0, 40),
        event("encode", 10, 14),
        event("encode", 30, 36),
        event("all_gather", 14, 44),
        event("wait", 36, 40),
        event("step", 40, 42),
    ]
    [parts] = per_iteration(own)
    assert milliseconds(parts) == {"backward": 26, "encode": 10, "all_gather": 4, "other": 2}


def test_waking_up_late_is_no_all_gather_where_there_is_none() -> None:
    own = [event("reduce_scatter", 0, 6), event("wait", 2, 7), event("step", 9, 10)]
    [parts] = per_iteration(own)
    assert milliseconds(parts) == {"reduce_scatter": 5, "other": 5}


def test_the_median_iteration_counts_and_the_first_does_not() -> None:
    events = []
    for worker in (0, 1):
        at = 0
        for length in (1000, 20, 30, 900):
            # Worker 1 computes 2 ms longer, and so waits 2 ms less.
            middle = at + 10 + 2 * worker
            end = at + length
            events += [event("forward", at, middle, worker), event("wait", middle, end, worker)]
            events += [event("all_gather", at, end, worker), event("step", end, end, worker)]
            at = end
    parts = breakdown(events)
    assert milliseconds(parts) == {"forward": 11, "all_gather": 19}


def test_of_an_even_number_of_iterations_the_lower_of_the_middle_two_counts() -> None:
    events = []
    at = 0
    for length in (1000, 30, 900, 20, 40):
        events += [event("forward", at, at + length), event("step", at + length, at + length)]
        at += length
    assert milliseconds(breakdown(events)) == {"forward": 30}


@pytest.mark.parametrize("events", [[], [event("forward", 0, 5), event("step", 5, 6)]])
def test_too_few_iterations_are_refused(events: list[Event]) -> None:
    with pytest.raises(UsageError, match="record more"):
        breakdown(events)


def test_events_of_several_workers_are_refused() -> None:
    with pytest.raises(UsageError, match="several workers"):
        per_iteration([event("step", 0, 1, 0), event("step", 0, 1, 1)])


whats = st.sampled_from(
    [
        *("forward", "backward", "encode", "update", "wait", "step"),
        *("reduce_scatter", "all_gather", "all_reduce"),
    ]
)
random_events = st.builds(
    lambda what, begin, length: event(what, begin, begin + length),
    whats,
    st.integers(0, 100),
    st.integers(0, 40),
)


@given(st.lists(random_events, max_size=20))
def test_breakdown_parts_add_up_to_the_iteration(events: list[Event]) -> None:
    events = [*events, event("step", 150, 151)]
    parts = per_iteration(events)
    begin = min(e.begin_ns for e in events)
    assert sum(p.total_s for p in parts) == pytest.approx((151e6 - begin) / 1e9)
    assert all(getattr(p, name) >= 0 for p in parts for name in Parts.__slots__)
