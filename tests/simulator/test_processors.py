from __future__ import annotations

import pytest

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.processors import Cores


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
    assert over == pytest.approx(ends)


def test_short_work_does_not_wait_for_the_end_of_long_work() -> None:
    agenda, over = Agenda(), list[tuple[str, float]]()
    cores = Cores(agenda, 1)
    cores.work(10.0, lambda: over.append(("long", agenda.now)))
    agenda.at(4.0, lambda: cores.work(0.5, lambda: over.append(("short", agenda.now))))
    agenda.run()
    assert over == [("short", 5.0), ("long", 10.5)]


def test_a_processor_is_free_again() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(1.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.at(5.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.run()
    assert over == [2.0, 6.0]
