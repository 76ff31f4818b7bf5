from __future__ import annotations

from functools import partial

import pytest

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.processors import SLICE_S, Cores


@pytest.mark.parametrize(
    ("count", "ends"),
    [(None, [1.0, 2.0, 3.0]), (3, [1.0, 2.0, 3.0]), (2, [1.5, 2.5, 3.5]), (1, [3.0, 5.0, 6.0])],
)
def test_work_shares_the_processors_evenly(count: int | None, ends: list[float]) -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, count)
    for seconds in (2.0, 1.0, 3.0):
        cores.work(seconds, lambda: over.append(agenda.now))
    agenda.run()
    assert over == pytest.approx(ends, abs=3 * SLICE_S)


def test_work_that_is_shorter_than_a_slice_is_done_in_turn() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    for share in (0.5, 1.0, 0.25):
        cores.work(share * SLICE_S, lambda: over.append(agenda.now / SLICE_S))
    agenda.run()
    assert over == pytest.approx([0.5, 1.5, 1.75])


def test_short_work_waits_for_the_slice_of_long_work_and_not_for_its_end() -> None:
    agenda, over = Agenda(), list[tuple[str, float]]()
    cores = Cores(agenda, 1)
    cores.work(10 * SLICE_S, lambda: over.append(("long", agenda.now / SLICE_S)))
    short = partial(cores.work, 0.5 * SLICE_S, lambda: over.append(("short", agenda.now / SLICE_S)))
    agenda.at(4.25 * SLICE_S, short)
    agenda.run()
    assert [name for name, _ in over] == ["short", "long"]
    assert [when for _, when in over] == pytest.approx([5.5, 10.5])


def test_a_processor_is_free_again() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(1.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.at(5.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.run()
    assert over == pytest.approx([2.0, 6.0])


@pytest.mark.parametrize("count", [None, 1])
def test_spent_time_is_over_at_once_unless_something_is_due(count: int | None) -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, count)

    def spend() -> None:
        while cores.spend(1.0, spend):
            over.append(agenda.now)

    agenda.at(0.0, spend)
    agenda.at(2.5, agenda.stop)
    agenda.run()
    assert over == [1.0, 2.0]


def test_spent_time_waits_for_a_processor() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(2.0, lambda: over.append(agenda.now))
    assert not cores.spend(1.0, lambda: over.append(agenda.now))
    agenda.run()
    assert over == pytest.approx([2.0, 3.0], abs=2 * SLICE_S)


def test_more_work_at_once_has_the_rest_of_the_slice() -> None:
    agenda, over = Agenda(), list[tuple[str, float]]()
    cores = Cores(agenda, 1)

    def again(left: int) -> None:
        over.append(("many", agenda.now / SLICE_S))
        if left:
            cores.work(0.4 * SLICE_S, lambda: again(left - 1))

    cores.work(0.4 * SLICE_S, lambda: again(3))
    cores.work(0.5 * SLICE_S, lambda: over.append(("other", agenda.now / SLICE_S)))
    agenda.run()
    assert [name for name, _ in over] == ["many", "many", "other", "many", "many"]
    assert [when for _, when in over] == pytest.approx([0.4, 0.8, 1.5, 1.7, 2.1])


def test_a_processor_passes_on_when_work_at_once_ends() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(0.25 * SLICE_S, lambda: over.append(agenda.now / SLICE_S))
    cores.work(0.25 * SLICE_S, lambda: over.append(agenda.now / SLICE_S))
    agenda.at(SLICE_S, lambda: cores.work(SLICE_S, lambda: over.append(agenda.now / SLICE_S)))
    agenda.run()
    assert over == pytest.approx([0.25, 0.5, 2.0])


@pytest.mark.parametrize("start", ["work", "spend"])
def test_a_thread_that_wakes_an_idle_processor_takes_longer(start: str) -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1, wake_s=0.25 * SLICE_S)

    def begin(seconds: float, woken: bool) -> None:
        def ended() -> None:
            over.append(agenda.now / SLICE_S)

        if getattr(cores, start)(seconds, ended, woken):
            ended()

    agenda.at(0.0, lambda: begin(0.5 * SLICE_S, True))
    agenda.at(0.5 * SLICE_S, lambda: begin(0.5 * SLICE_S, True))  # the processor is busy
    agenda.at(2.0 * SLICE_S, lambda: begin(0.5 * SLICE_S, False))
    agenda.run()
    assert over == pytest.approx([0.75, 1.25, 2.5])


def test_the_rest_of_a_slice_is_not_left_to_later_work() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(0.25 * SLICE_S, lambda: None)

    def two() -> None:
        for _ in range(2):
            cores.work(SLICE_S, lambda: over.append(agenda.now / SLICE_S))

    agenda.at(SLICE_S, two)
    agenda.run()
    assert over == pytest.approx([2.0, 3.0])
