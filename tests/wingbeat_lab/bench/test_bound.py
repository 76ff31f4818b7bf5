"""Floors against cases worked out by hand, and against each other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat_lab.bench.bound import (
    BOUNDS,
    floor,
    low_rank_bytes,
    seconds_per_byte,
    simple,
    three_cases,
)
from wingbeat_lab.bench.config import reduce_seconds_per_byte, scaled
from wingbeat_lab.lab.spec import LabSpec
from wingbeat_lab.layer_costs import LayerCosts

# Two layers: the first 1 s forward, 2 s backward, 10 bytes; the second 3 s, 4 s, 30 bytes.
TWO = [LayerCosts(1.0, 2.0, 10.0), LayerCosts(3.0, 4.0, 30.0)]


def test_without_communication_the_floor_is_the_computation() -> None:
    assert floor("single", TWO, per_byte=99.0) == floor("stale", TWO, per_byte=99.0) == 10.0


@pytest.mark.parametrize(
    ("per_byte", "expected"),
    [
        # t_ar of both is 8: the second's gradients are there after 4, so 4 + 2 * 0.1 * 40 = 12.
        (0.1, 4.0 + 12.0),
        # Links so fast that only the first layer's 2 * 0.01 * 10 after all of backward counts.
        (0.01, 4.0 + 6.2),
        (0.0, 4.0 + 6.0),
    ],
)
def test_allreduce_waits_for_the_gradients(per_byte: float, expected: float) -> None:
    assert floor("whole", TWO, per_byte) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("per_byte", "expected"),
    [
        # Backward: 4 + 0.1 * 40 = 8 (over 6 + 1). Forward: 1 + 4 (first layer's bytes, then both
        # layers) = 5, or both layers' bytes 4 + the second's 3 = 7.
        (0.1, 8.0 + 7.0),
        # Backward: 6 + 0.1. Forward: 0.1 + 4, over 0.4 + 3.
        (0.01, 6.1 + 4.1),
        (0.0, 10.0),
    ],
)
def test_dear_reduces_in_backward_and_gathers_in_forward(per_byte: float, expected: float) -> None:
    assert floor("halves", TWO, per_byte) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("per_byte", "expected"),
    [
        # Of both layers: what comes after the second is ready, 7, and 8 for their bytes.
        (0.1, 7.0 + 8.0),
        # Computation, and the first layer's 2 * 0.01 * 10.
        (0.01, 10.2),
        # The card alone: 2 * 1.0 * 40, and before it the second layer's backward and forward.
        (1.0, 7.0 + 80.0),
        (0.0, 10.0),
    ],
)
def test_sums_of_servers_come_until_forward_needs_them(per_byte: float, expected: float) -> None:
    assert floor("late", TWO, per_byte) == pytest.approx(expected)


def test_simple_dear_is_the_denominator_of_equation_6() -> None:
    forward, backward, half = 4.0, 6.0, 0.125 * 40
    paper = forward + backward + 2 * half - min(half, backward) - min(half, forward)
    assert simple("halves", TWO, 0.125) == pytest.approx(paper) == pytest.approx(11.0)


def test_simple_allreduce_hides_what_fits_under_backward() -> None:
    assert simple("whole", TWO, 0.125) == pytest.approx(4.0 + 10.0)
    assert simple("whole", TWO, 0.01) == pytest.approx(10.0)


@pytest.mark.parametrize("case", [1, 2, 3])
@given(forward=st.floats(1e-6, 1e3), share=st.floats(0.0, 1.0))
def test_equation_9_is_equation_8_less_equation_7(case: int, forward: float, share: float) -> None:
    # t_ag is at most t_ff, then at most twice that, then any amount above.
    gather = forward * {1: share, 2: 1.001 + 0.999 * share, 3: 2.001 + 100 * share}[case]
    alone = [LayerCosts(forward, 2 * forward, 1.0)]
    whole, halves = simple("whole", alone, gather), simple("halves", alone, gather)
    assert whole is not None
    assert halves is not None
    which, saved = three_cases(forward, gather)
    assert which == case
    assert saved == pytest.approx(whole - halves, abs=1e-9 * whole)


@pytest.mark.parametrize(
    ("gather", "expected"),
    [(0.0, (1, 0.0)), (2.0, (1, 0.0)), (4.0, (2, 2.0)), (4.1, (3, 2.0)), (1e9, (3, 2.0))],
)
def test_the_cases_of_equation_9_meet_at_one_and_two_forwards(
    gather: float, expected: tuple[int, float]
) -> None:
    assert three_cases(2.0, gather) == expected


@pytest.mark.parametrize(
    "times", [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("nan"))]
)
def test_equation_9_refuses_what_is_no_time(times: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="allowed are numbers of seconds from 0 on"):
        three_cases(*times)


def test_no_floor_is_claimed_for_an_unknown_schedule() -> None:
    assert floor("other", TWO, 0.1) is None
    assert simple("other", TWO, 0.1) is None


layer_lists = st.lists(
    st.builds(LayerCosts, *[st.floats(0.0, 10.0)] * 2, st.floats(0.0, 100.0)),
    min_size=1,
    max_size=8,
)


@given(layers=layer_lists, per_byte=st.floats(0.0, 1.0))
def test_parameters_that_are_gathered_once_have_the_simple_floor(
    layers: list[LayerCosts], per_byte: float
) -> None:
    assert floor("fsdp", layers, per_byte) == simple("halves", layers, per_byte)
    assert simple("fsdp", layers, per_byte) == simple("halves", layers, per_byte)


@given(layers=layer_lists, per_byte=st.floats(0.0, 1.0))
def test_floors_of_schedules_are_ordered(layers: list[LayerCosts], per_byte: float) -> None:
    for kind in ("whole", "halves"):
        exact, rough = floor(kind, layers, per_byte), simple(kind, layers, per_byte)
        assert exact is not None
        assert rough is not None
        assert exact >= rough - 1e-9
        assert exact >= (floor("single", layers, per_byte) or 0.0) - 1e-9


@given(layers=layer_lists, per_byte=st.floats(0.001, 1.0))
def test_a_simulated_schedule_reaches_the_dear_floor(
    layers: list[LayerCosts], per_byte: float
) -> None:
    """Gathering in the order of execution is optimal; forward starts as parameters arrive."""
    reduced = 0.0
    ready = itertools.accumulate(layer.backward_s for layer in reversed(layers))
    for at, layer in zip(ready, reversed(layers), strict=True):
        reduced = max(reduced, at) + per_byte * layer.nbytes
    gathered = done = 0.0
    for layer in layers:
        gathered += per_byte * layer.nbytes
        done = max(done, gathered) + layer.forward_s
    assert floor("halves", layers, per_byte) == pytest.approx(reduced + done)


@given(layers=layer_lists, per_byte=st.floats(0.001, 1.0))
def test_a_simulated_schedule_reaches_the_allreduce_floor(
    layers: list[LayerCosts], per_byte: float
) -> None:
    """Sending each layer's gradients in the order in which they are ready is optimal."""
    backward = list(reversed(layers))
    ready = list(itertools.accumulate(layer.backward_s for layer in backward))
    link_free = 0.0
    for at, layer in zip(ready, backward, strict=True):
        link_free = max(link_free, at) + 2 * per_byte * layer.nbytes
    forward = sum(layer.forward_s for layer in layers)
    assert floor("whole", layers, per_byte) == pytest.approx(forward + link_free)


