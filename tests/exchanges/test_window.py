"""Windows follow what a link carries: long queues shrink, and fast links are filled."""

from __future__ import annotations

import pytest

from wingbeat.exchanges.lanes import (
    INITIAL_BYTES,
    MAX_BYTES,
    MIN_BYTES,
    TARGET_DELAY_S,
    CongestionWindow,
)


def link(window: CongestionWindow, rate: float, seconds: float) -> float:
    """Keep a link of so many bytes a second full; return how long the last part took."""
    now, took = 0.0, 0.0
    while now < seconds:
        took = window.nbytes / rate
        now += took
        window.arrived(window.nbytes, took, now, full=True)
    return took


@pytest.mark.parametrize("rate", [2e5, 1e6, 1e7, 2e8])
def test_a_queue_is_about_as_long_as_is_wanted(rate: float) -> None:
    assert TARGET_DELAY_S / 2 <= link(CongestionWindow(), rate, 30.0) <= 2 * TARGET_DELAY_S


def test_a_link_that_becomes_slow_has_a_short_queue_again() -> None:
    window = CongestionWindow()
    link(window, 1e8, 10.0)
    assert link(window, 1e6, 60.0) <= 2 * TARGET_DELAY_S


def test_it_is_never_too_small_nor_too_large() -> None:
    window = CongestionWindow()
    link(window, 1e12, 1e-3)
    assert window.nbytes == MAX_BYTES
    link(window, 1.0, 1e9)
    assert window.nbytes == MIN_BYTES


def test_what_does_not_fill_it_teaches_nothing_of_growing() -> None:
    window = CongestionWindow()
    window.arrived(INITIAL_BYTES, 0.001, 1.0, full=False)
    assert window.nbytes == INITIAL_BYTES


def test_one_long_queue_shrinks_it_once() -> None:
    window = CongestionWindow()
    link(window, 1e8, 10.0)
    before = window.nbytes
    for _ in range(5):  # parts that were all in the same queue
        window.arrived(1000, 1.0, 20.0, full=True)
    assert window.nbytes == int(before * TARGET_DELAY_S)


def test_parts_are_a_quarter_and_not_tiny() -> None:
    window = CongestionWindow()
    assert window.part == INITIAL_BYTES // 4
    window.nbytes = 1
    assert window.part == 1 << 14
