"""Processors that several hosts share: who waits, and for how long."""

from __future__ import annotations

import pytest

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cores import Cores


@pytest.mark.parametrize(
    ("count", "ends"),
    [(None, [1.0, 2.0, 3.0]), (3, [1.0, 2.0, 3.0]), (2, [1.0, 2.0, 4.0]), (1, [1.0, 3.0, 6.0])],
)
def test_work_waits_for_a_processor_in_turn(count: int | None, ends: list[float]) -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, count)
    for seconds in (1.0, 2.0, 3.0):
        cores.work(seconds, lambda: over.append(agenda.now))
    agenda.run()
    assert over == ends


def test_a_processor_is_free_again() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(1.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.at(5.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.run()
    assert over == [2.0, 6.0]