def test_bounds_have_a_formula_each() -> None:
    assert set(BOUNDS) == {"single", "whole", "halves", "late", "stale", "local", "fsdp"}


def test_seconds_per_byte_are_those_of_the_slowest_host() -> None:
    # 4 hosts send 3/4 of the bytes each; the slow one at 25 MB/s.
    assert seconds_per_byte([125e6, 125e6, 125e6, 25e6]) == pytest.approx(0.75 / 25e6)
    assert seconds_per_byte([125e6]) == 0.0


def test_of_uneven_leaves_the_larger_part_crosses_each_trunk() -> None:
    # What three hosts own must come in to the fourth, and go out of the three; and both ways round.
    hosts = [1000.0] * 4
    assert seconds_per_byte(hosts, [(3, 1.0), (1, 100.0)]) == pytest.approx(3 / 4)
    assert seconds_per_byte(hosts, [(3, 100.0), (1, 1.0)]) == pytest.approx(3 / 4)
    assert seconds_per_byte(hosts, [(2, 1.0), (2, 100.0)]) == pytest.approx(2 / 4)


def test_seconds_per_byte_through_a_narrow_trunk_are_the_trunks() -> None:
    # 2 leaves of 2: half of the bytes cross each trunk, at a tenth of a host's rate.
    assert seconds_per_byte([100e6] * 4, [(2, 10e6)] * 2) == pytest.approx(0.5 / 10e6)
    # A trunk nobody has to cross does not.
    assert seconds_per_byte([100e6] * 4, [(4, 1e6)]) == pytest.approx(0.75 / 100e6)


@pytest.mark.parametrize("rates", [[], [0.0], [1e6, -1.0]])
def test_rates_that_cannot_work_are_refused(rates: list[float]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        seconds_per_byte(rates)


@pytest.mark.parametrize(
    ("spec", "seconds_per_gigabyte"),
    [
        ("star:4@1gbit", 6.0),
        ("star:4x2@1gbit", 3.0),
        ("star:4@1gbit,h3@200mbit", 30.0),
        ("star:4x2@1gbit,h3.eth1@200mbit", 5.0),
        ("fat-tree:8/4@1gbit+500mbit", 8.0),
        ("bcube:3x2@250mbit", 8 / 9 * 16),
    ],
)
def test_labs_have_the_rates_they_state(spec: str, seconds_per_gigabyte: float) -> None:
    per_byte = reduce_seconds_per_byte(LabSpec.parse(spec))
    assert per_byte is not None
    assert per_byte * 1e9 == pytest.approx(seconds_per_gigabyte)


def test_seconds_per_byte_of_loopback_are_none() -> None:
    assert reduce_seconds_per_byte(LabSpec.parse("loopback:4")) is None


def test_scaling_reaches_every_rate() -> None:
    spec = scaled(LabSpec.parse("fat-tree:4/2@1gbit+500mbit,h1@200mbit"), 0.5)
    assert str(spec) == "fat-tree:4/2@500mbit+250mbit,h1@100mbit"
    spec = scaled(LabSpec.parse("fat-tree:4/2@1gbit+500mbit,cross=400mbitx4"), 0.5)
    assert str(spec) == "fat-tree:4/2@500mbit+250mbit,cross=200mbitx4"
    assert str(scaled(LabSpec.parse("loopback:4"), 0.5)) == "loopback:4"


def test_scaling_below_what_the_kernel_shapes_says_the_smallest_scale() -> None:
    with pytest.raises(UsageError, match=r"scale by at least 0\.1$"):
        scaled(LabSpec.parse("star:4@10mbit"), 0.01)


def test_low_rank_bytes_count_factors_only_if_they_are_smaller() -> None:
    assert low_rank_bytes((100, 10, 10), rank=2) == (100 + 100) * 2 * 4
    assert low_rank_bytes((100,), rank=2) == 400  # a vector travels whole
    assert low_rank_bytes((4, 4), rank=1) == 64  # (4 + 4) * 2 is not under 16
