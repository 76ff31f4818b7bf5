from __future__ import annotations

import pytest

from wingbeat.simulator.agenda import Agenda, Cores


def test_everything_is_done_in_the_order_of_time_and_then_of_entry() -> None:
    agenda = Agenda()
    done: list[tuple[float, str]] = []

    def note(name: str) -> None:
        done.append((agenda.now, name))

    def again() -> None:
        note("first")
        agenda.at(1.0, lambda: note("entered at this moment"))
        agenda.at(3.0, lambda: note("last"))

    agenda.at(2.0, lambda: note("late"))
    agenda.at(1.0, again)
    agenda.at(1.0, lambda: note("second"))
    agenda.run()
    assert done == [
        (1.0, "first"),
        (1.0, "second"),
        (1.0, "entered at this moment"),
        (2.0, "late"),
        (3.0, "last"),
    ]


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
