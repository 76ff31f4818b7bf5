"""The order of pulls: by hand, against every other order, and against a link that ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat_lab.bench.bound import floor
from wingbeat_lab.layer_costs import LayerCosts
from wingbeat_lab.pull_order import (
    Rates,
    at_start,
    classes_by_urgency,
    floor_at_start,
    floor_when_ready,
    in_forward_order,
    in_random_order,
    in_reverse_order,
    serve,
    when_ready,
)

# Three layers; pushes take 1, 2 and 6 seconds, pulls half of that.
THREE = [LayerCosts(2.0, 4.0, 10.0), LayerCosts(3.0, 1.0, 20.0), LayerCosts(1.0, 2.0, 60.0)]
RATES = Rates(push=10.0, pull=20.0)
SLACK = 1e-9

costs = st.builds(
    LayerCosts,
    st.floats(0.0, 10.0),
    st.floats(0.0, 10.0),
    st.sampled_from([0.0, 1.0, 3.5, 20.0, 100.0]),
)
models = st.lists(costs, min_size=1, max_size=6)
rates = st.builds(Rates, st.floats(0.5, 50.0), st.floats(0.5, 50.0))


def classes_of(layers: Sequence[LayerCosts]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), min_size=len(layers), max_size=len(layers))


# -- pulls at the start ----------------------------------------------------------------------


def test_forward_order_has_the_times_computed_by_hand() -> None:
    found = at_start(THREE, RATES, in_forward_order(3))
    assert found.pulled == (0.5, 1.5, 4.5)
    assert found.forwarded == (2.5, 5.5, 6.5)
    # Backward from 6.5: the last layer's gradient is ready at 8.5, and no push begins before.
    assert found.passed == (13.5, 9.5, 8.5)
    assert found.pushed == (17.5, 16.5, 14.5)
    assert found.seconds == 17.5


def test_reverse_order_waits_for_all_parameters() -> None:
    found = at_start(THREE, RATES, in_reverse_order(3))
    assert found.pulled == (4.5, 4.0, 3.0)
    assert found.forwarded == (6.5, 9.5, 10.5)
    assert found.seconds == 21.5


def test_equation_4_lets_no_gradient_leave_before_backward_has_made_it() -> None:
    only = [LayerCosts(1.0, 5.0, 10.0)]
    assert at_start(only, Rates(10.0, 10.0), [0]).seconds == 1.0 + 1.0 + 5.0 + 1.0


def test_a_layer_without_bytes_waits_for_no_pull() -> None:
    layers = [LayerCosts(1.0, 1.0, 0.0), LayerCosts(1.0, 1.0, 40.0)]
    found = at_start(layers, RATES, in_reverse_order(2))
    assert found.pulled == (0.0, 2.0)
    assert found.forwarded == (1.0, 3.0)


def test_classes_go_before_the_order() -> None:
    given_order = at_start(THREE, RATES, [2, 1, 0], classes=[0, 0, 1])
    assert given_order == at_start(THREE, RATES, [1, 0, 2])


@given(layers=models, links=rates)
def test_no_order_beats_forward_order_which_reaches_the_floor(
    layers: list[LayerCosts], links: Rates
) -> None:
    best = at_start(layers, links, in_forward_order(len(layers))).seconds
    assert floor_at_start(layers, links) == pytest.approx(best)
    found = [at_start(layers, links, o).seconds for o in itertools.permutations(range(len(layers)))]
    assert min(found) >= best - SLACK


@given(layers=models, rate=st.floats(0.5, 50.0))
def test_with_equal_links_the_floor_is_that_of_two_halves(
    layers: list[LayerCosts], rate: float
) -> None:
    assert floor_at_start(layers, Rates(rate, rate)) == floor("halves", layers, 1.0 / rate)


# -- one link --------------------------------------------------------------------------------


def test_an_urgent_message_interrupts_and_the_other_goes_on() -> None:
    assert serve([0.0, 1.0], [4.0, 2.0], [1, 0]) == [6.0, 3.0]
    assert serve([0.0, 1.0], [4.0, 2.0], [0, 0]) == [4.0, 6.0]


jobs = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=8
)


@given(messages=jobs)
def test_a_link_serves_as_one_that_ticks_second_by_second(
    messages: list[tuple[int, int, int]],
) -> None:
    left, ended = [seconds for _, seconds, _ in messages], [0] * len(messages)
    for now in range(12 + 8 * 5):
        waiting = [j for j, (released, _, _) in enumerate(messages) if released <= now and left[j]]
        if waiting:
            served = min(waiting, key=lambda j: (messages[j][2], messages[j][0], j))
            left[served] -= 1
            ended[served] = now + 1
    released, seconds, classes = zip(*messages, strict=True)
    assert serve(released, seconds, classes) == ended


@given(messages=jobs, same=st.integers(0, 3))
def test_one_class_is_first_in_first_out(messages: list[tuple[int, int, int]], same: int) -> None:
    messages.sort(key=lambda message: message[0])
    free, expected = 0, []
    for released, seconds, _ in messages:
        free = max(free, released) + seconds
        expected.append(free)
    released, seconds, _ = zip(*messages, strict=True)
    assert serve(released, seconds, [same] * len(messages)) == expected


# -- pulls when ready ------------------------------------------------------------------------


def test_pulls_beside_pushes_have_the_times_computed_by_hand() -> None:
    found = when_ready(THREE, RATES)
    assert found.passed == (7.0, 3.0, 2.0)
    assert found.pushed == (11.0, 10.0, 8.0)
    # Each pull begins when its push ends, as the link for pulls is twice as fast and has waited.
    assert found.pulled == (12.5, 12.0, 11.0)
    assert found.forwarded == (14.5, 17.5, 18.5)
    assert found.seconds == 18.5


def test_gradients_of_the_same_moment_leave_in_the_order_of_backward() -> None:
    at_once = [LayerCosts(1.0, 0.0, 10.0), LayerCosts(1.0, 0.0, 20.0)]
    assert when_ready(at_once, RATES).pushed == (3.0, 2.0)


def test_an_urgent_pull_interrupts_a_long_one() -> None:
    found = when_ready(THREE, RATES, classes=[0, 1, 2])
    # The last layer's 3 s begin at 8 and are interrupted at 10 and at 11.
    assert found.pulled == (11.5, 11.0, 12.5)
    assert found.seconds == 11.5 + 6.0


def test_urgent_pushes_interrupt_too() -> None:
    found = when_ready(THREE, RATES, classes=[0, 1, 2], push_classes=[0, 1, 2])
    assert found.pushed == (8.0, 5.0, 11.0)
    assert found.pulled == (8.5, 6.0, 14.0)
    assert found.forwarded == (10.5, 13.5, 15.0)


def test_a_slice_is_pulled_while_the_next_is_pushed() -> None:
    only = [LayerCosts(1.0, 1.0, 40.0)]
    links = Rates(10.0, 10.0)
    assert when_ready(only, links).seconds == 1 + 4 + 4 + 1
    assert when_ready(only, links, slice_bytes=10.0).seconds == 1 + 4 + 1 + 1
    assert when_ready(only, links, slice_bytes=39.0).seconds == 1 + 4 + 2 + 1


@given(layers=models, links=rates, data=st.data(), size=st.sampled_from([1.0, 7.0, math.inf]))
def test_no_classes_and_no_slices_beat_the_floor(
    layers: list[LayerCosts], links: Rates, data: st.DataObject, size: float
) -> None:
    found = when_ready(
        layers, links, data.draw(classes_of(layers)), data.draw(classes_of(layers)), size
    )
    assert found.seconds >= floor_when_ready(layers, links) - SLACK
    assert all(a >= b for a, b in zip(found.pushed, found.passed, strict=True))


@given(layers=models, links=rates, size=st.sampled_from([0.5, 2.0]))
def test_a_class_for_each_layer_comes_as_near_the_floor_as_slices_are_small(
    layers: list[LayerCosts], links: Rates, size: float
) -> None:
    urgent = in_forward_order(len(layers))
    found = when_ready(layers, links, urgent, urgent, size).seconds
    above = len(layers) * size * (1.0 / links.push + 1.0 / links.pull)
    assert found <= floor_when_ready(layers, links) + above + SLACK


@given(layers=models, links=rates, same=st.integers(0, 3))
def test_pull_order_with_one_class_equals_none(
    layers: list[LayerCosts], links: Rates, same: int
) -> None:
    one = [same] * len(layers)
    assert when_ready(layers, links, one, one) == when_ready(layers, links)


@given(layers=models, links=rates)
def test_pulling_when_ready_has_no_higher_floor_than_pulling_at_the_start(
    layers: list[LayerCosts], links: Rates
) -> None:
    assert floor_when_ready(layers, links) <= floor_at_start(layers, links) + SLACK


# -- orders, classes, and what is refused ----------------------------------------------------


def test_random_orders_are_permutations_that_a_seed_gives_again() -> None:
    orders = [in_random_order(9, seed) for seed in range(5)]
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert orders == [in_random_order(9, seed) for seed in range(5)]
    assert len(set(map(tuple, orders))) == 5


def test_thresholds_make_classes_that_fall_with_depth() -> None:
    # Urgencies of five layers: 0.8, 0.6, 0.4, 0.2, 0; the high class is above the threshold.
    assert classes_by_urgency(5, []) == [0] * 5
    assert classes_by_urgency(5, [0.4]) == [0, 0, 1, 1, 1]
    assert classes_by_urgency(5, [0.0]) == [0, 0, 0, 0, 1]
    assert classes_by_urgency(5, [1.0]) == [1] * 5
    assert classes_by_urgency(5, [0.1, 0.7, 0.4]) == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_pull_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(UsageError, match="each of the layers 0 to 2 once"):
        at_start(THREE, RATES, order)


def test_pull_order_with_invalid_arguments_is_refused() -> None:
    with pytest.raises(UsageError, match="pull rate 0"):
        Rates(1.0, 0.0)
    with pytest.raises(UsageError, match="push rate nan"):
        Rates(math.nan, 1.0)
    with pytest.raises(UsageError, match="at least one"):
        at_start([], RATES, [])
    with pytest.raises(UsageError, match="2 for 3 layers"):
        at_start(THREE, RATES, [0, 1, 2], classes=[0, 1])
    with pytest.raises(UsageError, match="2 for 3 layers"):
        when_ready(THREE, RATES, push_classes=[0, 1])
    with pytest.raises(UsageError, match="slice_bytes 0"):
        when_ready(THREE, RATES, slice_bytes=0)
