"""The clock's rules, in a time that only moves when told."""

from __future__ import annotations

import pytest

from wingbeat_lab.paced import clock as clock_module
from wingbeat_lab.paced.clock import SHORTEST_SLEEP, SLACK, Clock


class FakeTime:
    """Stands in for the time module; every sleep ends ``late`` seconds late."""

    def __init__(self) -> None:
        self.now = 100.0
        self.late = 0.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.late


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(clock_module, "time", made)
    return made


def started(fake: FakeTime) -> Clock:
    clock = Clock()
    clock.restart()
    return clock


def test_late_sleeps_do_not_add_up(fake: FakeTime) -> None:
    fake.late = 0.1e-3
    clock = started(fake)
    for _ in range(200):
        clock.enter()
        clock.spend(2e-3)
    clock.settle()
    assert fake.now - 100.0 == pytest.approx(0.4, abs=0.11e-3)


def test_short_times_are_slept_together(fake: FakeTime) -> None:
    clock = started(fake)
    for _ in range(100):
        clock.enter()
        clock.spend(SHORTEST_SLEEP / 10)
    clock.settle()
    assert fake.now - 100.0 == pytest.approx(10 * SHORTEST_SLEEP)
    assert len(fake.slept) <= 11


def test_time_away_within_the_slack_is_absorbed(fake: FakeTime) -> None:
    clock = started(fake)
    clock.spend(5e-3)
    fake.now += SLACK * 0.9
    clock.enter()
    clock.spend(5e-3)
    assert fake.now - 100.0 == pytest.approx(10e-3)


def test_blocking_is_added_in_full(fake: FakeTime) -> None:
    clock = started(fake)
    clock.spend(5e-3)
    fake.now += 20e-3
    clock.enter()
    clock.spend(50e-3)
    assert fake.now - 100.0 == pytest.approx(75e-3)


def test_own_work_counts_as_part_of_the_time(fake: FakeTime) -> None:
    clock = started(fake)
    clock.enter()
    fake.now += 3e-3  # a gradient being written, between enter and spend
    clock.spend(5e-3)
    assert fake.now - 100.0 == pytest.approx(5e-3)


def test_own_work_beyond_its_time_is_made_up_for_later_even_after_blocking(fake: FakeTime) -> None:
    clock = started(fake)
    clock.enter()
    fake.now += 8e-3
    clock.spend(5e-3)  # 3 ms behind
    fake.now += 20e-3  # blocked
    clock.enter()
    clock.spend(50e-3)
    assert fake.now - 100.0 == pytest.approx(5e-3 + 20e-3 + 50e-3)


def test_restart_forgets_the_past(fake: FakeTime) -> None:
    clock = started(fake)
    fake.now += 1.0
    clock.spend(0.1)
    clock.restart()
    began = fake.now
    clock.enter()
    clock.spend(2e-3)
    assert fake.now - began == pytest.approx(2e-3)
