"""Windows follow what a link carries: long queues shrink, and fast links are filled."""

from __future__ import annotations

import pytest

from wingbeat.exchanges.lanes.paths import LEAST, MOST, START, TARGET_S, Window


def link(window: Window, rate: float, seconds: float) -> float:
    """Keep a link of so many bytes a second full; return how long the last part took."""
    now, took = 0.0, 0.0
    while now < seconds:
        took = window.nbytes / rate
        now += took
        window.arrived(window.nbytes, took, now, full=True)
    return took


@pytest.mark.parametrize("rate", [2e5, 1e6, 1e7, 2e8])
def test_a_queue_is_about_as_long_as_is_wanted(rate: float) -> None:
    assert TARGET_S / 2 <= link(Window(), rate, 30.0) <= 2 * TARGET_S


def test_a_link_that_becomes_slow_has_a_short_queue_again() -> None:
    window = Window()
    link(window, 1e8, 10.0)
    assert link(window, 1e6, 60.0) <= 2 * TARGET_S


def test_it_is_never_too_small_nor_too_large() -> None:
    window = Window()
    link(window, 1e12, 1e-3)
    assert window.nbytes == MOST
    link(window, 1.0, 1e9)
    assert window.nbytes == LEAST


def test_what_does_not_fill_it_teaches_nothing_of_growing() -> None:
    window = Window()
    window.arrived(START, 0.001, 1.0, full=False)
    assert window.nbytes == START


def test_one_long_queue_shrinks_it_once() -> None:
    window = Window()
    link(window, 1e8, 10.0)
    before = window.nbytes
    for _ in range(5):  # parts that were all in the same queue
        window.arrived(1000, 1.0, 20.0, full=True)
    assert window.nbytes == int(before * TARGET_S)


def test_parts_are_a_quarter_and_not_tiny() -> None:
    window = Window()
    assert window.part == START // 4
    window.nbytes = 1
    assert window.part == 1 << 14
