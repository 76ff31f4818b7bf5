"""Totals of one model's training: phases, waits, counts, sections."""

from __future__ import annotations

import threading

from wingbeat.observe.meter import Meter, Section, Tally


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns


def _spent(meter: Meter) -> dict[str, int]:
    return {part: round(1e9 * s) for part, s in meter.spent.items() if s}


def test_each_phase_gets_its_own_time_and_waits_are_the_exchange() -> None:
    clock = Clock()
    meter = Meter("Net", "DeAR()", clock)
    for phase, length, waited in (
        ("forward", 100, 0),
        ("backward", 200, 30),
        ("other", 7, 0),
        ("update", 50, 40),
    ):
        meter.enter(phase)
        clock.ns += length
        meter.waited_ns += waited
    meter.stepped()
    clock.ns += 1_000
    meter.enter("forward")
    assert _spent(meter) == {
        "forward": 100,
        "backward": 170,
        "other": 1_007,
        "update": 10,
        "exchange": 70,
    }
    assert meter.iterations == 1


def test_time_before_the_first_forward_is_no_training() -> None:
    clock = Clock()
    meter = Meter("Net", "", clock)
    clock.ns += 5
    meter.enter("forward")
    assert _spent(meter) == {"other": 5}


def test_counts_add_up() -> None:
    meter = Meter("Net")
    meter.count("dropped")
    meter.count("dropped", 2)
    meter.count("refused")
    assert meter.counts == {"dropped": 3, "refused": 1}


def test_sections_of_all_sources_are_shown_as_they_are_now() -> None:
    meter, cells = Meter("Net"), {"c0": 1}
    meter.show(lambda: [Section("gei", dict(cells))])
    meter.show(lambda: [Section("groups", {"group": "0, 1"})])
    cells["c0"] = 2
    assert meter.sections == [Section("gei", {"c0": 2}), Section("groups", {"group": "0, 1"})]


class Late(int):
    """A number that is added only when two threads are about to: a switch at the worst moment."""

    both = threading.Barrier(2)

    def __radd__(self, other: int) -> int:
        self.both.wait(10)
        return other + int(self)


def test_threads_that_add_at_once_lose_nothing() -> None:
    tally = Tally()
    threads = [threading.Thread(target=tally.add, args=(Late(n),)) for n in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.total == 7
